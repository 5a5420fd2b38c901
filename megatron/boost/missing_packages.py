"""The optional packages that Megatron's defaults call for, apex and Transformer Engine: a run that
does not say that one is missing ends in an error while the model is built."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from megatron.boost.flags import is_given


def flags_for_missing_packages(argv: Sequence[str], our_layers: bool) -> list[str]:
    """The flags that do without what is not installed, those that `argv` has left out.

    apex computes the weight gradient of the head, whatever the layers are, and the softmax of
    Megatron's local attention; Transformer Engine RoPE and, of Megatron's own layers, everything.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.common.embeddings.rope_utils import fused_apply_rotary_pos_emb

    flags = []
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        flags.append("--no-gradient-accumulation-fusion")
    if importlib.util.find_spec("scaled_masked_softmax_cuda") is None:
        flags.append("--no-masked-softmax-fusion")
    if fused_apply_rotary_pos_emb is None:
        flags.append("--no-rope-fusion")
    if not our_layers and not HAVE_TE:
        flags += ["--transformer-impl=local", "--no-persist-layer-norm"]
    return [flag for flag in flags if not is_given(argv, flag.partition("=")[0])]

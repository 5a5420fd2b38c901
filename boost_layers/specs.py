"""From settings to Megatron layer specs: the package's entry for other programs.

    GPTModel(config, low_rank_spec(config, LowRankConfig(arch="cola", rank=1024)), …)

or, in an unmodified Megatron-LM checkout, `pretrain_gpt.py --spec boost_layers.specs gpt_spec`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from boost_layers.attention import SdpaCoreAttention, SelfAttention
from boost_layers.config import LowRankConfig
from boost_layers.layer import LowRankLayer, LowRankLayerSubmodules
from boost_layers.mlp import GatedMLP
from boost_layers.norm import FinalNorm
from boost_layers.projection import (
    BtpProjections,
    FullRankProjections,
    Projections,
    VanillaProjections,
)
from boost_layers.validation import takes_transformer_engine, validate_model

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "BOOST_LOW_RANK"
"""Holds the settings of `gpt_spec`, `field=value` pairs of `LowRankConfig` joined by commas."""


def projections_class(low_rank: LowRankConfig) -> type[Projections]:
    """The tensor-parallel strategy that the settings ask for."""
    if low_rank.arch == "dense":
        return FullRankProjections
    return BtpProjections if low_rank.tp == "btp" else VanillaProjections


def core_attention_class(low_rank: LowRankConfig) -> type:
    """The core attention that the settings ask for; `auto` takes Transformer Engine where it is
    installed and the device is CUDA.

    Raises:
        ValueError: if Transformer Engine is asked for and absent, or is asked for together with
            replicated vanilla attention, which it cannot run.
    """
    choice = low_rank.core_attention
    if choice in ("te", "local") and low_rank.replicated_attention:
        raise ValueError(
            f"--core-attention {choice}: it takes a rank's own heads only, and "
            "--low-rank-vanilla-attention is replicated; nearest legal value: sdpa"
        )
    if choice == "te" and not HAVE_TE:
        raise ValueError(
            "--core-attention te: Transformer Engine is not installed; nearest legal value: sdpa"
        )
    if choice == "local":
        return DotProductAttention
    return TEDotProductAttention if takes_transformer_engine(low_rank) else SdpaCoreAttention


def layer_spec(low_rank: LowRankConfig) -> ModuleSpec:
    """The spec of one layer, for programs that put their own block together."""
    return ModuleSpec(
        module=LowRankLayer,
        params={"low_rank": low_rank},
        submodules=LowRankLayerSubmodules(
            projections=projections_class(low_rank),
            self_attention=SelfAttention,
            core_attention=core_attention_class(low_rank),
            mlp=GatedMLP,
        ),
    )


def low_rank_spec(
    transformer_config: TransformerConfig,
    low_rank: LowRankConfig,
    vp_stage: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> TransformerBlockSubmodules:
    """The layers and the final norm of this pipeline stage, for `GPTModel`.

    Args:
        transformer_config: the model; with BTP and TP > 1 its `sequence_parallel` must be set.
        low_rank: the settings; `arch` "none" is Megatron's own layer and has no spec here.
        vp_stage: the virtual pipeline stage, for interleaved pipelines.
        pg_collection: process groups; default: Megatron's global ones.

    Raises:
        ValueError: for settings or sizes that the layers cannot run.
    """
    validate_model(low_rank, transformer_config)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "cp"])
    layers = get_num_layers_to_build(transformer_config, vp_stage, groups.pp.rank())
    final_norm = partial(
        FinalNorm, tp_group=groups.tp, hidden_sharded=projections_class(low_rank).hidden_sharded
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(low_rank)] * layers, layer_norm=final_norm
    )


def gpt_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """For `--spec boost_layers.specs gpt_spec`; the settings come from `BOOST_LOW_RANK`, by
    default `arch=cola,ratio=0.25`, and the seed of the layers, unless it is among them, from
    Megatron's `--seed`.

    Switches sequence parallelism on for BTP, as `pretrain_gpt.py` of this project does. What a spec
    has no hand in stays Megatron's: the initial embedding and head, the padded vocabulary, and
    flags that are not part of the transformer's configuration.

    Raises:
        ValueError: for settings or sizes that the layers cannot run; Megatron calls this while it
            builds the model, when its process groups exist.
    """
    transformer = model_config.transformer
    # The one field of the configuration that Megatron sets from --seed.
    low_rank = settings_from_environment(seed=transformer.inference_sampling_seed)
    tp_size = transformer.tensor_model_parallel_size
    if projections_class(low_rank) is BtpProjections and tp_size > 1:
        if not transformer.sequence_parallel:
            logger.warning("BTP runs with sequence-parallel borders: sequence_parallel is now on")
        transformer.sequence_parallel = True
    return low_rank_spec(transformer, low_rank, vp_stage)


def settings_from_environment(**defaults: Any) -> LowRankConfig:
    """`LowRankConfig` from `BOOST_LOW_RANK`; `arch` is "cola" unless it says otherwise.

    Args:
        defaults: values of other settings that it leaves out.

    Raises:
        ValueError: for an unknown name or a value that is not of the field's type.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    hints = get_type_hints(LowRankConfig)
    names = [f.name for f in fields(LowRankConfig)]
    values: dict[str, Any] = {"arch": "cola", **defaults}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = pair.partition("=")
        if name not in names:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}: unknown setting {name!r}; known: {', '.join(names)}"
            )
        values[name] = _parse(name, value, hints[name])
    return LowRankConfig(**values)


def _parse(name: str, value: str, hint: Any) -> Any:
    """A setting's text as a value of its type."""
    choices = get_args(hint)
    if choices and all(isinstance(c, str) for c in choices):
        if value not in choices:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}: {name}={value}; legal values: {', '.join(choices)}"
            )
        return value
    if str in choices:
        return value
    if hint is bool:
        if value.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: {name}={value}; legal values: true, false")
        return value.lower() in ("true", "1")
    number = float if hint is float else int
    try:
        return number(value)
    except ValueError:
        raise ValueError(
            f"{ENVIRONMENT_VARIABLE}: {name}={value} is not a number of type {number.__name__}"
        ) from None

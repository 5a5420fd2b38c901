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
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from boost_layers.attention import SdpaCoreAttention, SelfAttention
from boost_layers.config import LowRankConfig, words_of
from boost_layers.embedding import fuse_embedding_border
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
from boost_layers.vocabulary import initialize_vocabulary, mask_padded_vocabulary

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
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


def layer_spec(low_rank: LowRankConfig, index: int = 0) -> ModuleSpec:
    """The spec of the layer number `index`, counted from 0 over the whole model, for programs that
    put their own block together."""
    return ModuleSpec(
        module=LowRankLayer,
        params={"low_rank": low_rank},
        submodules=LowRankLayerSubmodules(
            projections=projections_class(low_rank.of_layer(index)),
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
    first = get_transformer_layer_offset(transformer_config, vp_stage, groups.pp.rank())
    last = low_rank.of_layer(transformer_config.num_layers - 1)
    final_norm = partial(FinalNorm, tp_group=groups.tp, hidden_sharded=last.hidden_sharded)
    if low_rank.crossing and groups.pp.size() > 1:
        if layers == 0:
            raise ValueError(
                "--low-rank-arch lax: a pipeline stage without layers cannot pass latents on; "
                "nearest legal value: a layout with a layer in every stage"
            )
        # The tensor between stages is wider than [s/T, b, d]: Megatron sends its shape ahead.
        transformer_config.variable_seq_lengths = True
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(low_rank, first + i) for i in range(layers)], layer_norm=final_norm
    )


def finish_model(model: GPTModel, vocab_size: int, seed: int = 1234) -> GPTModel:
    """What a spec cannot do for the model that was built of it: initial embedding and head that do
    not depend on the layout, a head that gives the padded tokens no probability, and a fused border
    between the embedding and the first layer.

    For programs that build their `GPTModel` themselves, before they wrap it for data parallelism;
    `pretrain_gpt.py` does the same. No weights are drawn where `perform_initialization` is off.

    Args:
        model: the model of this (virtual) pipeline stage, built for `vocab_size` tokens or more.
        vocab_size: the number of tokens that exist.
        seed: that of `LowRankConfig`.

    Returns:
        `model`.

    Raises:
        ValueError: for a vocabulary larger than the model's.
    """
    tp_group = model.pg_collection.tp
    if model.config.perform_initialization:
        initialize_vocabulary(model, model.config, vocab_size, seed, tp_group)
    mask_padded_vocabulary(model, vocab_size, tp_group)
    fuse_embedding_border(model)
    return model


def gpt_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """For `--spec boost_layers.specs gpt_spec`; the settings come from `BOOST_LOW_RANK`, by
    default `arch=cola,ratio=0.25`, and the seed of the layers, unless it is among them, from
    Megatron's `--seed`.

    Switches sequence parallelism on for BTP, as `pretrain_gpt.py` of this project does. What a spec
    has no hand in stays Megatron's: the initial embedding and head, the padded vocabulary, and
    flags that are not part of the transformer's configuration.

    Raises:
        ValueError: for settings or sizes that the layers cannot run, and for annealing, which
            needs the training loop; Megatron calls this while it builds the model, when its
            process groups exist.
    """
    transformer = model_config.transformer
    # The one field of the configuration that Megatron sets from --seed.
    low_rank = settings_from_environment(seed=transformer.inference_sampling_seed)
    if low_rank.act_anneal:
        raise ValueError(
            f"{ENVIRONMENT_VARIABLE}: act_anneal={low_rank.act_anneal}: a spec does not see the "
            "steps; nearest legal value: 0 (pretrain_gpt.py of this project anneals)"
        )
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
    settings = {setting.name: setting for setting in fields(LowRankConfig)}
    values: dict[str, Any] = {"arch": "cola", **defaults}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = pair.partition("=")
        if name not in settings:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}: unknown setting {name!r}; known: {', '.join(settings)}"
            )
        values[name] = _parse(name, value, words_of(settings[name]), hints[name])
    return LowRankConfig(**values)


def _parse(name: str, value: str, words: tuple[str, ...], hint: Any) -> Any:
    """A setting's text as a value of its type, one of `words` where there are any."""
    if words:
        if value not in words:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}: {name}={value}; legal values: {', '.join(words)}"
            )
        return value
    if str in get_args(hint):
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

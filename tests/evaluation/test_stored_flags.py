"""From the arguments in a checkpoint to a command line that makes the same model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.evaluation.stored_flags import flags_of_model
from megatron.boost.flags import add_flags
from megatron.boost.megatron_flags import megatron_parser

SIZES = "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32"
COMMAND_LINES = [
    "",
    "--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --rotary-base 5000 "
    "--use-rope-scaling --rope-scaling-factor 32.0 --position-embedding-type rope --bf16 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
    "--make-vocab-size-divisible-by 7 --rotary-seq-len-interpolation-factor 4 --kv-channels 16",
    "--position-embedding-type yarn --yarn-beta-fast 31.0 --yarn-original-max-position-embeddings "
    "4096 --no-yarn-correction-range-round-to-int --mscale 0.5 --qk-layernorm --fp16 "
    "--window-size 4,0 --attention-softmax-in-fp32 --rotary-interleaved --squared-relu "
    "--apply-residual-connection-post-layernorm --add-qkv-bias --ffn-hidden-size 96",
    "--low-rank-arch lax --lax-base svd --low-rank-ranks q=8,k=4 --low-rank-layers 1-2",
]
# Of a run, not of its model: nothing of this may come back.
RUN = (
    "--tensor-model-parallel-size 4 --sequence-parallel --recompute-granularity full --seed 7 "
    "--micro-batch-size 3 --lr 0.1 --use-distributed-optimizer --low-rank-tp vanilla"
)


def parsed(flags: list[str]) -> Namespace:
    parser = megatron_parser()
    add_flags(parser, LowRankConfig, "low-rank (BOOST)")
    return parser.parse_args(flags)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_the_models_flags_come_back_and_the_runs_do_not(line: str) -> None:
    model = f"{SIZES} {line}".split()
    found = flags_of_model("--load here", parsed([*model, *RUN.split()]))
    assert vars(parsed(found)) == vars(parsed(model))


def test_an_older_checkpoint_lacks_settings_that_came_later() -> None:
    model = f"{SIZES} {COMMAND_LINES[1]}".split()
    stored = parsed(model)
    for name in ("low_rank_arch", "glu_linear_offset", "softmax_type"):
        delattr(stored, name)
    assert vars(parsed(flags_of_model("--load here", stored))) == vars(parsed(model))


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--num-experts 4", r"a mixture of experts \(num_experts 4\)"),
        ("--multi-latent-attention", "multi-latent attention"),
        ("--spec some.module spec", "a layer spec of the user's"),
    ],
)
def test_other_kinds_of_models_are_refused(flags: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"--load {Path('here')}: the model has {kind}"):
        flags_of_model("--load here", parsed(flags.split()))

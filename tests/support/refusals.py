"""Command lines of `pretrain_gpt.py` that are refused, and the nearest ones that are not."""

from __future__ import annotations

from dataclasses import dataclass

COLA = "--low-rank-arch cola"
LAX = "--low-rank-arch lax"
DENSE = "--low-rank-arch dense"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VANILLA = f"{COLA} --low-rank-tp vanilla {TP2}"


@dataclass(frozen=True)
class Refusal:
    """A command line, how the message about it begins and ends, and one with what it proposes."""

    flags: str
    beginning: str
    proposal: str
    legal: str | None
    """The flags corrected as proposed; None where the proposal is no other value."""
    ranks: int = 1


SIZES = [
    Refusal(
        f"{COLA} {TP2} --num-attention-heads 5 --hidden-size 40",
        "--num-attention-heads 5: are split over --tensor-model-parallel-size 2",
        "6",
        f"{COLA} {TP2} --num-attention-heads 6 --hidden-size 48",
        2,
    ),
    Refusal(
        f"{COLA} {TP2} --ffn-hidden-size 49",
        "--ffn-hidden-size 49: is split over --tensor-model-parallel-size 2",
        "50",
        f"{COLA} {TP2} --ffn-hidden-size 50",
        2,
    ),
    Refusal(
        f"{COLA} {TP2} --hidden-size 33 --kv-channels 8",
        "--hidden-size 33: is split over --tensor-model-parallel-size 2",
        "34",
        f"{COLA} {TP2} --hidden-size 34 --kv-channels 8",
        2,
    ),
    Refusal(
        f"{COLA} --hidden-size 36",
        "--hidden-size 36: must be a multiple of 2 times --num-attention-heads 4",
        "40 (or set --kv-channels)",
        f"{COLA} --hidden-size 40",
    ),
    Refusal(f"{COLA} --kv-channels 7", "--kv-channels 7: ", "8", f"{COLA} --kv-channels 8"),
    Refusal(
        f"{COLA} {TP2} --seq-length 31",
        "--seq-length 31: is split at the borders over --tensor-model-parallel-size 2",
        "32",
        f"{COLA} {TP2} --seq-length 32",
        2,
    ),
    Refusal(
        f"{DENSE} {TP2} --seq-length 31 --sequence-parallel",
        "--seq-length 31: with --sequence-parallel it is split over",
        "32",
        f"{DENSE} {TP2} --seq-length 32 --sequence-parallel",
        2,
    ),
    Refusal(
        f"{COLA} {TP2} --group-query-attention --num-query-groups 1",
        "--num-query-groups 1: must divide --num-attention-heads 4 and are split over "
        "--tensor-model-parallel-size 2",
        "2",
        f"{COLA} {TP2} --group-query-attention --num-query-groups 2",
        2,
    ),
    Refusal(
        f"{COLA} --group-query-attention --num-query-groups 3",
        "--num-query-groups 3: must divide --num-attention-heads 4",
        "2",
        f"{COLA} --group-query-attention --num-query-groups 2",
    ),
    Refusal(
        f"{VANILLA} --low-rank-rank 7",
        "--low-rank-rank 7: vanilla tensor parallelism splits the rank over "
        "--tensor-model-parallel-size 2",
        "8",
        f"{VANILLA} --low-rank-rank 8",
        2,
    ),
    Refusal(
        f"{VANILLA} --low-rank-ratio 0.22",
        "--low-rank-ratio 0.22 (rank 7): vanilla",
        "--low-rank-rank 8",
        f"{VANILLA} --low-rank-rank 8",
        2,
    ),
    Refusal(
        f"{COLA} --low-rank-mlp-rank 40",
        "--low-rank-mlp-rank 40: larger than",
        "32",
        f"{COLA} --low-rank-mlp-rank 32",
    ),
    Refusal(
        f"{COLA} --low-rank-rank 0",
        "--low-rank-rank 0: a rank is a positive integer",
        "1",
        f"{COLA} --low-rank-rank 1",
    ),
    Refusal(
        f"{COLA} --low-rank-ratio 1.5",
        "--low-rank-ratio 1.5: must lie above 0 and not above 1",
        "1.0",
        f"{COLA} --low-rank-ratio 1.0",
    ),
    Refusal(
        f"{COLA} {PP2} --num-layers 3",
        "--num-layers 3: is split over 2 pipeline stages",
        "4",
        f"{COLA} {PP2} --num-layers 4",
        2,
    ),
    Refusal(
        f"{COLA} {PP2} --num-layers 6 --num-layers-per-virtual-pipeline-stage 2",
        "--num-layers 6: is split over 2 pipeline stages in chunks of 2 layers",
        "8",
        f"{COLA} {PP2} --num-layers 8 --num-layers-per-virtual-pipeline-stage 2",
        2,
    ),
    Refusal(
        f"{LAX} {PP2} --num-layers 2 --pipeline-model-parallel-layout Ett|L",
        "--pipeline-model-parallel-layout Ett|L: with --low-rank-arch lax every stage needs",
        "one with the E and the L beside layers",
        f"{LAX} {PP2} --num-layers 2 --pipeline-model-parallel-layout Et|tL",
        2,
    ),
    Refusal(
        f"{LAX} {PP2} --num-layers 1 --account-for-embedding-in-pipeline-split",
        "--num-layers 1: with --low-rank-arch lax the stages of the embedding",
        "3",
        f"{LAX} {PP2} --num-layers 3 --account-for-embedding-in-pipeline-split",
        2,
    ),
    Refusal(
        f"{LAX} {PP2} --num-layers 3 --account-for-embedding-in-pipeline-split "
        "--num-layers-per-virtual-pipeline-stage 1",
        "--num-layers 3: with --low-rank-arch lax the stages of the embedding",
        "7",
        f"{LAX} {PP2} --num-layers 7 --account-for-embedding-in-pipeline-split "
        "--num-layers-per-virtual-pipeline-stage 2",
        2,
    ),
    Refusal(
        f"{COLA} --train-iters -3",
        "--train-iters -3: there is nothing to train",
        "1",
        f"{COLA} --train-iters 1",
    ),
    Refusal(
        f"{COLA} --rampup-batch-size 8 8 48",
        "--rampup-batch-size 8 8 48: not supported",
        "--step-batch-size-schedule",
        None,
    ),
    Refusal(
        f"{COLA} --num-layers 0", "--num-layers 0: must be positive", "1", f"{COLA} --num-layers 1"
    ),
    Refusal(
        f"{COLA} {TP2} {PP2}",
        "--tensor-model-parallel-size 2 times --pipeline-model-parallel-size 2: does not divide "
        "the 3 ranks of this run",
        "start 4 ranks",
        None,
        3,
    ),
]
WORDS = [
    Refusal(
        f"{COLA} --low-rank-rato 0.5",
        "--low-rank-rato: no such flag",
        "--low-rank-ratio",
        f"{COLA} --low-rank-ratio 0.5",
    ),
    Refusal(
        f"{COLA} --tensor-parallel-size 2",
        "--tensor-parallel-size: no such flag",
        "--tensor-model-parallel-size",
        f"{COLA} --tensor-model-parallel-size 1",
    ),
    Refusal(
        "--low-rank-arch colla",
        "--low-rank-arch colla: legal values are none, dense, cola",
        "cola",
        COLA,
    ),
    Refusal(
        f"{COLA} --lr-decay-style cosin",
        "--lr-decay-style cosin: legal values are ",
        "cosine",
        f"{COLA} --lr-decay-style cosine",
    ),
    Refusal(
        f"{DENSE} --low-rank-act silu",
        "--low-rank-act silu: ",
        "auto",
        f"{DENSE} --low-rank-act auto",
    ),
    Refusal(
        f"{COLA} --hidden-dropout 0.1",
        "--hidden-dropout 0.1: low-rank layers have no dropout",
        "0.0",
        f"{COLA} --hidden-dropout 0.0",
    ),
    Refusal(
        f"{COLA} --attention-dropout 0.1",
        "--attention-dropout 0.1: low-rank layers have no dropout",
        "0.0",
        f"{COLA} --attention-dropout 0.0",
    ),
    Refusal(
        "--low-rank-rank 8",
        "--low-rank-rank: has no effect on Megatron's own layers (--low-rank-arch none)",
        "--low-rank-arch cola",
        f"{COLA} --low-rank-rank 8",
    ),
    Refusal(
        "--core-attention sdpa",
        "--core-attention: has no effect on Megatron's own layers",
        "--low-rank-arch cola",
        f"{COLA} --core-attention sdpa",
    ),
    Refusal(
        f"{DENSE} --low-rank-ratio 0.5",
        "--low-rank-ratio: has no effect on full-rank layers (--low-rank-arch dense)",
        "--low-rank-arch cola",
        f"{COLA} --low-rank-ratio 0.5",
    ),
    Refusal(
        f"{DENSE} --low-rank-tp btp",
        "--low-rank-tp: has no effect on full-rank layers",
        "--low-rank-arch cola",
        f"{COLA} --low-rank-tp btp",
    ),
    Refusal(
        f"{COLA} --low-rank-vanilla-attention sliced",
        "--low-rank-vanilla-attention: has no effect under --low-rank-tp btp",
        "--low-rank-tp vanilla",
        f"{COLA} --low-rank-tp vanilla --low-rank-vanilla-attention sliced",
    ),
    Refusal(
        f"{VANILLA} --low-rank-norm online",
        "--low-rank-norm: has no effect under --low-rank-tp vanilla",
        "--low-rank-tp btp",
        f"{COLA} {TP2} --low-rank-tp btp --low-rank-norm online",
        2,
    ),
    Refusal(
        f"{COLA} --lax-gate tensor",
        "--lax-gate: has no effect without a latent crossing (--low-rank-arch cola)",
        "--low-rank-arch lax",
        "--low-rank-arch lax --lax-gate tensor",
    ),
    Refusal(
        "--low-rank-arch svd --low-rank-act-anneal 0",
        "--low-rank-act-anneal: has no effect where φ is the identity",
        "--low-rank-act silu",
        "--low-rank-arch svd --low-rank-act silu --low-rank-act-anneal 0",
    ),
    Refusal(f"{VANILLA} --sequence-parallel", "--sequence-parallel: ", "leave it out", VANILLA, 2),
    Refusal(
        f"{COLA} --core-attention te",
        "--core-attention te: Transformer Engine is not installed",
        "sdpa",
        f"{COLA} --core-attention sdpa",
    ),
    Refusal(
        f"{COLA} --spec tests.support.stock_gpt train_stock_gpt",
        "--spec tests.support.stock_gpt train_stock_gpt: --low-rank-arch cola brings its own spec",
        "leave --spec out",
        COLA,
    ),
    Refusal(
        "--spec boost_layers.specs gpt_spec",
        "--spec boost_layers.specs gpt_spec: is for scripts other than this one",
        "--low-rank-arch cola",
        COLA,
    ),
    Refusal(
        f"{COLA} --train-iters 0",
        "--train-iters 0: there is nothing to train",
        "1",
        f"{COLA} --train-iters 1",
    ),
    Refusal(f"{COLA} --yaml-cfg run.yaml", "--yaml-cfg: ", "leave it out and pass flags", COLA),
]
# The named feature, and what stands for it where that is not to leave it out.
FEATURES = {
    "--add-qkv-bias": "",
    "--attention-backend flash": "--attention-backend auto",
    "--batch-invariant-mode": "",
    "--checkpoint-activations": "--recompute-activations",
    "--delay-wgrad-compute": "",
    "--init-model-with-meta-device": "",
    "--fine-grained-activation-offloading": "",
    "--log-max-attention-logit": "",
    "--moe-router-topk 4": "",
    "--mrope-section 2 3 3": "",
    "--no-position-embedding": "--position-embedding-type none",
    "--qk-clip": "",
    "--quick-geglu": "--swiglu",
    "--rope-type yarn": "",
    "--save-activations-interval 5": "",
    "--squared-relu": "--swiglu",
    "--symmetric-ar-type two_shot": "",
    "--tensor-parallel-num-weight-shards 2": "",
    "--tp-comm-overlap": "",
    "--use-transformer-engine-op-fuser": "",
    "--apply-layernorm-1p": "",
    "--apply-query-key-layer-scaling": "",
    "--apply-residual-connection-post-layernorm": "",
    "--attention-output-gate": "",
    "--context-parallel-size 2": "--context-parallel-size 1",
    "--cpu-offloading-num-layers 1": "--cpu-offloading-num-layers 0",
    "--cuda-graph-impl local": "--cuda-graph-impl none",
    "--fp8-format hybrid": "--bf16",
    "--glu-linear-offset 1": "--glu-linear-offset 0",
    "--hybrid-layer-pattern M*": "",
    "--init-method-xavier-uniform": "--init-method-std 0.02",
    "--mtp-num-layers 1": "",
    "--multi-latent-attention": "",
    "--no-rope-freq 2": "",
    "--normalization LayerNorm": "--normalization RMSNorm",
    "--num-experts 4": "",
    "--position-embedding-type learned_absolute": "--position-embedding-type rope",
    "--qk-l2-norm": "",
    "--qk-layernorm": "",
    "--recompute-granularity selective --recompute-modules mlp": (
        "--recompute-granularity selective --recompute-modules core_attn"
    ),
    "--reset-attention-mask": "",
    "--softmax-type learnable": "--softmax-type vanilla",
    "--use-megatron-fsdp": "--use-distributed-optimizer",
    "--use-mup": "",
    "--use-torch-fsdp2": "--use-distributed-optimizer",
    "--window-size 16,0": "",
}

"""The command line that trains a plan."""

from __future__ import annotations

from megatron.boost.accounting.sizes import Model
from megatron.boost.planner.layouts import Plan, Workload

_PRECISION = {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp32": []}


def launch_lines(plan: Plan, workload: Workload) -> list[str]:
    """torchrun and the flags of `pretrain_gpt.py`, a line for each kind; what is not the plan's
    (data, tokenizer, learning rate, length, checkpoints) is left to the user."""
    start = f"torchrun --nproc-per-node {min(plan.gpus, plan.cluster.gpus_per_node)}"
    if plan.layout.tensor_parallel > 1:
        # Megatron demands it before Blackwell, so that collectives start in the order of issue.
        start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {start}"
    if plan.nodes > 1:
        start += f" --nnodes {plan.nodes} --node-rank $NODE_RANK --master-addr $MASTER_ADDR"
    flags = [" ".join(line) for line in launch_flags(plan, workload) if line]
    return [f"{start} pretrain_gpt.py", *flags]


def launch_flags(plan: Plan, workload: Workload) -> list[list[str]]:
    """The flags of `pretrain_gpt.py` by kind: model, low rank, layout, batch."""
    return [
        _model_flags(plan.model, workload),
        _low_rank_flags(plan),
        _layout_flags(plan),
        _batch_flags(plan, workload),
    ]


def _model_flags(model: Model, workload: Workload) -> list[str]:
    flags = [
        *("--num-layers", str(model.num_layers)),
        *("--hidden-size", str(model.hidden_size)),
        *("--ffn-hidden-size", str(model.ffn_hidden_size)),
        *("--num-attention-heads", str(model.num_attention_heads)),
    ]
    if model.num_query_groups != model.num_attention_heads:
        groups = str(model.num_query_groups)
        flags += ["--group-query-attention", "--num-query-groups", groups]
    if model.kv_channels * model.num_attention_heads != model.hidden_size:
        flags += ["--kv-channels", str(model.kv_channels)]
    length = str(workload.sequence_length)
    flags += ["--seq-length", length, "--max-position-embeddings", length]
    flags += ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"]
    flags += ["--disable-bias-linear", *workload.function_flags]
    return flags if model.tied else [*flags, "--untie-embeddings-and-output-weights"]


def _low_rank_flags(plan: Plan) -> list[str]:
    if plan.strategy == "full-rank":
        return ["--low-rank-arch", "dense"]
    settings, hidden = plan.model.low_rank, plan.model.hidden_size
    ranks = {settings.rank_of(name, hidden) for name in ("q_proj", "gate_proj")}
    flags = ["--low-rank-arch", settings.arch, "--low-rank-tp", settings.tp]
    if len(ranks) == 1:
        flags += ["--low-rank-rank", str(ranks.pop())]
    else:
        for flag, name in (("attn", "q_proj"), ("mlp", "gate_proj")):
            flags += [f"--low-rank-{flag}-rank", str(settings.rank_of(name, hidden))]
    return [*flags, "--low-rank-recompute"] if settings.recompute else flags


def _layout_flags(plan: Plan) -> list[str]:
    layout = plan.layout
    flags = [
        *("--tensor-model-parallel-size", str(layout.tensor_parallel)),
        *("--pipeline-model-parallel-size", str(layout.pipeline_parallel)),
    ]
    if layout.virtual_stages > 1:
        of_chunk = len(layout.chunks(plan.model, 0)[0])
        flags += ["--num-layers-per-virtual-pipeline-stage", str(of_chunk)]
    if layout.sequence_parallel:
        flags += ["--sequence-parallel"]
    if layout.data_parallel > 1:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if layout.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        flags += ["--recompute-num-layers", "1"]
    return flags


def _batch_flags(plan: Plan, workload: Workload) -> list[str]:
    return [
        *("--micro-batch-size", str(plan.layout.micro_batch_size)),
        *("--global-batch-size", str(workload.global_batch)),
        *_PRECISION[workload.dtype],
    ]

"""`tools/plan.py`: the layouts of a model on a cluster, the fastest first, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.boost.accounting.parameters import model_parameters
from megatron.boost.planner.break_even import break_even_ratio, gemm_break_even_ratio
from megatron.boost.planner.cluster import Cluster
from megatron.boost.planner.launch_flags import launch_lines
from megatron.boost.planner.layouts import Plan, Strategy, Workload, fastest, find_plans
from megatron.boost.planner.memory import GIB
from megatron.boost.planner.reports.report import Report

_NAMES: dict[Strategy, str] = {"btp": "BTP", "full-rank": "full-rank", "vanilla": "vanilla"}


def plan_report(
    workload: Workload, cluster: Cluster, gpus: int, strategies: Sequence[Strategy], top: int
) -> Report:
    """The ranking, the break-down of the best of each kind, what follows, and the flags."""
    plans, too_large = find_plans(workload, cluster, gpus, strategies)
    report = Report()
    report.say(_heading(workload, cluster, gpus))
    families = _families(plans)
    shown = families[:top]
    contenders = _contenders(plans)
    shown += [plan for plan in contenders.values() if plan not in shown]
    report.table(
        f"The fastest layout of each TP and PP; {len(plans)} layouts fit, {too_large} more would "
        f"need more than {cluster.memory.capacity_gib:g} GiB",
        _COLUMNS,
        [_row(plan) for plan in shown],
    )
    report.say(_LEGEND)
    report.table(
        "Where the time goes, ms of an iteration",
        ["", *contenders],
        [
            [
                part.replace("_", " "),
                *(f"{1e3 * plan.estimate.parts()[part]:,.0f}" for plan in contenders.values()),
            ]
            for part in plans[0].estimate.parts()
        ],
    )
    report.table(
        "Memory of the fullest GPU, GiB",
        ["", *contenders],
        [
            [part, *(f"{getattr(p.memory, part) / GIB:.1f}" for p in contenders.values())]
            for part in ("state", "activations", "transient", "reserved", "total")
        ],
    )
    for sentence in _conclusions(plans, contenders, strategies):
        report.say(sentence)
    low_rank = fastest([p for p in plans if p.strategy != "full-rank"])
    commands = {"the fastest": plans[0]}
    if low_rank is not None and low_rank is not plans[0]:
        commands = {"the fastest, which is full-rank": plans[0], "the fastest low-rank": low_rank}
    for what, plan in commands.items():
        report.say(f"To launch {what}. Yours to add: {_YOURS}.")
        report.say(" \\\n    ".join(launch_lines(plan, workload)))
    report.flat = _flat(plans, too_large, contenders) | {
        "launch": " ".join(launch_lines(plans[0], workload))
    }
    for position, plan in enumerate(families, start=1):
        report.flat |= _flat_layout(f"layout_{position}", plan)
    return report


_YOURS = "data, tokenizer, --lr, --train-iters, --eval-interval, --save"

_LEGEND = (
    "virtual: chunks of a stage (interleaved pipeline). of them: micro-batches of a data-parallel "
    "rank in an iteration. SP: Megatron's sequence parallelism. no overlap: s/iteration with the "
    "gradients reduced after the backward instead of beside it. MFU: the model's operations, "
    "without what is computed again, over the GPUs' peak. host: the GPU waits for launches. "
    "transient: what a layer's or the loss's backward needs for a moment. Times that differ by "
    "less than the model's error (some 3 %) are equal."
)


def _families(plans: Sequence[Plan]) -> list[Plan]:
    """The fastest plan of each strategy, TP and PP, the fastest first."""
    found: dict[tuple[str, int, int], Plan] = {}
    for plan in plans:
        layout = plan.layout
        found.setdefault((plan.strategy, layout.tensor_parallel, layout.pipeline_parallel), plan)
    return list(found.values())


def _heading(workload: Workload, cluster: Cluster, gpus: int) -> str:
    model = workload.model
    settings = model.low_rank
    rank = settings.rank_of("q_proj", model.hidden_size)
    return (
        f"{settings.arch} with rank {rank}, d {model.hidden_size}, f {model.ffn_hidden_size}, "
        f"{model.num_layers} layers: {model_parameters(model) / 1e9:.2f} B parameters, full-rank "
        f"{model_parameters(model.dense_equivalent()) / 1e9:.2f} B. {gpus} x {cluster.name}, "
        f"{workload.global_batch} sequences of {workload.sequence_length}, {workload.dtype}."
    )


_COLUMNS = [
    "model",
    "TP",
    "PP",
    "virtual",
    "DP",
    "micro-batch",
    "of them",
    "recompute",
    "SP",
    "s/iteration",
    "no overlap",
    "tokens/s/GPU",
    "MFU %",
    "GiB",
]


def _row(plan: Plan) -> list[str]:
    layout = plan.layout
    return [
        name_of(plan),
        str(layout.tensor_parallel),
        str(layout.pipeline_parallel),
        str(layout.virtual_stages),
        str(layout.data_parallel),
        str(layout.micro_batch_size),
        str(layout.micro_batches),
        plan.recompute,
        "yes" if layout.sequence_parallel else "no",
        f"{plan.seconds:.3f}",
        f"{plan.seconds_without_overlap:.3f}" if layout.data_parallel > 1 else "–",
        f"{plan.tokens_per_second / plan.gpus:,.0f}",
        f"{100 * plan.utilisation:.0f}",
        f"{plan.memory.total / GIB:.1f}",
    ]


def name_of(plan: Plan) -> str:
    """Low-rank without tensor parallelism is neither BTP nor vanilla."""
    if plan.strategy != "full-rank" and plan.layout.tensor_parallel == 1:
        return "low-rank"
    return _NAMES[plan.strategy]


def _contenders(plans: Sequence[Plan]) -> dict[str, Plan]:
    """The fastest of each kind that there is."""
    found: dict[str, Plan] = {}
    for plan in plans:
        kind = name_of(plan)
        if kind == "low-rank":
            kind = "low-rank, no TP"
        found.setdefault(kind, plan)
    return found


def _conclusions(
    plans: Sequence[Plan], contenders: dict[str, Plan], strategies: Sequence[Strategy]
) -> list[str]:
    alone = contenders.get("low-rank, no TP")
    btp = contenders.get("BTP")
    full_rank = contenders.get("full-rank")
    sentences = []
    if alone is not None and btp is not None:
        layout = alone.layout
        kind = (
            "data parallelism" if layout.pipeline_parallel == 1 else "data and pipeline parallelism"
        )
        if alone.seconds < btp.seconds:
            sentences.append(
                f"{kind.capitalize()} without tensor parallelism is faster here: "
                f"{alone.seconds:.3f} s against {btp.seconds:.3f} s with BTP at TP "
                f"{btp.layout.tensor_parallel} ({btp.seconds / alone.seconds:.2f} times). BTP pays "
                "when memory or the batch leaves no room for it."
            )
        else:
            sentences.append(
                f"BTP at TP {btp.layout.tensor_parallel} is {alone.seconds / btp.seconds:.2f} "
                f"times as fast as {kind} without tensor parallelism."
            )
    elif btp is not None:
        sentences.append("Without tensor parallelism no low-rank layout fits in memory.")
    low_rank = fastest(plans, "btp") or fastest(plans, "vanilla")
    if full_rank is not None and low_rank is not None:
        ratio = full_rank.seconds / low_rank.seconds
        limit = break_even_ratio(low_rank, full_rank)
        verdict = (
            f"The low-rank model is {ratio:.2f} times as fast as the full-rank one"
            if ratio >= 1
            else f"At this rank the low-rank model is slower, {1 / ratio:.2f} times the full-rank "
            "one's time"
        )
        sentences.append(
            f"{verdict}, each in its fastest layout. In these layouts, memory apart, low-rank is "
            f"faster up to a rank of {limit:.2f}·d; the projections' operations alone are fewer up "
            f"to {gemm_break_even_ratio(low_rank.model):.2f}·d."
        )
    elif low_rank is not None and "full-rank" in strategies:
        sentences.append("No full-rank layout fits in memory.")
    return sentences


def _flat(plans: Sequence[Plan], too_large: int, contenders: dict[str, Plan]) -> dict[str, object]:
    best = plans[0]
    flat: dict[str, object] = {
        "layouts_that_fit": len(plans),
        "layouts_that_do_not_fit": too_large,
        "strategy": best.strategy,
        "tensor_model_parallel_size": best.layout.tensor_parallel,
        "pipeline_model_parallel_size": best.layout.pipeline_parallel,
        "virtual_stages": best.layout.virtual_stages,
        "data_parallel_size": best.layout.data_parallel,
        "micro_batch_size": best.layout.micro_batch_size,
        "micro_batches": best.layout.micro_batches,
        "recompute": best.recompute,
        "sequence_parallel": best.layout.sequence_parallel,
        "memory_gib": best.memory.total / GIB,
        "tokens_per_second": best.tokens_per_second,
    }
    low_rank, full_rank = fastest(plans, "btp"), fastest(plans, "full-rank")
    if low_rank is not None and full_rank is not None:
        flat["full_rank_over_low_rank"] = full_rank.seconds / low_rank.seconds
        flat["break_even_rank_over_hidden"] = break_even_ratio(low_rank, full_rank)
    for kind, plan in contenders.items():
        key = kind.replace(", no TP", "_without_tp").replace("-", "_").lower()
        flat[f"{key}_seconds_per_iteration"] = plan.seconds
        flat[f"{key}_mfu_percent"] = 100 * plan.utilisation
        for part, seconds in plan.estimate.parts().items():
            flat[f"{key}_{part}_seconds"] = seconds
    return flat


def _flat_layout(key: str, plan: Plan) -> dict[str, object]:
    layout = plan.layout
    return {
        f"{key}_strategy": plan.strategy,
        f"{key}_tensor_model_parallel_size": layout.tensor_parallel,
        f"{key}_pipeline_model_parallel_size": layout.pipeline_parallel,
        f"{key}_virtual_stages": layout.virtual_stages,
        f"{key}_data_parallel_size": layout.data_parallel,
        f"{key}_micro_batch_size": layout.micro_batch_size,
        f"{key}_recompute": plan.recompute,
        f"{key}_seconds_per_iteration": plan.seconds,
        f"{key}_seconds_per_iteration_without_overlap": plan.seconds_without_overlap,
        f"{key}_memory_gib": plan.memory.total / GIB,
    }

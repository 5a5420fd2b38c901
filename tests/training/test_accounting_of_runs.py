"""What a run logs of its FLOP/s and memory: our layers, and Megatron around them."""

from __future__ import annotations

import contextlib
import io
import re
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import run_ranks
from tests.support.runs import DATA, MODEL, TRAINING, train_here

GQA = (
    "--group-query-attention --num-query-groups 2 --kv-channels 12 --ffn-hidden-size 80 "
    "--num-layers 3 --untie-embeddings-and-output-weights"
)
COLA = "--low-rank-arch cola --low-rank-attn-rank 6 --low-rank-mlp-rank 10"
LAX = "--low-rank-arch lax --low-rank-rank 8 --low-rank-recompute"
# Of a low-rank model with MODEL's and GQA's sizes: d 32, f 80, q 48, kv 24, L 3.
COLA_WEIGHTS = 6 * 2 * (32 + 48) + 6 * 2 * (32 + 24) + 10 * 3 * (32 + 80)


def parsed(flags: str) -> Namespace:
    """Megatron's validated arguments for our small model with these flags."""
    from megatron.training.global_vars import unset_global_variables

    from megatron.boost.cpu import with_cpu_flags
    from megatron.boost.training import configure

    arguments = configure(
        with_cpu_flags([*MODEL, *DATA, *TRAINING, *flags.split()])
    ).settings.megatron
    unset_global_variables()
    arguments.padded_vocab_size = 144
    return arguments


def counted_operations(flags: list[str]) -> list[tuple[float, float, float]]:
    """For each command line: upstream's count, what the patched training loop counts, and what it
    counts for packed sequences of 16 tokens each."""
    from megatron.boost.cpu import megatron_on_cpu
    from megatron.boost.patches import apply_always

    with megatron_on_cpu():
        from megatron.training import training

        upstream = training.num_floating_point_operations
        with apply_always():
            result = []
            for line in flags:
                arguments = parsed(line)
                packed = training.num_floating_point_operations(
                    arguments,
                    5,
                    seqlen_squared_sum_in_batch=10 * 16**2,
                    total_real_tokens_in_batch=10 * 16,
                )
                own = training.num_floating_point_operations(arguments, 5)
                result.append((upstream(arguments, 5), own, packed))
                if arguments.low_rank_arch == "none":
                    # As in a program that knows none of our flags.
                    del arguments.low_rank_arch
                    assert training.num_floating_point_operations(arguments, 5) == own
        assert training.num_floating_point_operations is upstream
    return result


def test_the_training_loop_counts_the_models_own_operations() -> None:
    lines = [
        GQA,
        f"{GQA} --low-rank-arch dense",
        f"{GQA} {COLA}",
        f"{GQA} {COLA} --low-rank-layers 1-1",
    ]
    ((none, dense, cola, mixed),) = run_ranks(
        counted_operations, 1, lines, init_process_group=False
    )
    upstream = none[0]
    # Not for layers of Megatron, and nothing else for ours of full rank.
    assert none[1] == upstream
    assert dense[1] == pytest.approx(upstream, rel=1e-14)
    assert dense[2] == pytest.approx(none[2], rel=1e-14)
    # Upstream takes a low-rank model for a full-rank one; if no longer, the patch can go.
    assert cola[0] == mixed[0] == upstream
    tokens, squares = 5 * 32, 5 * 32**2
    head, attention = 2 * tokens * 32 * 144, 2 * 48 * squares
    assert cola[1] == 3 * (3 * (2 * tokens * COLA_WEIGHTS + attention) + head)
    packed = 3 * (3 * (2 * 160 * COLA_WEIGHTS + 2 * 48 * 10 * 16**2) + 2 * 160 * 32 * 144)
    assert cola[2] == packed
    dense_layer = 2 * tokens * (2 * 32 * 48 + 2 * 32 * 24 + 3 * 32 * 80) + attention
    low_rank_layer = 2 * tokens * COLA_WEIGHTS + attention
    assert mixed[1] == 3 * (2 * dense_layer + low_rank_layer + head)


def upstreams_memory(flags: list[str]) -> list[float]:
    """Upstream's bytes of weights and optimiser for each command line."""
    from megatron.boost.cpu import megatron_on_cpu

    with megatron_on_cpu():
        from megatron.training import theoretical_memory_usage

        return [
            theoretical_memory_usage.compute_weight_and_optimizer_memory(parsed(line))
            for line in flags
        ]


def test_upstreams_memory_is_still_that_of_a_full_rank_model_in_bf16() -> None:
    """If no longer, the patch of the report can go."""
    lines = [GQA, f"{GQA} {COLA}", f"{GQA} {COLA} --bf16"]
    (found,) = run_ranks(upstreams_memory, 1, lines, init_process_group=False)
    weights = 3 * (2 * 32 * 48 + 2 * 32 * 24 + 3 * 32 * 80 + 2 * 32) + 32 + 2 * 32 * 144
    assert found == [18 * weights] * 3


def logged(flags: str) -> tuple[str, list[float]]:
    """On a rank: what a run prints, and the TFLOP/s that its loop computed for each log line."""
    computed: list[float] = []

    @contextlib.contextmanager
    def noted() -> Any:
        from megatron.training import one_logger_utils

        track = one_logger_utils.track_e2e_metrics

        def note(log_throughput: bool = False, throughput: float | None = None) -> Any:
            if throughput is not None:
                computed.append(throughput)
            return track(log_throughput, throughput)

        with mock.patch.object(one_logger_utils, "track_e2e_metrics", note):
            yield

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train_here(flags.split(), noted)
    return output.getvalue(), computed


@pytest.mark.slow
def test_a_run_logs_its_true_and_its_dense_equivalent_throughput() -> None:
    """Megatron's line as it is, and ours after it."""
    flags = f"{GQA} {COLA} --log-throughput --train-iters 3"
    ((text, computed),) = run_ranks(logged, 1, flags, init_process_group=False)
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if re.match(r" \[.*\] iteration +\d", line)]
    assert len(at) == len(computed) == 3
    tokens, attention = 4 * 32, 2 * 48 * 4 * 32**2
    head = 2 * tokens * 32 * 144
    true = 3 * (3 * (2 * tokens * COLA_WEIGHTS + attention) + head)
    dense_weights = 2 * 32 * 48 + 2 * 32 * 24 + 3 * 32 * 80
    dense = 3 * (3 * (2 * tokens * dense_weights + attention) + head)
    for number, throughput in zip(at, computed, strict=True):
        line, following = lines[number], lines[number + 1]
        milliseconds = float(re.search(r"per iteration \(ms\): ([\d.]+) \|", line)[1])
        assert throughput == pytest.approx(true / milliseconds / 1e9, rel=0.2 / milliseconds)
        shown = re.search(r" throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \|", line)
        assert float(shown[1]) == round(throughput, 1)
        labelled = re.fullmatch(
            r" dense-equivalent TFLOP/s/GPU: ([\d.e+-]+) "
            r"\(operations of the full-rank model of these sizes, which were not computed\)",
            following,
        )
        assert float(labelled[1]) == pytest.approx(throughput * dense / true, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--log-throughput", f"{GQA} {COLA}"])
def test_no_line_of_ours_where_none_is_due(flags: str) -> None:
    ((text, _),) = run_ranks(logged, 1, f"{flags} --train-iters 2", init_process_group=False)
    assert "dense-equivalent" not in text and " iteration        2/" in text


def state_of_run(flags: str) -> tuple[dict[str, int], dict[str, float], tuple[float, ...], str]:
    """On a rank: the bytes that model and optimiser hold after two iterations, those of the
    accounting, and what Megatron's theoretical report returned and printed."""
    kept: dict[str, Any] = {}

    @contextlib.contextmanager
    def keeping() -> Any:
        from megatron.training import training

        setup, report = training.setup_model_and_optimizer, training.report_theoretical_memory

        def keep(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            kept["models"], kept["optimizer"] = result[0], result[1]
            return result

        def reported(args: Namespace, *rest: Any, **more: Any) -> Any:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                kept["report"] = report(args, *rest, **more)
            kept["printed"], kept["arguments"] = printed.getvalue(), args
            return kept["report"]

        with (
            mock.patch.object(training, "setup_model_and_optimizer", keep),
            mock.patch.object(training, "report_theoretical_memory", reported),
        ):
            yield

    train_here([*flags.split(), "--train-iters", "2"], keeping)
    from megatron.core import parallel_state
    from megatron.training import get_args

    from megatron.boost.accounting.of_megatron import layout_of_arguments, model_of_arguments
    from megatron.boost.accounting.state import rank_state_bytes
    from megatron.boost.arguments import low_rank_config

    arguments = get_args()
    model = model_of_arguments(arguments, low_rank_config(arguments))
    layout = layout_of_arguments(arguments, 1)
    state = rank_state_bytes(model, layout, parallel_state.get_pipeline_model_parallel_rank())
    accounted = {
        "weights": state.weights,
        "gradients": state.gradients,
        "main_weights": state.main_weights,
        "moments": state.moments,
    }
    report = (kept.get("report"), kept.get("printed"))
    return _held(kept["models"], kept["optimizer"]), accounted, *report


def _held(models: list[Any], optimizer: Any) -> dict[str, int]:
    """Bytes of the tensors themselves."""

    def size(tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    weights = [p for model in models for p in model.parameters()]
    storages = {p.untyped_storage().data_ptr() for p in weights}
    inner = [o.optimizer for o in getattr(optimizer, "chained_optimizers", [optimizer])]
    optimised = [p for o in inner for group in o.param_groups for p in group["params"]]
    states = [state for o in inner for state in o.state.values()]
    return {
        "weights": size(weights),
        "gradients": size(p.main_grad for p in weights),
        "main_weights": size(
            p for p in optimised if p.untyped_storage().data_ptr() not in storages
        ),
        "moments": size(s[key] for s in states for key in ("exp_avg", "exp_avg_sq")),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, world_size",
    [
        (f"{COLA}", 1),
        (f"{COLA} --bf16", 1),
        (f"{COLA} --bf16 --grad-reduce-in-bf16", 1),
        (f"{COLA} --tensor-model-parallel-size 2", 2),
        (f"{COLA} --bf16 --pipeline-model-parallel-size 2", 2),
        (f"{COLA} --bf16 --use-distributed-optimizer", 2),
        (f"{COLA} --use-distributed-optimizer", 2),
        ("--low-rank-arch dense --bf16 --tensor-model-parallel-size 2", 2),
        ("--low-rank-arch lax --low-rank-rank 8 --bf16 --tensor-model-parallel-size 2", 2),
        (f"{LAX} --fp16 --loss-scale 1 --pipeline-model-parallel-size 2", 2),
    ],
)
def test_state_and_theoretical_report_are_those_of_the_built_model(
    flags: str, world_size: int
) -> None:
    results = run_ranks(state_of_run, world_size, flags, init_process_group=False)
    # The shards of a distributed optimiser differ by rank; together they are the whole.
    pipeline = "pipeline" in flags
    groups = [[result] for result in results] if pipeline else [results]
    for ranks in groups:
        for part in ranks[0][0]:
            held = sum(rank[0][part] for rank in ranks)
            assert (part, held) == (part, sum(rank[1][part] for rank in ranks))
    accounted = [result[1:] for result in results]
    weight_mib, activation_mib, total_mib = results[0][2]
    # The fp32 copy of 16-bit gradients is there during the optimiser's step only.
    copied = "grad-reduce" in flags or "fp16" in flags
    totals = [sum(held.values()) + (2 * held["weights"] if copied else 0) for held, *_ in accounted]
    assert weight_mib in [total / 1024**2 for total in totals]
    assert total_mib == pytest.approx(weight_mib + activation_mib)
    closing = (
        f"Theoretical memory footprints: weight and optimizer={weight_mib:.2f} MB, "
        f"activation={activation_mib:.2f} MB, total={total_mib:.2f} MB"
    )
    assert closing in results[0][3].splitlines()

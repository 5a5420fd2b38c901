"""From timings to a cluster's numbers, and to its file and back."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.products import Product
from megatron.boost.accounting.sizes import Layout
from megatron.boost.planner.calibration import Measurements, calibrate, fitted
from megatron.boost.planner.cluster import load_cluster
from megatron.boost.planner.cluster_file import write_cluster
from megatron.boost.planner.fit import fit_relative
from megatron.boost.planner.gemm import product_seconds
from megatron.boost.planner.host import tiny_layer_operations
from megatron.boost.planner.iteration import DTYPES, estimate
from megatron.boost.planner.models import load_model
from megatron.boost.planner.sweep import (
    CPU_SWEEP,
    CUDA_SWEEP,
    QUICK_SWEEP,
    AttentionCall,
    Call,
    CollectiveCall,
    CopyCall,
    KernelCall,
    LayerCall,
    OverlapCall,
    ProductCall,
    Sweep,
)

RATE, HALF_DEPTH, FIXED, PACKING = 150e9, 40.0, 200e-6, 0.8
ATTENTION = {"forward": 45e9, "backward": 60e9}
COPIED, SWEPT = 8e9, 6e9
LATENCY, LINKS = 200e-6, {2: 1.5e9, 4: 2.5e9}
OVERLAP, HOST = 0.4, 70e-6


def machine(sweep: Sweep = CPU_SWEEP, noise: float = 0.0, dtype: str = "fp32") -> Measurements:
    """The timings of a machine with those numbers on four ranks, each off by up to `noise`."""
    shaken = random.Random(7)
    timings = {
        call: seconds * (1 + shaken.uniform(-noise, noise)) for call, seconds in exact(sweep, dtype)
    }
    return Measurements(
        ranks=4, timings={dtype: timings}, capacity_bytes=2.0**33, reserved_bytes=2.0**29
    )


def exact(sweep: Sweep, dtype: str) -> Iterator[tuple[Call, float]]:
    for product in sweep.products():
        m, n, k = product.m, product.n, product.k
        packed = PACKING * DTYPES[dtype].itemsize * (m * k + k * n + m * n) / COPIED
        yield product, 2 * m * n * (k + HALF_DEPTH) / RATE + packed + FIXED
    for heads, head, length in sweep.attention:
        products = 2 * 3 * heads * head * length**2
        for direction, more in (("forward", 1.0), ("backward", 2.5)):
            call = AttentionCall(direction, 3, heads, length, head)  # type: ignore[arg-type]
            yield call, more * products / ATTENTION[direction]
    yield CopyCall(10**8), 1e8 / COPIED
    for name, size in (("norm", 10**6), ("gate", 10**7)):
        yield KernelCall(name, size), size / SWEPT
    for ranks, rate in LINKS.items():
        for size in sweep.messages:
            yield CollectiveCall(ranks, size), LATENCY + 2 * (ranks - 1) / ranks * size / rate
    alone, beside = 0.030, 0.025
    yield OverlapCall("collective"), alone
    yield OverlapCall("products"), beside
    yield OverlapCall("both"), beside + alone - OVERLAP * beside
    operations = tiny_layer_operations(load_cluster("a100-80"), DTYPES["bf16"], "bf16")
    yield LayerCall(), HOST * operations


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-3), (0.03, 0.03)])
def test_the_fit_finds_the_machine_that_the_timings_are_of(noise: float, within: float) -> None:
    cluster = fitted(machine(noise=noise), None, "four ranks").cluster
    compute, memory = cluster.compute["fp32"], cluster.memory
    found = {
        RATE: compute.peak_tflops * 1e12 * compute.gemm_efficiency,
        ATTENTION["forward"]: compute.peak_tflops * 1e12 * compute.attention_forward_efficiency,
        ATTENTION["backward"]: compute.peak_tflops * 1e12 * compute.attention_backward_efficiency,
        COPIED: memory.bandwidth_gb_per_s * 1e9,
        SWEPT: cluster.elementwise_bytes_per_s,
        LATENCY: cluster.node.latency_us * 1e-6,
        LINKS[2]: cluster.node.bus_gb_per_s["2"] * 1e9,
        LINKS[4]: cluster.node.bus_gb_per_s["4"] * 1e9,
        HOST: cluster.host_us_per_operation * 1e-6,
    }
    for true, fit in found.items():
        assert fit == pytest.approx(true, rel=max(within, 2e-3))
    # Its share of a product is small.
    assert compute.gemm_half_depth == pytest.approx(HALF_DEPTH, rel=max(5 * within, 2e-3))
    # A difference of three timings.
    assert cluster.collective_overlap == pytest.approx(OVERLAP, abs=max(4 * within, 1e-3))
    assert compute.gemm_efficiency <= 1
    assert (memory.capacity_gib, memory.reserved_gib) == (8, 0.5)
    assert (cluster.gpus_per_node, cluster.most_gpus) == (4, 4)


def test_the_planner_s_products_take_the_times_that_were_fitted() -> None:
    timings = machine().timings["fp32"]
    cluster = fitted(machine(), None, "four ranks").cluster
    for call, seconds in timings.items():
        if isinstance(call, ProductCall):
            product = Product((), "full", call.m, call.n, call.k)
            assert product_seconds(product, cluster, "fp32", 4) == pytest.approx(seconds, rel=2e-3)


def test_products_that_wait_for_memory_do_not_slow_the_matrix_units() -> None:
    bound = ProductCall("forward", 4096, 4096, 1)
    timings = dict(exact(CPU_SWEEP, "fp32")) | {bound: bound.bytes(4) / COPIED}
    slow = replace(machine(), timings={"fp32": timings})
    assert fitted(slow, None, "").cluster.compute == fitted(machine(), None, "").cluster.compute


@pytest.mark.parametrize("sweep", [CPU_SWEEP, CUDA_SWEEP])
def test_a_sweep_has_thin_products_of_every_role(sweep: Sweep) -> None:
    products = list(sweep.products())
    for d in sweep.hidden:
        assert ProductCall("forward", sweep.tokens, d // 4, d // 2) in products
        assert ProductCall("input gradient", sweep.tokens, d // 2, d // 4) in products
        assert ProductCall("weight gradient", d // 2, d // 4, sweep.tokens) in products
    assert len(set(products)) == len(products)


@pytest.mark.parametrize(
    ("terms", "seconds", "expected"),
    [
        ([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]], [3.0, 5.0, 9.0], (2.0, 1.0)),
        # Without the condition (2, -1). Of the first alone, shares a/t of 1 and 2/3:
        # c = (1 + 2/3) / (1 + 4/9).
        ([[1.0, 1.0], [2.0, 1.0]], [1.0, 3.0], (15 / 13, 0.0)),
        ([[0.0], [0.0]], [1.0, 2.0], (0.0,)),
    ],
)
def test_coefficients_are_never_negative(
    terms: list[list[float]], seconds: list[float], expected: tuple[float, ...]
) -> None:
    assert fit_relative(terms, seconds).coefficients == pytest.approx(expected)


def test_the_first_coefficient_may_be_needed() -> None:
    """Unconstrained it is negative: c = (-0.2, 2.6). Of the first alone, shares a/t of 1 and 2."""
    terms, seconds = [[2.0, 0.923], [2.0, 0.5385]], [2.0, 1.0]
    assert fit_relative(terms, seconds).coefficients[0] == 0
    fit = fit_relative(terms, seconds, needs_first=True)
    assert fit.coefficients == pytest.approx(((1 + 2) / (1 + 4), 0.0))


def test_a_machine_whose_times_are_noise_has_a_peak() -> None:
    """Times that fall as the sum gets longer fit an infinite rate best."""
    measured = machine()
    timings = {
        call: call.m * call.n * (1 + 64 / call.k) * 1e-8 if isinstance(call, ProductCall) else taken
        for call, taken in measured.timings["fp32"].items()
    }
    compute = fitted(replace(measured, timings={"fp32": timings}), None, "noise").cluster.compute
    assert math.isfinite(compute["fp32"].peak_tflops) and compute["fp32"].gemm_efficiency <= 1


def test_the_errors_of_a_fit_are_relative() -> None:
    fit = fit_relative([[1.0], [1.0]], [1.0, 2.0])
    # c = (1 + 1/2) / (1 + 1/4)
    assert fit.coefficients == pytest.approx((1.2,))
    assert (fit.mean_error, fit.worst_error) == pytest.approx((0.3, 0.4))


@pytest.mark.parametrize("seconds", [[], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_timings_that_cannot_be_are_refused(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="timings"):
        fit_relative([[1.0]] * len(seconds), seconds)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "0 ranks: from 1 to .* nearest legal value: 1"),
        ({"ranks": 10**6}, "1000000 ranks: .* as many as there are cores; nearest legal value: "),
        ({"dtypes": ("fp8",)}, "--dtype fp8: must be one of .*; nearest legal value: fp32"),
        ({"dtypes": ()}, "--dtype: none is given; nearest legal value: fp32"),
        ({"device": "tpu"}, "--device tpu: must be cpu or cuda; nearest legal value: cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(**settings)


def test_what_one_machine_cannot_show_comes_from_the_base_and_says_so(tmp_path: Path) -> None:
    base = load_cluster("a100-80")
    found = fitted(machine(), base, "four ranks")
    assert (found.cluster.network, found.cluster.most_gpus) == (base.network, base.most_gpus)
    write_cluster(found.cluster, tmp_path / "with.toml", found.notes)
    text = (tmp_path / "with.toml").read_text()
    assert f"[network]\n# Not measured: as in {base.name}." in text
    alone = fitted(machine(), None, "four ranks")
    assert set(alone.cluster.network.bus_gb_per_s.values()) == {0.0}
    write_cluster(alone.cluster, tmp_path / "without.toml", alone.notes)
    assert base.name not in (tmp_path / "without.toml").read_text()


def test_one_rank_has_no_link_but_the_base_s() -> None:
    alone = replace(machine(), ranks=1)
    base = load_cluster("a100-80")
    assert fitted(alone, None, "").cluster.node.bus_gb_per_s == {"2": 0.0}
    found = fitted(alone, base, "")
    assert (found.cluster.node, found.cluster.collective_overlap) == (
        base.node,
        base.collective_overlap,
    )
    assert found.notes["node"] == f"Not measured: as in {base.name}."


@pytest.mark.parametrize("preset", ["a100-80", "h100", "cpu"])
def test_a_written_cluster_is_read_again(preset: str, tmp_path: Path) -> None:
    cluster = replace(load_cluster(preset), name='of "quotes" and umlauts: ä')
    path = tmp_path / "folder" / "cluster.toml"
    write_cluster(cluster, path, {"": "The head.", "node.latency_us": "Of the latency."})
    assert load_cluster(str(path)) == cluster
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# The head.\n")
    assert "Of the latency." in text
    assert "# share of the bandwidth that small kernels reach\n" in text
    assert max(map(len, text.splitlines())) <= 100
    assert [each.name for each in path.parent.iterdir()] == ["cluster.toml"]


def test_a_measured_cluster_is_read_again(tmp_path: Path) -> None:
    found = fitted(machine(noise=0.03), None, "four ranks")
    write_cluster(found.cluster, tmp_path / "cluster.toml", found.notes)
    assert load_cluster(str(tmp_path / "cluster.toml")) == found.cluster


def test_a_note_on_no_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="note on memory.colour"):
        write_cluster(load_cluster("cpu"), tmp_path / "cluster.toml", {"memory.colour": "Blue."})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_this_machine_is_measured(ranks: int, tmp_path: Path) -> None:
    found = calibrate(ranks=ranks, dtypes=("fp32", "bf16"), sweep=QUICK_SWEEP)
    cluster = found.cluster
    write_cluster(cluster, tmp_path / "cluster.toml", found.notes)
    assert load_cluster(str(tmp_path / "cluster.toml")) == cluster
    assert (cluster.gpus_per_node, list(cluster.compute)) == (ranks, ["fp32", "bf16"])
    assert (cluster.node.bus_gb_per_s["2"] > 0) == (ranks == 2)
    assert 0 < cluster.memory.reserved_gib < cluster.memory.capacity_gib
    # A core of today, give or take an order of magnitude.
    assert 0.001 < cluster.compute["fp32"].peak_tflops < 10
    assert 0.05 < cluster.memory.bandwidth_gb_per_s < 1000
    assert 1 < cluster.host_us_per_operation < 10000
    model = load_model("60M", LowRankConfig(arch="cola"))
    layout = Layout(
        sequence_length=512, micro_batch_size=1, tensor_parallel=ranks, dtype=DTYPES["fp32"]
    )
    assert 0 < estimate(model, layout, cluster).seconds < math.inf

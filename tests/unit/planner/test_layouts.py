"""Which layouts are found, which are refused, and what is said of them."""

from dataclasses import replace

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.sizes import validate_layout
from megatron.boost.planner.break_even import break_even_ratio, with_ratio
from megatron.boost.planner.cluster import with_nodes_of
from megatron.boost.planner.iteration import estimate
from megatron.boost.planner.layouts import Workload, fastest, find_plans, require_gpus
from megatron.boost.planner.models import load_model
from megatron.boost.planner.scaling import scaling
from tests.support.planned import A100, with_node_rate

COLA = LowRankConfig(arch="cola")


def _workload(size="7B", **changes):
    settings = {"model": load_model(size, COLA), "global_batch": 64} | changes
    return Workload(**settings)


PLANS, TOO_LARGE = find_plans(_workload(), A100, 8)


def test_every_layout_uses_all_gpus_and_the_whole_batch_and_fits():
    for plan in PLANS:
        assert plan.gpus == 8
        layout = plan.layout
        batch = layout.micro_batch_size * layout.micro_batches * layout.data_parallel
        assert batch == 64
        assert plan.fits
        validate_layout(plan.model, layout)
    assert TOO_LARGE > 0


def test_they_are_all_different_and_the_fastest_comes_first():
    assert len({(plan.strategy, plan.model, plan.layout) for plan in PLANS}) == len(PLANS)
    times = [plan.seconds for plan in PLANS]
    assert times == sorted(times)
    kinds = {(p.strategy, p.layout.tensor_parallel, p.layout.pipeline_parallel) for p in PLANS}
    assert {("btp", 1, 1), ("btp", 4, 2), ("full-rank", 4, 1)} <= kinds
    assert {p.layout.virtual_stages for p in PLANS} >= {1, 2, 4}
    assert {plan.recompute for plan in PLANS} == {"none", "latents", "full"}


def test_recompute_is_only_for_what_does_not_fit_without():
    for plan in PLANS:
        if plan.recompute == "none":
            continue
        kept = replace(plan.layout, recompute="none")
        settings = replace(plan.model.low_rank, recompute=False)
        without = replace(plan, layout=kept, model=replace(plan.model, low_rank=settings))
        assert not without.fits
        assert without.seconds < plan.seconds


def test_on_one_node_a_7b_is_fastest_without_tensor_parallelism():
    # numbers.md: up to some 13B on one 8-GPU node.
    best = fastest(PLANS)
    assert best.strategy == "btp" and best.layout.tensor_parallel == 1
    assert best.layout.data_parallel == 8 and best.layout.distributed_optimizer


def test_tensor_parallelism_wins_where_the_batch_leaves_nothing_to_data_parallelism():
    plans, _ = find_plans(_workload(global_batch=1), A100, 4)
    assert fastest(plans).layout.tensor_parallel == 4
    assert fastest(plans).strategy == "btp"


def test_with_a_slow_link_vanilla_suffers_most_and_btp_least():
    slow = with_node_rate(A100, 10.0, 54.0)
    plans, _ = find_plans(_workload(global_batch=1), slow, 4, ["btp", "full-rank", "vanilla"])
    at_four = {}
    for plan in plans:
        if plan.layout.tensor_parallel == 4:
            at_four.setdefault(plan.strategy, plan.seconds)
    assert at_four["btp"] < at_four["full-rank"] < at_four["vanilla"]


def test_what_does_not_fit_is_left_out_and_small_memory_asks_for_recompute():
    small = replace(A100, memory=replace(A100.memory, capacity_gib=24, reserved_gib=2))
    plans, too_large = find_plans(_workload(), small, 8, ["btp"])
    assert too_large > 0
    assert all(plan.memory.total <= 24 * 2**30 for plan in plans)
    assert len(plans) < len([plan for plan in PLANS if plan.strategy == "btp"])
    longer = _workload(sequence_length=32768)
    plans, _ = find_plans(longer, A100, 4, ["btp"])
    assert "none" not in {plan.recompute for plan in plans if plan.layout.tensor_parallel == 1}


def test_a_model_that_never_fits_is_refused_with_what_would_do():
    with pytest.raises(ValueError, match=r"--gpus 1: no layout fits: .* nearest legal value: 4"):
        find_plans(_workload("40B"), A100, 1)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (6, "--gpus 6: .* nodes of 4; nearest legal value: 8"),
        (7166, "--gpus 7166: .* nodes of 4; nearest legal value: 7168"),
        (8000, "--gpus 8000: .* has 7168; nearest legal value: 7168"),
    ],
)
def test_gpus_that_the_cluster_does_not_have_are_refused(gpus, message):
    with pytest.raises(ValueError, match=message):
        find_plans(_workload(), A100, gpus)


def test_a_cluster_without_a_network_stays_within_a_node():
    alone = replace(A100, network=replace(A100.network, bus_gb_per_s={"2": 0.0}))
    assert find_plans(_workload(), alone, 4)[0]
    with pytest.raises(ValueError, match="--gpus 8: every layout needs a link .* value: 4"):
        find_plans(_workload(), alone, 8)
    cut_off = replace(alone, node=replace(A100.node, bus_gb_per_s={"2": 0.0}))
    for gpus in (4, 8):
        with pytest.raises(ValueError, match=f"--gpus {gpus}: .* needs a link .* value: 1$"):
            find_plans(_workload(), cut_off, gpus)


def test_the_nearest_number_of_whole_nodes_is_one_that_the_cluster_has():
    odd = with_nodes_of(A100, 5)
    for gpus in (7167, 7168, 7169):
        with pytest.raises(ValueError, match=f"--gpus {gpus}: .* nearest legal value: 7165$"):
            require_gpus(odd, gpus)
    require_gpus(odd, 7165)


def test_at_one_rank_vanilla_is_not_ranked_beside_the_same_model():
    plans, _ = find_plans(_workload(), A100, 4, ["btp", "vanilla", "btp"])
    assert {p.strategy for p in plans if p.layout.tensor_parallel == 1} == {"btp"}
    assert {p.strategy for p in plans if p.layout.tensor_parallel > 1} == {"btp", "vanilla"}
    assert len({(plan.strategy, plan.model, plan.layout) for plan in plans}) == len(plans)


@pytest.mark.parametrize(("batch", "gpus", "nearest"), [(7, 512, 8), (1023, 512, 1024), (1, 20, 5)])
def test_a_batch_that_no_layout_divides_is_refused_with_the_nearest_that_does(batch, gpus, nearest):
    message = f"--global-batch-size {batch}: no layout of {gpus} GPUs .* value: {nearest}$"
    with pytest.raises(ValueError, match=message):
        find_plans(_workload(global_batch=batch), A100, gpus)
    find_plans(_workload(global_batch=nearest), A100, gpus)


def test_the_break_even_rank_is_where_the_times_cross():
    low_rank, full_rank = fastest(PLANS, "btp"), fastest(PLANS, "full-rank")
    ratio = break_even_ratio(low_rank, full_rank)
    assert 0.4 < ratio < 0.8
    for factor, slower in ((0.9, False), (1.1, True)):
        model = with_ratio(low_rank.model, factor * ratio)
        seconds = estimate(model, low_rank.layout, A100).seconds
        assert (seconds > full_rank.seconds) == slower


class TestScaling:
    def test_weak_scaling_keeps_each_gpus_share_and_loses_efficiency_to_communication(self):
        points = scaling(_workload(global_batch=64), A100, 32, "weak", "btp")
        assert [point.plan.gpus for point in points] == [2**k for k in range(6)]
        assert {p.workload.global_batch / p.plan.gpus for p in points} == {2}
        assert max(point.efficiency for point in points) == 1
        assert all(p.plan.seconds_without_overlap >= p.plan.seconds for p in points)

    def test_strong_scaling_is_never_slower_with_more_gpus_and_ever_less_efficient(self):
        points = scaling(_workload(global_batch=32), A100, 32, "strong", "btp")
        times = [point.plan.seconds for point in points]
        assert times == sorted(times, reverse=True)
        whole_nodes = [point.efficiency for point in points if point.plan.gpus >= 8]
        assert whole_nodes == sorted(whole_nodes, reverse=True)
        assert whole_nodes[-1] < 0.95 * whole_nodes[0]

    def test_numbers_of_gpus_that_cannot_hold_the_model_are_left_out(self):
        points = scaling(_workload("40B", global_batch=8), A100, 32, "strong", "full-rank")
        assert points[0].plan.gpus > 4

    def test_a_large_model_needs_tensor_or_pipeline_parallelism_and_a_small_one_none(self):
        large = fastest(find_plans(_workload("40B"), A100, 64, ["btp"])[0])
        small = fastest(find_plans(_workload("1B"), A100, 64, ["btp"])[0])
        assert large.layout.tensor_parallel * large.layout.pipeline_parallel > 1
        assert small.layout.tensor_parallel * small.layout.pipeline_parallel == 1

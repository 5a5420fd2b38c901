"""Each cost at its limits, by arithmetic of its own, and which way it goes."""

import math
from dataclasses import replace

import pytest

from boost_layers.config import LowRankConfig
from megatron.boost.accounting.products import Product
from megatron.boost.planner.attention import attention_seconds
from megatron.boost.planner.break_even import gemm_break_even_ratio, with_ratio
from megatron.boost.planner.collectives import collective_seconds, point_to_point_seconds
from megatron.boost.planner.elementwise import layer_sweeps
from megatron.boost.planner.gemm import product_seconds
from megatron.boost.planner.iteration import estimate
from megatron.boost.planner.memory import memory_need
from megatron.boost.planner.optimiser import (
    reduction,
    step_bytes_per_parameter,
    tied_embedding_seconds,
)
from megatron.boost.planner.phase import Phase
from megatron.boost.planner.pipeline import bubble_seconds, exposed_transfers
from tests.support.planned import A100, STRATEGIES, layout, model, some_models, with_node_rate

PEAK = 312e12


def _product(m, n, k, number=1):
    return Product(("q_proj",), "full", m, n, k, number)


def _seconds(product):
    return product_seconds(product, A100, "bf16", 2)


class TestGemm:
    def test_a_huge_one_nears_the_share_of_the_peak(self):
        product = _product(2**20, 2**14, 2**17)
        reached = product.flops / _seconds(product) / PEAK
        assert reached == pytest.approx(A100.compute["bf16"].gemm_efficiency, rel=2e-3)

    def test_a_product_with_a_vector_waits_for_memory(self):
        product = _product(2**24, 1, 2**12)
        moved = 2 * (2**36 + 2**12 + 2**24)
        fixed = A100.compute["bf16"].gemm_fixed_us * 1e-6
        assert _seconds(product) - fixed == pytest.approx(moved / 2039e9, rel=1e-6)

    @pytest.mark.parametrize("axis", range(3))
    def test_it_takes_longer_with_every_size_and_is_never_less_efficient(self, axis):
        sizes = [512, 512, 512]
        times, rates = [], []
        for step in range(8):
            sizes[axis] = 64 * 2**step
            product = _product(*sizes)
            times.append(_seconds(product))
            rates.append(product.flops / times[-1])
        assert times == sorted(times)
        assert rates == sorted(rates)

    def test_a_tile_that_is_not_full_takes_as_long_as_a_full_one(self):
        assert _seconds(_product(4096, 1025, 4096)) == _seconds(_product(4096, 1088, 4096))

    def test_grouping_saves_a_launch_and_bytes_but_never_costs(self):
        apart = 3 * _seconds(_product(4096, 1024, 1024))
        assert _seconds(_product(4096, 3072, 1024)) < apart
        assert _seconds(_product(4096, 1024, 1024, 3)) < apart


class TestCollectives:
    def test_nothing_is_sent_to_oneself(self):
        assert collective_seconds("all_reduce", 1e9, 1, A100) == 0

    def test_without_bandwidth_nothing_arrives(self):
        none = with_node_rate(A100, 0.0)
        assert collective_seconds("all_reduce", 1.0, 2, none) == math.inf
        assert collective_seconds("all_reduce", 0.0, 2, none) == 0
        slow = estimate(model(STRATEGIES["btp"]), layout(2), none)
        assert slow.seconds == math.inf
        # At TP 1 no link is used.
        assert math.isfinite(estimate(model(STRATEGIES["btp"]), layout(1), none).seconds)

    def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(self):
        free = with_node_rate(A100, 100.0)
        whole = collective_seconds("all_reduce", 4e9, 4, free)
        halves = collective_seconds("reduce_scatter", 4e9, 4, free)
        halves += collective_seconds("all_gather", 1e9, 4, free)
        assert whole == pytest.approx(halves) == pytest.approx(2 * 0.75 * 4e9 / 100e9)

    def test_small_ones_take_the_latency(self):
        assert collective_seconds("all_reduce", 1.0, 4, A100) == pytest.approx(54e-6, rel=1e-6)

    def test_across_nodes_the_cards_of_a_node_work_together_up_to_its_own_link(self):
        # Eight ranks next to each other, four in a node: four cards of 22 GB/s.
        beside = collective_seconds("reduce_scatter", 8e9, 8, A100)
        assert beside == pytest.approx(30e-6 + 8e9 * 7 / 8 / (4 * 22e9))
        # One rank in each node: one card, and three hops of a tree.
        apart = collective_seconds("reduce_scatter", 8e9, 8, A100, spread=4)
        assert apart == pytest.approx(3 * 30e-6 + 8e9 * 7 / 8 / 22e9)
        fast = replace(A100, network=replace(A100.network, bus_gb_per_s={"2": 1000.0}))
        assert collective_seconds("reduce_scatter", 8e9, 8, fast) > 8e9 * 7 / 8 / 219e9

    def test_a_pipeline_across_nodes_has_the_pace_of_the_network(self):
        within = point_to_point_seconds(1e9, 4, A100)
        assert within == pytest.approx(54e-6 + 1e9 / 77e9)
        assert point_to_point_seconds(1e9, 8, A100) == pytest.approx(30e-6 + 1e9 / 22e9)


class TestPipeline:
    def test_one_micro_batch_goes_through_the_stages_one_after_the_other(self):
        assert 3.0 + bubble_seconds([1.0, 2.0, 3.0]) == 6.0

    def test_equal_stages_give_the_schedules_formula(self):
        # Narayanan et al.: m·t·(1 + (p − 1)/(v·m)).
        assert 8 * 0.5 + bubble_seconds([0.5] * 4) == pytest.approx(8 * 0.5 * (1 + 3 / 8))
        assert 8 * 0.5 + bubble_seconds([0.5] * 4, 2) == pytest.approx(8 * 0.5 * (1 + 3 / 16))

    def test_the_plain_schedule_waits_for_every_transfer_and_the_interleaved_for_those_of_the_way(
        self,
    ):
        assert exposed_transfers(4, 1) == 6
        assert exposed_transfers(4, 8) == 6 + 14
        assert exposed_transfers(4, 8, 2) == exposed_transfers(4, 64, 2) == 14

    def test_without_stages_there_is_neither_bubble_nor_transfer(self):
        assert bubble_seconds([2.0]) == 0
        assert exposed_transfers(1, 5) == 0
        alone = estimate(model(STRATEGIES["btp"]), layout(2), A100)
        assert alone.bubble == alone.transfers == 0

    def test_more_micro_batches_make_the_bubble_a_smaller_share(self):
        shares = []
        for number in (1, 2, 4, 16):
            found = estimate(
                model(STRATEGIES["btp"]),
                layout(2, pipeline_parallel=4, micro_batches=number),
                A100,
            )
            shares.append(found.bubble / found.seconds)
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 0.6 and shares[-1] < 0.2


class TestHost:
    def test_the_longer_of_device_and_host_counts(self):
        busy = Phase(gemm=1.0, operations=10)
        assert busy.waiting(1.0) == pytest.approx(0, abs=1e-12)
        idle = Phase(gemm=1e-6, operations=10)
        assert idle.waiting(100.0) == pytest.approx(1e-3, rel=2e-3)
        assert Phase().waiting(100.0) == 0

    def test_small_micro_batches_of_a_slow_host_wait_for_it(self):
        slow = replace(A100, host_us_per_operation=1000.0)
        found = estimate(model(STRATEGIES["btp"]), layout(2), slow)
        assert found.host > 0.9 * found.seconds


class TestOptimiser:
    def test_adam_in_mixed_precision_moves_46_bytes_a_parameter(self):
        # Gradient 4 read thrice and written once, three fp32 numbers read and written, bf16
        # weights 2 written, the buffer of 4 cleared.
        assert step_bytes_per_parameter(layout()) == 16 + 24 + 2 + 4

    def test_the_distributed_one_leaves_each_rank_its_share(self):
        share = layout(data_parallel=8, distributed_optimizer=True)
        assert step_bytes_per_parameter(share) == (16 + 24 + 2) / 8 + 4

    def test_a_single_rank_reduces_nothing(self):
        assert reduction(model(STRATEGIES["btp"]), layout(), 0, A100).seconds == 0

    def test_at_least_a_bucket_stays_exposed_and_without_overlap_everything(self):
        whole = model(STRATEGIES["btp"])
        wide = layout(data_parallel=64, distributed_optimizer=True)
        needed = reduction(whole, wide, 0, A100)
        assert needed.buckets > 1
        assert needed.exposed(math.inf) == needed.last_seconds
        assert needed.last_seconds < needed.seconds
        assert needed.exposed(0.0) == pytest.approx(needed.seconds)
        hidden = estimate(whole, wide, A100)
        bare = estimate(whole, wide, A100, overlap_reduction=False)
        assert bare.data_parallel == pytest.approx(needed.seconds)
        assert hidden.data_parallel < bare.data_parallel

    def test_the_last_bucket_holds_the_whole_embedding(self):
        wide = layout(data_parallel=8, distributed_optimizer=True)
        plain = reduction(model(STRATEGIES["btp"]), wide, 0, A100)
        many = model(STRATEGIES["btp"], vocab_size=256000, padded_vocab_size=256000)
        assert reduction(many, wide, 0, A100).last_seconds > 3 * plain.last_seconds

    def test_a_tied_embedding_over_stages_costs_an_all_reduce_of_it(self):
        over_stages = layout(pipeline_parallel=4, micro_batches=4)
        tied = model(STRATEGIES["btp"], tied=True)
        assert tied_embedding_seconds(model(STRATEGIES["btp"]), over_stages, A100) == 0
        assert tied_embedding_seconds(tied, layout(), A100) == 0
        # fp32 gradients of [V, d] between two of the node's GPUs.
        expected = 54e-6 + 32000 * 2048 * 4 / 77e9
        assert tied_embedding_seconds(tied, over_stages, A100) == pytest.approx(expected)

    def test_more_ranks_have_fewer_buckets(self):
        whole = model(STRATEGIES["full-rank"], "7B")
        buckets = [
            reduction(whole, layout(data_parallel=d, distributed_optimizer=True), 0, A100).buckets
            for d in (8, 128, 1024, 8192)
        ]
        assert buckets == sorted(buckets, reverse=True)
        assert buckets[-1] == 1


class TestAttention:
    def test_it_grows_with_the_square_of_the_sequence(self):
        whole = model(STRATEGIES["btp"])
        short = attention_seconds(whole, layout(2), 0, A100, "bf16")
        long = attention_seconds(whole, layout(2, sequence_length=4096), 0, A100, "bf16")
        assert long.forward == pytest.approx(16 * short.forward)
        assert long.backward == pytest.approx(16 * short.backward)

    def test_replicated_heads_cost_every_rank_all_of_them(self):
        sliced = attention_seconds(model(STRATEGIES["vanilla"]), layout(4), 0, A100, "bf16")
        whole = attention_seconds(
            model(STRATEGIES["vanilla replicated"]), layout(4), 0, A100, "bf16"
        )
        assert whole.forward == pytest.approx(4 * sliced.forward)


class TestElementwise:
    def test_btp_sweeps_shards_and_vanilla_whole_tensors(self):
        def bytes_of(name, tp):
            sweeps = layer_sweeps(model(STRATEGIES[name]), layout(tp), 0)
            return sum(sweep.forward_bytes for sweep in sweeps)

        assert bytes_of("btp", 4) < 0.5 * bytes_of("vanilla", 4)
        assert bytes_of("btp", 4) < bytes_of("full-rank", 4)
        # Latents are whole on every rank, so that four ranks do not quite quarter the work.
        assert bytes_of("btp", 1) / 4 < bytes_of("btp", 4) < bytes_of("btp", 1)

    def test_a_latent_crossing_costs_by_its_gate_and_norm(self):
        def bytes_of(**settings):
            low_rank = LowRankConfig(arch="lax", **settings)
            sweeps = layer_sweeps(model(low_rank), layout(2), 1)
            return sum(sweep.forward_bytes for sweep in sweeps)

        plain = bytes_of(lax_gate="identity", lax_norm="none")
        assert plain < bytes_of(lax_gate="linear", lax_norm="none")
        assert bytes_of(lax_gate="linear", lax_norm="none") < bytes_of(lax_gate="tensor")
        first = layer_sweeps(model(LowRankConfig(arch="lax")), layout(2), 0)
        assert "latent crossing" not in [sweep.name for sweep in first]


class TestRank:
    def test_break_even_in_operations_is_the_published_formula(self):
        # low_rank.md: r* = (4d² + 3df)/(11d + 3f).
        whole = model(STRATEGIES["btp"], "7B")
        d, f = 4096, 11008
        assert gemm_break_even_ratio(whole) * d == pytest.approx(
            (4 * d * d + 3 * d * f) / (11 * d + 3 * f)
        )

    def test_at_that_rank_the_products_are_those_of_the_full_rank_model(self):
        from megatron.boost.accounting.products import layer_products

        for whole in some_models(10):
            ratio = gemm_break_even_ratio(whole)
            rank = ratio * whole.hidden_size
            dense = sum(p.flops for p in layer_products(whole.dense_equivalent(), layout(), 0))
            per_rank = sum(p.flops for p in layer_products(whole, layout(), 0))
            per_rank /= whole.low_rank.rank
            assert rank * per_rank == pytest.approx(dense)

    def test_full_rank_latents_are_slower_than_the_full_rank_model(self):
        whole = with_ratio(model(STRATEGIES["btp"]), 1.0)
        dense = model(STRATEGIES["full-rank"])
        assert estimate(whole, layout(), A100).seconds > estimate(dense, layout(), A100).seconds

    def test_time_and_memory_grow_with_the_rank(self):
        ratios = [0.05 * step for step in range(1, 21)]
        models = [with_ratio(model(STRATEGIES["btp"]), ratio) for ratio in ratios]
        times = [estimate(each, layout(2), A100).seconds for each in models]
        bytes_needed = [memory_need(each, layout(2), A100).total for each in models]
        assert times == sorted(times)
        assert bytes_needed == sorted(bytes_needed)


@pytest.mark.parametrize("name", STRATEGIES)
class TestWholeIterations:
    def test_more_tokens_take_longer_and_more_memory(self, name):
        whole = model(STRATEGIES[name])
        layouts = [layout(2, micro_batch_size=number) for number in (1, 2, 3, 4, 8)]
        times = [estimate(whole, each, A100).seconds for each in layouts]
        needs = [memory_need(whole, each, A100).total for each in layouts]
        assert times == sorted(times)
        assert needs == sorted(needs)

    def test_a_faster_machine_is_faster_in_every_respect(self, name):
        whole, here = model(STRATEGIES[name]), layout(2, pipeline_parallel=2, data_parallel=2)
        before = estimate(whole, here, A100).seconds
        compute = A100.compute["bf16"]
        faster = [
            replace(A100, compute={"bf16": replace(compute, peak_tflops=400)}),
            replace(A100, memory=replace(A100.memory, bandwidth_gb_per_s=3000)),
            replace(A100, host_us_per_operation=10.0),
            with_node_rate(A100, 500.0),
            replace(A100, collective_overlap=1.0),
            replace(A100, network=replace(A100.network, bus_gb_per_s={"2": 200.0})),
        ]
        assert all(estimate(whole, here, each).seconds <= before for each in faster)
        assert estimate(whole, here, faster[0]).seconds < before

    def test_recompute_costs_time_and_saves_memory(self, name):
        whole, here = model(STRATEGIES[name]), layout(2, micro_batch_size=8)
        full = replace(here, recompute="full")
        if whole.low_rank.recompute:
            whole = replace(whole, low_rank=replace(whole.low_rank, recompute=False))
        assert estimate(whole, full, A100).seconds > estimate(whole, here, A100).seconds
        assert memory_need(whole, full, A100).total < memory_need(whole, here, A100).total

    def test_the_parts_are_the_whole(self, name):
        found = estimate(
            model(STRATEGIES[name]), layout(2, pipeline_parallel=2, micro_batches=4), A100
        )
        assert found.seconds == pytest.approx(sum(found.parts().values()))
        assert all(part >= 0 for part in found.parts().values())


def test_latent_checkpointing_stands_between_keeping_all_and_full_recompute():
    plain = model(STRATEGIES["btp"])
    latents = model(STRATEGIES["btp latents"])
    here = layout(2, micro_batch_size=8)
    full = replace(here, recompute="full")
    times = [
        estimate(plain, here, A100).seconds,
        estimate(latents, here, A100).seconds,
        estimate(plain, full, A100).seconds,
    ]
    assert times == sorted(times)
    assert memory_need(latents, here, A100).total < memory_need(plain, here, A100).total


def test_at_one_rank_all_low_rank_strategies_have_the_same_products_and_no_collectives():
    found = {name: estimate(model(STRATEGIES[name]), layout(), A100) for name in ("btp", "vanilla")}
    assert found["btp"].gemm == found["vanilla"].gemm
    assert all(each.tensor_parallel == 0 for each in found.values())

"""From a benchmark's steps to its ratios, its JSON, its table and its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import Report, write_new
from benchmarks.variants import FULL_SIZES, QUICK_SIZES, guards, strategies
from tests.unit.test_benchmark_harness import step

MEDIANS = {
    "btp": 1800.0,
    "full_rank": 3000.0,
    "full_rank_sequence_parallel": 2900.0,
    "vanilla_sliced": 2600.0,
    "vanilla_replicated": 2700.0,
    "tp1_full_rank": 5100.0,
    "tp1_full_rank_plain": 5000.0,
    "tp1_low_rank": 3100.0,
    "tp1_low_rank_plain": 3000.0,
    "tp1_btp": 2850.0,
}
KEYS = [*(v.key for v in strategies(2)), *(v.key for v in guards())]


def report(medians: dict[str, float] = MEDIANS, *, targets_apply: bool = True) -> Report:
    """Of three rounds, the times spread by 10 ms."""
    steps = [
        step(key, number, ms + spread)
        for number, spread in enumerate((0.0, 10.0, -10.0))
        for key, ms in medians.items()
    ]
    return Report(
        settings={"tp": 2, "dtype": "fp32"},
        machine={"processor": "a processor", "megatron-core": "0.19.2"},
        variants=[*strategies(2), *guards()],
        sizes=FULL_SIZES,
        tp=2,
        targets_apply=targets_apply,
        steps=steps,
    )


def test_every_variant_has_its_own_key() -> None:
    assert sorted(KEYS) == sorted(MEDIANS)


def test_the_faster_form_of_a_baseline_counts() -> None:
    result = report().flat()
    assert result["full_rank_over_btp"] == pytest.approx(2900 / 1800)
    assert result["full_rank_over_btp_counted"] == "full_rank_sequence_parallel"
    assert result["vanilla_over_btp"] == pytest.approx(2600 / 1800)
    assert result["vanilla_over_btp_counted"] == "vanilla_sliced"
    assert result["full_rank_over_btp_target"] == 1.9


def test_the_layers_alone_are_twice_what_the_second_half_takes() -> None:
    halves = {
        "btp_half_depth": 1100.0,
        "full_rank_half_depth": 1650.0,
        "full_rank_sequence_parallel_half_depth": 1700.0,
    }
    result = report(MEDIANS | halves).flat()
    assert result["full_rank_over_btp_layers"] == pytest.approx((2900 - 1700) / (1800 - 1100))
    assert result["vanilla_over_btp_layers"] is None
    assert report().flat()["full_rank_over_btp_layers"] is None


def test_attention_at_the_rate_of_products_is_set_off_round_by_round() -> None:
    """Of the rank: 4 layers, 4 sequences of 512 tokens, 8 heads of 64; the product is 2048 a side,
    here at 100 GFLOP/s."""
    large_mm_ms = 2 * 2048**3 / 100e6
    products_ms = 4 * 7 * 4 * 8 * 512 * 513 * 64 / 100e6
    medians = MEDIANS | {"attention": 400.0, "large_mm": large_mm_ms}
    steps = [
        step(key, number, ms + spread)
        for number, spread in enumerate((0.0, 10.0, -10.0))
        for key, ms in medians.items()
        for spread in [0.0 if key == "large_mm" else spread]
    ]
    result = replace(report(), steps=steps).flat()
    assert result["attention_ms"] == 400.0
    assert result["attention_at_the_rate_of_products_ms"] == pytest.approx(products_ms)
    # Each round's own attention: what the rounds differ by cancels.
    expected = (2900 - 400 + products_ms) / (1800 - 400 + products_ms)
    for key in ("", "_p20", "_p80"):
        found = result[f"full_rank_over_btp_at_the_rate_of_products{key}"]
        assert found == pytest.approx(expected)
    assert f"would be {expected:.2f}" in replace(report(), steps=steps).markdown()
    assert report().flat()["full_rank_over_btp_at_the_rate_of_products"] is None


def test_flat_keys_tell_medians_spread_and_speed() -> None:
    result = report().flat()
    assert result["btp_ms"] == 1800.0
    assert result["btp_p20_ms"] == pytest.approx(1794.0)
    assert result["btp_p80_ms"] == pytest.approx(1806.0)
    assert result["btp_tokens_per_second"] == pytest.approx(2048 / 1.8)
    assert result["btp_exposed_communication_seconds"] == 0.01
    assert (result["btp_steps"], result["btp_dropped_steps"]) == (3, 0)
    assert result["machine_megatron_core"] == "0.19.2"
    json.dumps(result)


def test_guards_compare_ours_with_plain_pytorch() -> None:
    result = report().flat()
    assert result["tp1_full_rank_over_plain"] == pytest.approx(1.02)
    assert result["tp1_full_rank_over_plain_within_3_percent"] is True
    assert result["tp1_low_rank_over_plain"] == pytest.approx(3100 / 3000)
    assert result["tp1_low_rank_over_plain_within_3_percent"] is False


def test_other_settings_have_no_targets() -> None:
    result = report(targets_apply=False).flat()
    assert "full_rank_over_btp_target" not in result
    assert result["tp1_low_rank_over_plain_within_3_percent"] is None


def test_what_has_no_step_that_counts_is_not_measured() -> None:
    without = {key: ms for key, ms in MEDIANS.items() if key != "btp"}
    result = report(without).flat()
    assert result["full_rank_over_btp"] is None
    assert result["btp_ms"] is None
    assert "| BTP | not measured |" in report(without).markdown()


def test_the_page_holds_the_answers_and_every_variant() -> None:
    page = report().markdown()
    assert "| full_rank_over_btp | 1.61 |" in page
    assert "| vanilla low-rank without grouping, TP 1 | 1.033 | NO |" in page
    for variant in strategies(2):
        assert f"| {variant.title} | {MEDIANS[variant.key]:.0f} |" in page
    assert "| processor | a processor |" in page


def test_the_csv_has_every_step() -> None:
    lines = report().csv().splitlines()
    assert lines[0].startswith("variant,round_number,milliseconds")
    assert len(lines) == 1 + 3 * len(MEDIANS)
    assert lines[1].startswith("btp,0,1800.0") and lines[1].endswith(",True")


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    first = write_new(tmp_path, "run", {".md": "one", ".csv": "1"})
    second = write_new(tmp_path, "run", {".md": "two", ".csv": "2"})
    (tmp_path / "run.3.csv").write_text("of somebody else")
    third = write_new(tmp_path, "run", {".md": "three", ".csv": "3"})
    assert [path.name for path in first] == ["run.md", "run.csv"]
    assert [path.name for path in second] == ["run.2.md", "run.2.csv"]
    assert [path.name for path in third] == ["run.4.md", "run.4.csv"]
    assert first[0].read_text() == "one"


def test_a_single_rank_has_no_second_form_of_a_baseline() -> None:
    assert [v.key for v in strategies(1)] == ["btp", "full_rank", "vanilla_sliced"]


def test_sizes_know_what_divides_them() -> None:
    assert [tp for tp in range(1, 17) if FULL_SIZES.divisible_by(tp)] == [1, 2, 4, 8, 16]
    assert QUICK_SIZES.divisible_by(2)

"""The benchmark of preprocessing: what its figures are, and that it measures the tool."""

import csv
import io

import pytest

from benchmarks.preprocess import (
    Peak,
    PreprocessReport,
    Timing,
    encode_batch_seconds,
    main,
    run_the_tool,
    texts_of,
    write_lines,
)
from tests.support.small_tokenizer import save_small_tokenizer

REPORT = PreprocessReport(
    settings={"workers": 2},
    machine={"commit": "abc", "megatron-core": "0.19"},
    megabytes=30.0,
    timings=[
        Timing("tool", 0, 11.0, 13.0),
        Timing("encode_batch", 0, 9.0, None),
        Timing("encode_batch", 1, 12.0, None),
        Timing("tool", 1, 12.0, 14.0),
        Timing("tool", 2, 12.5, 14.0),
        Timing("encode_batch", 2, 10.0, None),
    ],
    peaks=[
        Peak("lines", 10, 500.0),
        Peak("text", 10, 600.0),
        Peak("lines", 100, 510.0),
        Peak("text", 100, 660.0),
    ],
)


def test_figures_are_ratios_of_medians_and_of_rounds():
    result = REPORT.flat()

    assert result["tool_seconds"] == 12.0
    assert result["encode_batch_megabytes_per_second"] == 3.0
    assert result["tool_over_encode_batch_throughput"] == pytest.approx(10 / 12)
    ratios = sorted([9 / 11, 12 / 12, 10 / 12.5])
    assert ratios[0] < result["tool_over_encode_batch_throughput_p20"] < ratios[1]
    assert ratios[1] < result["tool_over_encode_batch_throughput_p80"] < ratios[2]
    assert result["lines_small_megabytes"] == 10
    assert result["lines_large_peak_mib"] == 510.0
    assert result["text_large_over_small_peak"] == pytest.approx(1.1)
    assert result["machine_megatron_core"] == "0.19"


def test_page_and_runs_hold_the_figures():
    page = REPORT.markdown()

    assert "| throughput of the tool over that of encode_batch | 0.83 | 0.81 | 0.93 | " in page
    assert "| preprocess_data.py | 12.00 | 2.50 | 3 |" in page
    assert "| one document (.txt) | 10 | 600 | 100 | 660 | 1.10 |" in page
    rows = list(csv.DictReader(io.StringIO(REPORT.csv())))
    assert [row["variant"] for row in rows[:2]] == ["tool", "encode_batch"]
    assert rows[0]["command_seconds"] == "13.0"


def test_the_corpus_is_as_large_as_asked_for():
    size = sum(len(text.encode()) for text in texts_of(1.5))

    assert 1.5e6 <= size < 2.5e6


def test_more_workers_than_cores_are_refused():
    with pytest.raises(ValueError, match=r"--workers 9999: there are \d+ cores; nearest legal val"):
        main(["--workers", "9999"])


@pytest.mark.slow
def test_tool_and_tokenizer_are_timed_over_the_same_file(tmp_path):
    save_small_tokenizer(tmp_path / "tokenizer")
    write_lines(tmp_path / "corpus.jsonl", 0.05)

    alone = encode_batch_seconds(
        tmp_path / "corpus.jsonl", tmp_path / "tokenizer" / "tokenizer.json"
    )
    seconds, command_seconds, mebibytes = run_the_tool(
        tmp_path / "corpus.jsonl", tmp_path / "tokenizer", workers=2
    )

    assert 0 < alone
    assert 0 < seconds < command_seconds
    # Three processes with Python and numpy, one of them with transformers too.
    assert 150 < mebibytes < 5_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "tokenizer"]

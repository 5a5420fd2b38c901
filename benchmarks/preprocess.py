"""How close does tools/preprocess_data.py come to the tokenizer's own speed, and does its memory
grow with the input?

The corpus is the source of this interpreter's standard library, repeated, and the tokenizer a
byte-level BPE trained on it. README.md says how it is measured.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import REPOSITORY, RESULTS, publish
from benchmarks.harness import percentile, rotated
from benchmarks.report import (
    flat_provenance,
    number,
    provenance,
    rows_csv,
    table,
)
from megatron.boost.command_line import ToolParser, run_tool, whole_number
from megatron.boost.corpus import library_sources, train_tokenizer
from megatron.boost.machine import describe_machine

TARGET = 0.85
"""Of the tokenizer's own throughput."""

TOOL, TOKENIZER = "tool", "encode_batch"
TITLES = {TOOL: "preprocess_data.py", TOKENIZER: "the tokenizer's encode_batch"}

DOCUMENTS_AT_ONCE = 256
"""For `encode_batch`: enough for all threads; what it makes of many more takes gigabytes."""
SECONDS_BETWEEN_SAMPLES = 0.02


@dataclass(frozen=True)
class Timing:
    """One run over the whole corpus."""

    variant: str
    round_number: int
    seconds: float
    """The tool: from its first record to the renamed data set, the start of its workers included.
    The tokenizer: in its calls alone. For both without the start of Python and the loading of the
    tokenizer."""
    command_seconds: float | None
    """The tool: all of the command."""


@dataclass(frozen=True)
class Peak:
    """The memory that the tool took, all its processes together."""

    kind: str
    """`lines`: a document a line; `text`: one document in all."""
    megabytes: float
    mebibytes: float


@dataclass(frozen=True, kw_only=True)
class PreprocessReport:
    """One run of the benchmark."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    megabytes: float
    """Of text, in each timed run."""
    timings: Sequence[Timing]
    peaks: Sequence[Peak]

    def share(self) -> tuple[float, float | None, float | None]:
        """The tool's throughput over the tokenizer's: of the medians, and the 20th and 80th
        percentiles within single rounds."""
        rounds = [
            theirs / ours
            for theirs, ours in zip(self._seconds(TOKENIZER), self._seconds(TOOL), strict=True)
        ]
        share = statistics.median(self._seconds(TOKENIZER)) / statistics.median(self._seconds(TOOL))
        return share, percentile(rounds, 20), percentile(rounds, 80)

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units."""
        share, p20, p80 = self.share()
        result: dict[str, object] = {
            "tool_over_encode_batch_throughput": share,
            "tool_over_encode_batch_throughput_p20": p20,
            "tool_over_encode_batch_throughput_p80": p80,
            "tool_over_encode_batch_throughput_target": TARGET,
        }
        for variant in TITLES:
            seconds = statistics.median(self._seconds(variant))
            result[f"{variant}_seconds"] = seconds
            result[f"{variant}_megabytes_per_second"] = self.megabytes / seconds
        for small, large in self._pairs():
            result |= {
                f"{small.kind}_small_megabytes": small.megabytes,
                f"{small.kind}_large_megabytes": large.megabytes,
                f"{small.kind}_small_peak_mib": small.mebibytes,
                f"{small.kind}_large_peak_mib": large.mebibytes,
                f"{small.kind}_large_over_small_peak": large.mebibytes / small.mebibytes,
            }
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        share, p20, p80 = self.share()
        sections = [
            "# Preprocessing: the tool against the tokenizer alone",
            table(
                ["ratio of medians", "value", "p20", "p80", "target"],
                [
                    [
                        "throughput of the tool over that of encode_batch",
                        number(share, ".2f"),
                        number(p20, ".2f"),
                        number(p80, ".2f"),
                        f"at least {TARGET}",
                    ]
                ],
            ),
            table(["", "seconds", "MB/s", "runs"], self._speed_rows()),
            table(
                ["peak memory, all processes", "small: MB", "MiB", "large: MB", "MiB", "ratio"],
                self._memory_rows(),
            ),
            "How it is measured, and how to read it: benchmarks/README.md.",
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every run, one a line."""
        return rows_csv(asdict(timing) for timing in self.timings)

    def _seconds(self, variant: str) -> list[float]:
        return [timing.seconds for timing in self.timings if timing.variant == variant]

    def _pairs(self) -> Iterable[tuple[Peak, Peak]]:
        for kind in dict.fromkeys(peak.kind for peak in self.peaks):
            small, large = sorted(
                (peak for peak in self.peaks if peak.kind == kind),
                key=lambda peak: peak.megabytes,
            )
            yield small, large

    def _speed_rows(self) -> Iterator[list[str]]:
        for variant, title in TITLES.items():
            seconds = self._seconds(variant)
            median = statistics.median(seconds)
            yield [
                title,
                number(median, ".2f"),
                number(self.megabytes / median, ".2f"),
                str(len(seconds)),
            ]

    def _memory_rows(self) -> Iterator[list[str]]:
        titles = {"lines": "a document a line (.jsonl)", "text": "one document (.txt)"}
        for small, large in self._pairs():
            yield [
                titles[small.kind],
                number(small.megabytes, ".0f"),
                number(small.mebibytes, ".0f"),
                number(large.megabytes, ".0f"),
                number(large.mebibytes, ".0f"),
                number(large.mebibytes / small.mebibytes, ".2f"),
            ]


@dataclass(frozen=True)
class Sizes:
    """How much text each part of the benchmark gets, in MB."""

    timed: float
    small: float
    large: float
    vocabulary: int


FULL_SIZES = Sizes(timed=30, small=10, large=100, vocabulary=8192)
QUICK_SIZES = Sizes(timed=1, small=1, large=2, vocabulary=300)


def texts_of(megabytes: float) -> Iterator[str]:
    """The library's files, over and over, until there are so many megabytes of UTF-8."""
    left = megabytes * 1e6
    for source in itertools.cycle(library_sources()):
        if left <= 0:
            return
        left -= len(source.text.encode())
        yield source.text


def write_lines(path: Path, megabytes: float) -> None:
    """Write a .jsonl file of so much text."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts_of(megabytes))


def encode_batch_seconds(path: Path, tokenizer_file: Path) -> float:
    """How long the tokenizer's `encode_batch` takes for the texts of a .jsonl file, which are in
    memory before it begins. To be called in a process that has not used a tokenizer before."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    with path.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    begin = time.perf_counter()
    for documents in itertools.batched(texts, DOCUMENTS_AT_ONCE):
        tokenizer.encode_batch(list(documents))
    return time.perf_counter() - begin


def run_the_tool(source: Path, tokenizer: Path, workers: int) -> tuple[float, float, float]:
    """The tool's own seconds, those of the command, and its peak memory in MiB."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py")]
        command += ["--input", str(source), "--output-prefix", f"{folder}/x", "--append-eod"]
        command += ["--tokenizer-model", str(tokenizer), "--workers", str(workers)]
        command += ["--json", str(result)]
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        mebibytes = _peak_until_it_ends(process)
        command_seconds = time.perf_counter() - begin
        if process.returncode:
            raise ChildProcessError(f"{source}: the tool ended with {process.returncode}")
        return json.loads(result.read_text())["seconds"], command_seconds, mebibytes


def _peak_until_it_ends(process: subprocess.Popen[bytes]) -> float:
    """The sum of the largest memory that each process had: no less than all had at any time."""
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in [process.pid, *_children(process.pid)]:
            # The latest: before its exec, a child counts with all that its parent has.
            peaks[pid] = _peak_kib(pid) or peaks.get(pid, 0)
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    return sum(peaks.values()) / 1024.0


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def _peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def race(folder: Path, tokenizer: Path, sizes: Sizes, workers: int, rounds: int) -> list[Timing]:
    """Both variants, in turns, over the same file; the order is rotated from round to round."""
    corpus = folder / "timed.jsonl"
    write_lines(corpus, sizes.timed)
    # As many threads for encode_batch as the tool has workers.
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    timings = []
    for round_number in range(rounds):
        for variant in rotated(list(TITLES), round_number):
            print(f"round {round_number + 1} of {rounds}: {TITLES[variant]}", flush=True)
            if variant == TOOL:
                seconds, command_seconds, _ = run_the_tool(corpus, tokenizer, workers)
                timings.append(Timing(variant, round_number, seconds, command_seconds))
                continue
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                found = pool.submit(encode_batch_seconds, corpus, tokenizer / "tokenizer.json")
                timings.append(Timing(variant, round_number, found.result(), None))
    return timings


def measure_memory(folder: Path, tokenizer: Path, sizes: Sizes, workers: int) -> list[Peak]:
    """What the tool takes for a little input and for much, as lines and as one document."""
    peaks = []
    for megabytes in (sizes.small, sizes.large):
        lines, text = folder / "memory.jsonl", folder / "memory.txt"
        write_lines(lines, megabytes)
        with text.open("w", encoding="utf-8") as file:
            file.writelines(texts_of(megabytes))
        for kind, path in (("lines", lines), ("text", text)):
            print(f"memory: {kind}, {megabytes:g} MB", flush=True)
            *_, mebibytes = run_the_tool(path, tokenizer, workers)
            peaks.append(Peak(kind, megabytes, mebibytes))
            path.unlink()
    return peaks


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None.

    Raises:
        ValueError: for more workers than there are cores.
    """
    parser = ToolParser("Race tools/preprocess_data.py against the tokenizer alone.")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=whole_number(1), default=len(cores), help="on as many cores (%(default)s)"
    )
    parser.add_argument("--rounds", type=whole_number(1), help="(5; quick: 1)")
    parser.add_argument(
        "--quick", action="store_true", help="little text, to see that everything runs"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="for the table and the runs (benchmarks/results; quick: nowhere)",
    )
    args = parser.parse_args(argv)
    if args.workers > len(cores):
        raise ValueError(
            f"--workers {args.workers}: there are {len(cores)} cores; nearest legal value: "
            f"{len(cores)}"
        )
    args.results = args.results or (None if args.quick else RESULTS)
    sizes = QUICK_SIZES if args.quick else FULL_SIZES
    settings: dict[str, object] = {
        "workers": args.workers,
        "rounds": args.rounds or (1 if args.quick else 5),
        "text_megabytes": sizes.timed,
        "vocabulary": sizes.vocabulary,
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    # Both variants, with all their processes, on the same cores.
    os.sched_setaffinity(0, cores[: args.workers])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"training a tokenizer of {sizes.vocabulary} tokens", flush=True)
        sample = (source.text for source in library_sources()[::4])
        train_tokenizer(sample, sizes.vocabulary).save_pretrained(folder / "tokenizer")
        timings = race(
            folder, folder / "tokenizer", sizes, args.workers, int(str(settings["rounds"]))
        )
        peaks = measure_memory(folder, folder / "tokenizer", sizes, args.workers)
    report = PreprocessReport(
        settings=settings,
        machine=describe_machine(REPOSITORY),
        megabytes=sizes.timed,
        timings=timings,
        peaks=peaks,
    )
    publish("preprocess", report, args)


if __name__ == "__main__":
    run_tool(main)

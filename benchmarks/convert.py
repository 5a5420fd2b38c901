"""How fast are import and export, and how much memory do they take?

Each conversion runs in a process of its own, which measures its peak of resident memory above what
it had before; a copy of the source's files takes turns with them. README.md says how to read it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

# Run from a checkout, the package may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.command import REPOSITORY, RESULTS, publish
from benchmarks.harness import percentile
from benchmarks.report import (
    flat_provenance,
    number,
    provenance,
    rows_csv,
    table,
)
from boost_layers.config import LowRankConfig
from megatron.boost.command_line import ToolParser, run_tool, whole_number
from megatron.boost.conversion.checkpoint_writer import checkpoint_entries, write_checkpoint
from megatron.boost.conversion.description import ModelDescription
from megatron.boost.conversion.exporting import plan_export, write_export
from megatron.boost.conversion.hf_config import hf_from_description
from megatron.boost.conversion.hf_folder import new_hf_folder
from megatron.boost.conversion.importing import exact_plan, open_source, write_import
from megatron.boost.conversion.megatron_arguments import arguments_from_description
from megatron.boost.conversion.names import hf_entries
from megatron.boost.machine import describe_machine

COPY = "copy"
IMPORT, EXPORT, EXPORT_LOW_RANK, MERGE = "import", "export", "export_low_rank", "export_merged"
TITLES = {
    IMPORT: "import, dense",
    EXPORT: "export, dense",
    EXPORT_LOW_RANK: "export, low-rank",
    MERGE: "export, merged",
    COPY: "copy of the dense folder",
}
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model that is converted, in fp32."""

    hidden: int = 1024
    ffn: int = 2752
    heads: int = 16
    layers: int = 24
    vocabulary: int = 8192
    rank: int = 256
    shard_mib: int = 200

    def description(self, low_rank: LowRankConfig) -> ModelDescription:
        """The model, full-rank or low-rank."""
        return ModelDescription(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.hidden // self.heads,
            max_positions=2048,
            norm_eps=1e-6,
            tied=False,
            dtype=torch.float32,
            low_rank=low_rank,
        )


QUICK = Sizes(hidden=64, ffn=128, heads=4, layers=2, vocabulary=256, rank=16, shard_mib=1)


@dataclass(frozen=True)
class Run:
    """One conversion, measured."""

    round: int
    conversion: str
    seconds: float
    written_bytes: int
    peak_bytes: int
    """Resident at most, above what was resident before."""

    @property
    def mb_per_second(self) -> float:
        """Megabytes (10⁶) written a second."""
        return self.written_bytes / 1e6 / self.seconds


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """One run of the benchmark."""

    settings: Mapping[str, object]
    machine: Mapping[str, str]
    runs: Sequence[Run]
    allowed_bytes: Mapping[str, int]
    """By conversion: its largest layer and one output shard."""

    def flat(self) -> dict[str, object]:
        """Everything under flat keys with their units."""
        result: dict[str, object] = {}
        for name in TITLES:
            rates, peak = self._rates(name), self._peak(name)
            result |= {
                f"{name}_mb_per_second": percentile(rates, 50),
                f"{name}_p20_mb_per_second": percentile(rates, 20),
                f"{name}_p80_mb_per_second": percentile(rates, 80),
                f"{name}_peak_mib": peak / _MIB,
            }
            if name != COPY:
                result |= {
                    f"{name}_share_of_copy": self._share(name),
                    f"{name}_layer_and_shard_mib": self.allowed_bytes[name] / _MIB,
                    f"{name}_peak_over_layer_and_shard": peak / self.allowed_bytes[name],
                }
        return result | flat_provenance(self.settings, self.machine)

    def markdown(self) -> str:
        """The result for people, as a Markdown page."""
        head = ["", "MB/s", "p20", "p80", "share of the copy", "peak MiB", "layer + shard MiB"]
        sections = [
            "# Import and export: speed and memory",
            table([*head, "peak over that"], [self._cells(name) for name in TITLES]),
            "MB/s: megabytes written a second. peak: resident memory above that of the process "
            "with everything imported, the most of all rounds. layer + shard: the largest layer "
            "and one output file. benchmarks/README.md says more.",
            *provenance(self.settings, self.machine),
        ]
        return "\n\n".join(sections) + "\n"

    def csv(self) -> str:
        """Every run, one a line."""
        return rows_csv(asdict(run) for run in self.runs)

    def _of(self, name: str) -> list[Run]:
        return [run for run in self.runs if run.conversion == name]

    def _rates(self, name: str) -> list[float]:
        return [run.mb_per_second for run in self._of(name)]

    def _peak(self, name: str) -> int:
        return max(run.peak_bytes for run in self._of(name))

    def _share(self, name: str) -> float | None:
        own, copy = (percentile(self._rates(each), 50) for each in (name, COPY))
        return None if own is None or copy is None else own / copy

    def _cells(self, name: str) -> list[str]:
        rates, peak = self._rates(name), self._peak(name)
        cells = [TITLES[name], *(number(percentile(rates, q), ".0f") for q in (50, 20, 80))]
        allowed = self.allowed_bytes.get(name)
        return [
            *cells,
            number(self._share(name), ".2f") if allowed else "",
            f"{peak / _MIB:.0f}",
            f"{allowed / _MIB:.0f}" if allowed else "",
            f"{peak / allowed:.2f}" if allowed else "",
        ]


def main(argv: Sequence[str] | None) -> None:
    """Run the benchmark with `argv`, or the command line when it is None."""
    parser = ToolParser("Measure the speed and the memory of import and export.")
    parser.add_argument("--steps", type=whole_number(1), help="of each conversion (5; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="on the disk to measure (that of temporary files)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="for the table and the runs (benchmarks/results; quick: nowhere)",
    )
    args = parser.parse_args(argv)
    sizes = QUICK if args.quick else Sizes()
    args.results = args.results or (None if args.quick else RESULTS)
    rounds = args.steps or (1 if args.quick else 5)
    machine = describe_machine(REPOSITORY)
    settings: dict[str, object] = {
        **asdict(sizes),
        "dtype": "fp32",
        "rounds": rounds,
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as folder:
        runs = race(Path(folder), sizes, rounds)
    publish(
        "convert",
        ConvertReport(
            settings=settings, machine=machine, runs=runs, allowed_bytes=allowed_bytes(sizes)
        ),
        args,
    )


def race(root: Path, sizes: Sizes, rounds: int) -> list[Run]:
    """Make the sources in `root` and measure all conversions in turn, each in a process that ends
    with it."""
    processes = multiprocessing.get_context("spawn")
    with processes.Pool(1, maxtasksperchild=1) as pool:
        pool.apply(make_sources, (root, sizes))
        return [
            pool.apply(measure, (number, name, root, sizes))
            for number in range(rounds)
            for name in TITLES
        ]


def _random(shapes: Mapping[str, tuple[int, ...]], name: str) -> Tensor:
    return torch.randn(shapes[name])


def make_sources(root: Path, sizes: Sizes) -> None:
    """A dense Hugging Face folder, a dense and a low-rank checkpoint, of random weights."""
    dense = sizes.description(LowRankConfig(arch="dense"))
    low_rank = sizes.description(LowRankConfig(arch="svd", rank=sizes.rank))
    with new_hf_folder(root / "hf", sizes.shard_mib * _MIB) as writer:
        writer.add_json("config.json", hf_from_description(dense))
        for entry in hf_entries(dense):
            writer.add(entry.name, torch.randn(entry.shape))
    for name, model, own in (("dense", dense, True), ("low-rank", low_rank, False)):
        shapes = model.tensors()
        (root / name).mkdir()
        write_checkpoint(
            root / name,
            checkpoint_entries(model, megatrons_own=own),
            partial(_random, shapes),
            dict.fromkeys(shapes, torch.float32),
            arguments_from_description(model, megatrons_own=own),
        )


def measure(number: int, name: str, root: Path, sizes: Sizes) -> Run:
    """Run one conversion in this process, and remove what it wrote."""
    target = root / "target"
    convert = _conversions(root, target, sizes.shard_mib * _MIB)[name]
    before = _start_peak()
    started = time.perf_counter()
    written = convert()
    # What the disk has not got yet is no speed.
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    run = Run(number, name, seconds, written, _peak() - before)
    shutil.rmtree(target)
    return run


def allowed_bytes(sizes: Sizes) -> dict[str, int]:
    """By conversion, the bytes of its largest layer (or tensor outside the layers) and of one
    output file: a shard, or the largest tensor if that is larger; on import again a layer."""
    dense = sizes.description(LowRankConfig(arch="dense"))
    low_rank = sizes.description(LowRankConfig(arch="svd", rank=sizes.rank))

    def layer(model: ModelDescription) -> int:
        shapes = model.layer_tensors(0).values()
        vocabulary = model.vocab_size * model.hidden_size
        return 4 * max(sum(torch.Size(shape).numel() for shape in shapes), vocabulary)

    shard = max(sizes.shard_mib * _MIB, 4 * sizes.vocabulary * sizes.hidden)
    return {
        IMPORT: 2 * layer(dense),
        EXPORT: layer(dense) + shard,
        EXPORT_LOW_RANK: layer(low_rank) + shard,
        MERGE: layer(low_rank) + shard,
    }


def _conversions(root: Path, target: Path, shard: int) -> dict[str, Callable[[], int]]:
    """What each conversion does; it returns the bytes of tensors written."""

    def export(load: str, merge: bool = False) -> int:
        return write_export(plan_export(root / load, merge=merge), target, max_shard_size=shard)

    def copy() -> int:
        shutil.copytree(root / "hf", target)
        return sum(path.stat().st_size for path in target.iterdir())

    return {
        IMPORT: lambda: write_import(exact_plan(open_source(root / "hf")), target),
        EXPORT: lambda: export("dense"),
        EXPORT_LOW_RANK: lambda: export("low-rank"),
        MERGE: lambda: export("low-rank", merge=True),
        COPY: copy,
    }


def _start_peak() -> int:
    """Resident bytes, and from now on the peak counts from them."""
    # The kernel's way to forget the peak of this process so far.
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    run_tool(main)

"""The demo from corpus to report."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from megatron.boost.command_line import write_text
from megatron.boost.corpus import Corpus, prepare_corpus
from megatron.boost.demo.curves import loss_figure
from megatron.boost.demo.launch import run_training
from megatron.boost.demo.progress import show_run
from megatron.boost.demo.recipe import (
    COLA_BTP,
    COLA_VANILLA,
    FULL_RANK,
    RANKS,
    STRATEGIES,
    Recipe,
    Strategy,
)
from megatron.boost.demo.report import html_report
from megatron.boost.demo.results import Result, flat_results, read_result
from megatron.boost.demo.table import terminal_table
from megatron.boost.machine import describe_machine
from megatron.boost.plotting.figure import save_png, svg
from megatron.boost.training_log import TrainingLog

VOCABULARY_SIZE = 4096


def run_demo(repository: Path, out: Path, recipe: Recipe, console: Console) -> dict[str, object]:
    """Train every strategy, print the table, write `out`/report.html and loss.png.

    `repository` is the checkout with pretrain_gpt.py; the corpus is cached in its runs/corpus.
    Returns the results as flat JSON values. Raises `TrainingFailed` when a run fails; then there
    is no report, not even that of an earlier demo.
    """
    start = time.perf_counter()
    report, picture = out / "report.html", out / "loss.png"
    report.unlink(missing_ok=True)
    picture.unlink(missing_ok=True)

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True)

    corpus = prepare_corpus(
        _from_here(repository / "runs" / "corpus"),
        vocabulary_size=VOCABULARY_SIZE,
        on_stage=lambda stage: say(f"corpus: {stage}"),
    )
    say(
        f"corpus: {corpus.train_files} files, {corpus.train_tokens:,} tokens to train on; "
        f"{corpus.validation_files} files, {corpus.validation_tokens:,} tokens to validate on"
    )
    commands = {
        strategy: training_command(strategy, recipe, corpus, repository, out)
        for strategy in STRATEGIES
    }
    results = [
        _train(strategy, recipe, command, out, console) for strategy, command in commands.items()
    ]
    console.print(terminal_table(results))
    findings = findings_of(results)
    for sentence in findings:
        say(sentence)
    machine = describe_machine(repository)
    figure = loss_figure(results)
    save_png(figure, picture)
    page = html_report(
        findings,
        results,
        svg(figure),
        {
            "Corpus": _readable(asdict(corpus)),
            "Recipe": _readable(asdict(recipe)),
            "Machine": machine,
        },
        {strategy.title: shlex.join(command) for strategy, command in commands.items()},
    )
    write_text(report, page)
    seconds = time.perf_counter() - start
    say(f"report: {report} (the demo took {seconds / 60:.1f} minutes)")
    return (
        flat_results(results)
        | {"seconds": seconds}
        | {f"machine_{name}": value for name, value in machine.items()}
    )


def training_command(
    strategy: Strategy, recipe: Recipe, corpus: Corpus, repository: Path, out: Path
) -> list[str]:
    """The command line that trains `strategy`, to be run in the current folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return [
        "python",
        *launcher,
        str(_from_here(repository / "pretrain_gpt.py")),
        *recipe.flags(corpus, out / "index"),
        *strategy.flags,
        *(["--low-rank-ratio", str(recipe.rank_ratio)] if strategy.low_rank else []),
        "--low-rank-comm-report",
        str(_report_of(strategy, out)),
    ]


def findings_of(results: Sequence[Result]) -> list[str]:
    """What the numbers say, in sentences."""
    by_key = {result.strategy.key: result for result in results}
    btp, dense, vanilla = (by_key[strategy.key] for strategy in (COLA_BTP, FULL_RANK, COLA_VANILLA))
    return [
        f"An iteration with BTP takes {btp.iteration_ms:,.0f} ms: full-rank "
        f"{dense.iteration_ms / btp.iteration_ms:.2f} times as long, vanilla low-rank tensor "
        f"parallelism {vanilla.iteration_ms / btp.iteration_ms:.2f} times.",
        f"After {len(btp.losses)} steps on the same tokens the validation loss is "
        f"{btp.validation_loss:.3f} with BTP, {vanilla.validation_loss:.3f} vanilla (the same "
        f"model) and {dense.validation_loss:.3f} full-rank, with {btp.parameters / 1e6:.1f} M "
        f"parameters against {dense.parameters / 1e6:.1f} M.",
    ]


def _train(
    strategy: Strategy,
    recipe: Recipe,
    command: Sequence[str],
    out: Path,
    console: Console,
) -> Result:
    log = TrainingLog()
    report = _report_of(strategy, out)
    report.unlink(missing_ok=True)
    with show_run(console, strategy.title, recipe.steps) as show:

        def on_line(line: str) -> None:
            iteration = log.feed(line)
            if iteration is not None:
                show(iteration, recipe.tokens_per_step / iteration.milliseconds * 1000)

        run_training(
            strategy.title,
            [sys.executable, *command[1:]],
            report.parent / "log.txt",
            on_line,
            environment=training_environment(os.environ),
        )
    return read_result(strategy, recipe, log, report)


def training_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for the ranks: one thread each, lines at once, no network; and glibc keeps
    freed memory in one heap, as torch keeps a GPU's, instead of giving every large block back to
    the kernel and taking it anew, page fault by page fault, in each step."""
    return dict(environment) | {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _report_of(strategy: Strategy, out: Path) -> Path:
    return out / strategy.folder / "collectives.json"


def _from_here(path: Path) -> Path:
    """`path` relative to the current folder: shorter, and no secret of the machine."""
    return Path(os.path.relpath(path))


def _readable(values: Mapping[str, object]) -> dict[str, str]:
    return {
        name.replace("_", " "): f"{value:,}"
        if isinstance(value, int) and value >= 10_000
        else str(value)
        for name, value in values.items()
    }

"""The recipes by name, and the command lines that `examples/train.sh` makes of them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.boost.recipes.table import table_rows

EXAMPLES = Path(__file__).parents[3] / "examples"
ARCHITECTURES = ("cola", "svd", "lax")


@dataclass(frozen=True)
class Recipe:
    """One of the runs that the script can start."""

    training: str
    size: str
    strategy: str
    arch: str | None
    """None for a full-rank model."""

    @property
    def name(self) -> str:
        """As the script is told, e.g. `llama2 7B btp cola`."""
        return " ".join((self.training, self.size, self.strategy, *self._arch))

    @property
    def _arch(self) -> tuple[str, ...]:
        return () if self.arch is None else (self.arch,)

    @property
    def words(self) -> tuple[str, ...]:
        """The script's arguments."""
        return (self.size, self.strategy, *self._arch)


@dataclass(frozen=True)
class Command:
    """A command line of torchrun's, taken apart."""

    world_size: int
    script: str
    flags: tuple[str, ...]
    """What the script is given."""


def all_recipes() -> Iterator[Recipe]:
    """Every recipe that the table has a layout for; CoLA's training is CoLA's."""
    for training, size, strategy, *_ in table_rows("layout"):
        low_rank = ("cola",) if training == "cola" else ARCHITECTURES
        for arch in (None,) if strategy == "full-rank" else low_rank:
            yield Recipe(training, size, strategy, arch)


def command_of(recipe: Recipe, *flags: str) -> Command:
    """What the script would run for a recipe, on the GPUs that its layout is for.

    Args:
        recipe: which one.
        flags: more flags for it.

    Raises:
        ValueError: with the script's own words where it refuses, and where this package was
            installed without it.
    """
    script = EXAMPLES / "train.sh"
    if not script.is_file():
        raise ValueError(f"{script}: is not there; it stands in the project's checkout")
    inherited = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
    done = subprocess.run(
        ["bash", str(script), *recipe.words, *flags],
        env=inherited | {"DRY_RUN": "command", "TRAINING": recipe.training},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(done.stderr.removeprefix("error: ").strip())
    return parsed_command(done.stdout)


def parsed_command(printed: str) -> Command:
    """The command of a dry run's output."""
    words = shlex.split(printed[printed.index("torchrun ") :].replace("\\\n", " "))
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    launcher = dict(zip(words[1:place:2], words[2:place:2], strict=True))
    world_size = int(launcher["--nnodes"]) * int(launcher["--nproc-per-node"])
    return Command(world_size, words[place], tuple(words[place + 1 :]))

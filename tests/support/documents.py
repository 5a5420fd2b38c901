"""The pages of the documentation: the commands on them, and how a test runs these."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_RECIPE = re.compile(r"^### (.+?)\n.*?^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """The commands of every shell block of a page, which is named from the root."""
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def recipes(page: str) -> dict[str, str]:
    """The commands of each recipe of a page by its heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return dict(_RECIPE.findall(text.partition("## Recipes")[2]))


def cut(commands: str, by: Mapping[str, str]) -> str:
    """The commands with what is written there replaced, so that they take less time."""
    for written, instead in by.items():
        commands = commands.replace(written, instead)
    return commands


def assert_written(by: Mapping[str, str], commands: Iterable[str]) -> None:
    """What is to be cut stands somewhere in the commands."""
    together = "\n".join(commands)
    assert [written for written in by if written not in together] == []


def run_commands(commands: str, folder: Path) -> str:
    """What they print, run by a shell in `folder` with this Python's programs on the PATH; the
    checkout's tools lie in the folder too."""
    for name in ("tools", "pretrain_gpt.py", "examples", "megatron", "boost_layers"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
    return done.stdout

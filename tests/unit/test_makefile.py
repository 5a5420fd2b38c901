"""When make builds the virtual environment anew, installs into it, or leaves it alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKES_ENVIRONMENT = "-m venv --clear"
INSTALLS = "-m pip install"


def _make(*arguments: str) -> subprocess.CompletedProcess:
    # Neither what an outer make hands down nor the machine's PYTHON may count here.
    inherited = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "VENV"}
    environment = {name: os.environ[name] for name in os.environ if name not in inherited}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def _planned(folder: Path, *arguments: str) -> str:
    result = _make("--dry-run", f"VENV={folder}", *arguments, str(folder / ".installed"))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """What make takes for a virtual environment in which all is installed."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / ".installed").touch()
    return folder


def test_first_run_makes_and_installs(tmp_path: Path) -> None:
    planned = _planned(tmp_path / "none", f"PYTHON={sys.executable}")
    assert MAKES_ENVIRONMENT in planned
    assert INSTALLS in planned


def test_installed_environment_is_left_alone(environment: Path) -> None:
    planned = _planned(environment)
    assert MAKES_ENVIRONMENT not in planned
    assert INSTALLS not in planned


def test_changed_metadata_is_installed_again(environment: Path) -> None:
    os.utime(environment / ".installed", (0, 0))
    planned = _planned(environment)
    assert MAKES_ENVIRONMENT not in planned
    assert INSTALLS in planned


@pytest.mark.parametrize("body", ["exit 127", "echo 3.11.2; exit 1"])
def test_environment_that_does_not_fit_is_made_anew(environment: Path, body: str) -> None:
    (environment / "bin" / "python").write_text(f"#!/bin/sh\n{body}\n")
    planned = _planned(environment, f"PYTHON={sys.executable}")
    assert MAKES_ENVIRONMENT in planned
    assert INSTALLS in planned


def test_bad_python_is_refused_although_an_environment_is_there(environment: Path) -> None:
    result = _make("check", f"VENV={environment}", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "error: PYTHON=no-such-python: no such program" in result.stderr
    assert (environment / ".installed").exists()


def test_plain_make_lists_the_targets() -> None:
    result = _make()
    assert result.returncode == 0
    for target in ("demo", "test", "test-fast", "check", "bench"):
        assert f"\n  {target} " in result.stdout

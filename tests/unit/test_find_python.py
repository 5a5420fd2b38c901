"""scripts/find_python.sh, with interpreters made up for the test as the only ones there are."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_python.sh"
FITS = SCRIPT.with_name("venv_fits.sh")
COREUTILS = "cat dirname printf sort tr".split()


class Machine:
    """A home folder and a PATH of two folders that hold nothing but what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.first = root / "first"
        self.second = root / "second"
        tools = root / "tools"
        for folder in (self.home, self.first, self.second, tools):
            folder.mkdir()
        for name in COREUTILS:
            found = subprocess.run(["which", name], capture_output=True, text=True).stdout.strip()
            if found:
                (tools / name).symlink_to(found)
        self.path = f"{self.first}:{self.second}:{tools}"

    def run(self, *arguments: str | Path, script: Path = SCRIPT) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["/bin/sh", script, *arguments],
            env={"PATH": self.path, "HOME": str(self.home)},
            capture_output=True,
            text=True,
        )

    def pyenv(self, version: str) -> Path:
        return self.home / ".pyenv" / "versions" / version / "bin" / "python"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def _script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _fake_python(path: Path, version: str, modules: bool = True) -> Path:
    """An interpreter that answers what this one would if it were of that version."""
    major, minor, micro = (int(part) for part in version.split("."))
    prelude = (
        f"import sys, platform; sys.version_info = ({major}, {minor}, {micro}); "
        f"platform.python_version = lambda: {version!r}; "
    )
    if not modules:
        prelude += "sys.modules['ensurepip'] = None; "
    return _script(path, f'exec {sys.executable} -c "{prelude}\n$2"')


def test_newest_tested_version_on_path_comes_first(machine: Machine) -> None:
    _fake_python(machine.first / "python3.12", "3.12.4")
    newest = _fake_python(machine.second / "python3.13", "3.13.1")
    assert machine.run().stdout.strip() == str(newest)


def test_every_folder_of_path_is_looked_through(machine: Machine) -> None:
    _fake_python(machine.first / "python3", "3.11.2")
    _script(
        machine.first / "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127"
    )
    good = _fake_python(machine.second / "python3", "3.14.0")
    assert machine.run().stdout.strip() == str(good)


def test_python_without_ensurepip_is_passed_over(machine: Machine) -> None:
    _fake_python(machine.first / "python3", "3.12.3", modules=False)
    good = _fake_python(machine.second / "python", "3.12.3")
    assert machine.run().stdout.strip() == str(good)


def test_virtual_environments_are_passed_over(machine: Machine) -> None:
    environment = machine.root / "environment"
    _fake_python(environment / "bin" / "python3", "3.12.3")
    (environment / "pyvenv.cfg").touch()
    machine.path = f"{environment / 'bin'}:{machine.path}"
    base = _fake_python(machine.second / "python3", "3.12.3")
    assert machine.run().stdout.strip() == str(base)


def test_pyenv_is_searched_without_being_on_path(machine: Machine) -> None:
    for version in ("3.9.18", "3.12.9", "3.12.10"):
        _fake_python(machine.pyenv(version), version)
    assert machine.run().stdout.strip() == str(machine.pyenv("3.12.10"))
    _fake_python(machine.pyenv("3.15.0"), "3.15.0")
    _fake_python(machine.pyenv("3.13.0t"), "3.13.0")
    _fake_python(machine.pyenv("3.13.0"), "3.13.0")
    assert machine.run().stdout.strip() == str(machine.pyenv("3.13.0"))


def test_uv_is_asked_last(machine: Machine) -> None:
    managed = _fake_python(machine.root / "uv" / "python3.13", "3.13.2")
    _script(machine.first / "uv", f'[ "$*" = "python find --system 3.13" ] && echo {managed}')
    assert machine.run().stdout.strip() == str(managed)
    on_path = _fake_python(machine.second / "python3", "3.12.0")
    assert machine.run().stdout.strip() == str(on_path)


def test_none_at_all_says_what_to_install(machine: Machine) -> None:
    _fake_python(machine.first / "python3", "3.11.2")
    result = machine.run()
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no Python >= 3.12")
    for remedy in ("apt-get install", "pyenv install", "uv python install", "make PYTHON="):
        assert remedy in result.stderr


def test_named_python_is_taken_before_any_other(machine: Machine) -> None:
    _fake_python(machine.first / "python3.13", "3.13.1")
    named = _fake_python(machine.root / "mine" / "python", "3.12.0")
    assert machine.run(named).stdout.strip() == str(named)
    short = _fake_python(machine.second / "python-mine", "3.12.0")
    assert machine.run("python-mine").stdout.strip() == str(short)


def test_bad_named_python_is_refused_in_one_line_although_another_would_do(
    machine: Machine,
) -> None:
    _fake_python(machine.first / "python3.13", "3.13.1")
    old = _fake_python(machine.first / "python3", "3.11.2")
    broken = _script(machine.first / "broken", "exit 3")
    for named, reason in [
        (str(old), "is Python 3.11.2"),
        (str(broken), "does not run as a Python"),
        ("nowhere", "no such program"),
    ]:
        result = machine.run(named)
        assert result.returncode == 1
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: PYTHON={named}")
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1


def test_environment_fits_while_it_runs_and_is_of_the_version_asked_for(machine: Machine) -> None:
    environment = machine.root / "environment"
    assert machine.run(environment, script=FITS).returncode == 1
    interpreter = _fake_python(environment / "bin" / "python", "3.12.3")
    assert machine.run(environment, script=FITS).returncode == 0
    same = _fake_python(machine.first / "same", "3.12.3")
    other = _fake_python(machine.first / "other", "3.13.0")
    assert machine.run(environment, same, script=FITS).returncode == 0
    assert machine.run(environment, other, script=FITS).returncode == 1
    _fake_python(interpreter, "3.11.9")
    assert machine.run(environment, script=FITS).returncode == 1

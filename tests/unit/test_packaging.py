"""Our share of `megatron` joins pip's, however the project is installed.

Each case has a virtual environment of its own that sees the packages of the current one (as a plain
path: what the current one has installed by a .pth file, this project among it, is not seen).
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
PACKAGES = ["boost_layers", "megatron/boost"]

IMPORT_ALL = """
import json
import megatron.core, megatron.training, megatron.boost, boost_layers
modules = [megatron.core, megatron.training, megatron.boost, boost_layers]
print(json.dumps({module.__name__: module.__file__ for module in modules}))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that the build leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in PACKAGES:
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    for name in ["pyproject.toml", "setup.py", "LICENSE", "README.md"]:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--wheel-dir", folder, sources)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without this project; returns its interpreter."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "base.pth").write_text(f"{SITE_PACKAGES}\n")
    return python


def _pip(command: str, *arguments: str | Path, python: Path | None = None) -> None:
    target = ["--python", python] if python else []
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    _run(Path(sys.executable), "-m", "pip", *target, command, *offline, *arguments)


def _run(python: Path, *arguments: str | Path, cwd: Path | None = None) -> str:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    # Plain Python, as a build in isolation is; the extension takes a minute.
    environment["BOOST_BUILD"] = "none"
    result = subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _origins(python: Path, cwd: Path) -> dict[str, Path]:
    """The file that each of the four packages comes from."""
    printed = _run(python, "-c", IMPORT_ALL, cwd=cwd)
    return {name: Path(file) for name, file in json.loads(printed.splitlines()[-1]).items()}


def _assert_joined(origins: dict[str, Path], ours: Path) -> None:
    assert origins == {
        "megatron.core": SITE_PACKAGES / "megatron" / "core" / "__init__.py",
        "megatron.training": SITE_PACKAGES / "megatron" / "training" / "__init__.py",
        "megatron.boost": ours / "megatron" / "boost" / "__init__.py",
        "boost_layers": ours / "boost_layers" / "__init__.py",
    }


def test_from_a_wheel(wheel: Path, environment: Path, tmp_path: Path) -> None:
    _pip("install", wheel, python=environment)
    site_packages = next(environment.parents[1].glob("lib/python*/site-packages"))
    _assert_joined(_origins(environment, tmp_path), site_packages)


def test_editable(sources: Path, environment: Path, tmp_path: Path) -> None:
    _pip("install", "--editable", sources, python=environment)
    _assert_joined(_origins(environment, tmp_path), sources)


def test_from_the_repository_root(environment: Path) -> None:
    _assert_joined(_origins(environment, ROOT), ROOT)


def test_wheel_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    files = [file for folder in PACKAGES for file in (ROOT / folder).rglob("*") if file.is_file()]
    ours = [str(file.relative_to(ROOT)) for file in files if file.suffix not in (".pyc", ".so")]
    assert sorted(names) == sorted(ours)


def test_without_installation_nothing_of_ours_is_found(environment: Path, tmp_path: Path) -> None:
    """Otherwise the cases above would show nothing."""
    code = "import importlib.util as u; print(u.find_spec('boost_layers'))"
    assert _run(environment, "-c", code, cwd=tmp_path).strip() == "None"

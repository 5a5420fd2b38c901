"""The layout's rules, read off the source: three floors, imports only downwards."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Floors of the repository, lowest first.
FLOORS = [{"boost_layers"}, {"megatron.boost"}, {"pretrain_gpt", "tools", "benchmarks"}, {"tests"}]

# Floors within boost_layers, lowest first. A new module is placed on one before it can be used;
# "__init__" is the package itself, which only those outside may import from.
LAYER_FLOORS = [
    {"communication", "config", "initialization", "ops", "rules"},
    {"transformer_features"},
    {"main_grads", "mappings", "place", "validation"},
    {"embedding", "kept", "parameters", "vocabulary"},
    {"latent", "norm"},
    {"carry", "recompute"},
    {"projection"},
    {"attention", "mlp"},
    {"layer"},
    {"annealing", "observation", "specs"},
    {"__init__"},
]


def _python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


LAYER_FILES = _python_files("boost_layers")
PROGRAM_FILES = [
    *LAYER_FILES,
    *_python_files("megatron", "tools", "benchmarks"),
    *sorted(set(ROOT.glob("*.py")) - {ROOT / "setup.py"}),
]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(source: str, package: str) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = above[: len(above) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def _imports_of(path: Path) -> Iterator[str]:
    return _imports(path.read_text(), ".".join(path.relative_to(ROOT).parent.parts))


def _place(module: str, floors: list[set[str]]) -> tuple[int, str] | None:
    """The floor that a module stands on and the name it is listed by."""
    for height, floor in enumerate(floors):
        for part in floor:
            if f"{module}.".startswith(f"{part}."):
                return height, part
    return None


def _upward(own: tuple[int, str], imports: Iterable[str], floors: list[set[str]]) -> list[str]:
    """The imports that lead neither into the module's own part nor to a lower floor."""
    places = {name: _place(name, floors) for name in imports}
    return [
        name
        for name, place in places.items()
        if place is not None and place[1] != own[1] and place[0] >= own[0]
    ]


def _within_layers(name: str) -> str:
    """Name below boost_layers; what no module is listed for comes from the package itself."""
    below = name.removeprefix("boost_layers").removeprefix(".")
    return below if _place(below, LAYER_FLOORS) else "__init__"


@pytest.mark.parametrize("path", PROGRAM_FILES, ids=_name)
def test_imports_lead_down_the_repositorys_floors(path: Path) -> None:
    own = _place(_module(path), FLOORS)
    assert own is not None, f"{_name(path)} stands on no floor: place it in {__file__}"
    assert _upward(own, _imports_of(path), FLOORS) == []


@pytest.mark.parametrize("path", LAYER_FILES, ids=_name)
def test_imports_lead_down_the_floors_of_the_layers(path: Path) -> None:
    below = _module(path).removeprefix("boost_layers").removeprefix(".") or "__init__"
    own = _place(below, LAYER_FLOORS)
    assert own is not None, f"{_name(path)} stands on no floor: place it in {__file__}"
    ours = [_within_layers(name) for name in _imports_of(path) if name.startswith("boost_layers")]
    assert _upward(own, ours, LAYER_FLOORS) == []


@pytest.mark.parametrize("path", LAYER_FILES, ids=_name)
def test_layers_know_neither_command_line_nor_training_loop(path: Path) -> None:
    imports = list(_imports_of(path))
    assert not [name for name in imports if name.startswith(("argparse", "megatron.training"))]
    assert not [
        name for name in imports if name.endswith(".get_args") and name != "typing.get_args"
    ]
    if path.stem == "__main__":
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [
        call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]


def test_no_file_is_a_drawer_for_everything() -> None:
    assert [
        path for path in [*PROGRAM_FILES, *_python_files("tests")] if path.stem == "utils"
    ] == []


def test_megatron_is_shared_with_pips_megatron_core() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


SOURCE = """
import boost_layers.ops
from boost_layers import communication, LowRankConfig
from . import norm
def late():
    from .specs import low_rank_spec
"""


def test_the_rules_notice_a_breach() -> None:
    names = list(_imports(SOURCE, "boost_layers"))
    assert names == [
        "boost_layers.ops",
        "boost_layers.communication",
        "boost_layers.LowRankConfig",
        "boost_layers.norm",
        "boost_layers.specs.low_rank_spec",
    ]
    ours = [_within_layers(name) for name in names]
    own = _place("norm", LAYER_FLOORS)
    assert own is not None
    assert _upward(own, ours, LAYER_FLOORS) == ["__init__", "specs.low_rank_spec"]
    assert _upward((0, "boost_layers"), ["megatron.boost.cpu", "torch"], FLOORS) == [
        "megatron.boost.cpu"
    ]
    assert _place("unheard_of", LAYER_FLOORS) is None

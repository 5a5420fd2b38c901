"""A cluster: what its GPUs compute, move and send in a second. One TOML file each, in `clusters/`.

Every field of the file is a field here; a file that lacks one, or has one more, is refused by name.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from megatron.boost.machine import processor

_PRESETS = Path(__file__).parent / "clusters"
_DTYPES = ("bf16", "fp16", "fp32")


def _described(text: str, *, most: float = math.inf, zero: bool = False) -> Any:
    """A field of the file with what it means, for the message that asks for it, the largest number
    that it may be, and whether it may be 0."""
    return field(metadata={"meaning": text, "most": most, "zero": zero})


def _share(text: str, *, zero: bool = False) -> Any:
    return _described(text, most=1.0, zero=zero)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Products in one dtype."""

    peak_tflops: float = _described("dense peak of the dtype's matrix units, TFLOP/s")
    gemm_efficiency: float = _share("share of the peak that a GEMM with a long sum reaches")
    gemm_half_depth: float = _described(
        "k at which a GEMM [m, k]·[k, n] runs at half of that", zero=True
    )
    gemm_fixed_us: float = _described("what a GEMM takes however small it is, µs", zero=True)
    gemm_packing: float = _described(
        "how often a GEMM's bytes are moved in turn with its arithmetic (0: beside it, on a GPU)",
        zero=True,
    )
    attention_forward_efficiency: float = _share(
        "share of the peak of the fused causal attention, forward"
    )
    attention_backward_efficiency: float = _share("the same, backward (5/2 of the operations)")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The GPU's memory."""

    capacity_gib: float = _described("memory of one GPU, GiB")
    reserved_gib: float = _described(
        "of that, what the context, the communicator and fragments take, GiB", zero=True
    )
    bandwidth_gb_per_s: float = _described("nominal bandwidth, GB/s")
    elementwise_efficiency: float = _share("share of the bandwidth that small kernels reach")

    def __post_init__(self) -> None:
        if self.reserved_gib >= self.capacity_gib:
            raise ValueError(
                f"memory.reserved_gib = {self.reserved_gib:g}: must be less than "
                f"memory.capacity_gib, {self.capacity_gib:g}; nearest legal value: 0"
            )


@dataclass(frozen=True, kw_only=True)
class Link:
    """Collectives between GPUs: each takes latency + sent bytes / bus bandwidth (α–β)."""

    latency_us: float = _described("α: of one collective, µs", zero=True)
    bus_gb_per_s: Mapping[str, float] = _described(
        "bytes that a rank of a ring sends in a second, GB/s, by number of ranks; 0: no link",
        zero=True,
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs."""

    name: str = _described("for people")
    gpus_per_node: int = _described("GPUs that the fast link joins")
    most_gpus: int = _described("GPUs of the whole cluster")
    host_us_per_operation: float = _described(
        "what the host takes to launch one operation of a layer, µs", zero=True
    )
    collective_overlap: float = _share(
        "share of a product's time that a collective beside it can use (0: nothing overlaps)",
        zero=True,
    )
    compute: Mapping[str, Compute] = _described("by dtype: bf16, fp16, fp32")
    memory: Memory = _described("of one GPU")
    node: Link = _described("between the GPUs of one node")
    network: Link = _described("between nodes, of one GPU's share of the network")

    def products(self, dtype: str) -> Compute:
        """How fast products in `dtype` are.

        Raises:
            ValueError: where the file does not say.
        """
        if dtype not in self.compute:
            raise ValueError(
                f"--dtype {dtype}: {self.name} says nothing of it; nearest legal value: "
                f"{next(iter(self.compute))}"
            )
        return self.compute[dtype]

    @property
    def elementwise_bytes_per_s(self) -> float:
        """What small kernels move."""
        return self.memory.bandwidth_gb_per_s * 1e9 * self.memory.elementwise_efficiency


def presets() -> list[str]:
    """The names that `load_cluster` knows; `cpu` is the one of this machine's kind."""
    return sorted(["cpu", *(path.stem for path in _PRESETS.glob("*.toml"))])


def load_cluster(name: str) -> Cluster:
    """A preset by its name, or a file.

    Raises:
        ValueError: for a name that is neither, and a file that lacks a field, has one too many or
            one of the wrong kind.
    """
    path = _PRESETS / f"{_cpu_preset(processor()) if name == 'cpu' else name}.toml"
    if name not in presets():
        path = Path(name)
        if not path.is_file():
            near = difflib.get_close_matches(name, presets(), n=1) or presets()[:1]
            raise ValueError(
                f"--gpu {name}: neither a file nor one of {', '.join(presets())}; nearest legal "
                f"value: {near[0]}. For other hardware, copy {_PRESETS / (near[0] + '.toml')} and "
                f"set its fields: {', '.join(field_names(Cluster))}"
            )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--gpu {name}: {path} is no TOML file: {error}") from None
    cluster: Cluster = _parse(Cluster, content, f"--gpu {name}", "")
    return cluster


def with_nodes_of(cluster: Cluster, gpus_per_node: int) -> Cluster:
    """The cluster with its GPUs in nodes of another size.

    Raises:
        ValueError: for nodes larger than the cluster.
    """
    if gpus_per_node > cluster.most_gpus:
        raise ValueError(
            f"--gpus-per-node {gpus_per_node}: {cluster.name} has {cluster.most_gpus} GPUs; "
            f"nearest legal value: {cluster.most_gpus}"
        )
    if gpus_per_node == cluster.gpus_per_node:
        return cluster
    name = f"{cluster.name}, but in nodes of {gpus_per_node}"
    return replace(cluster, name=name, gpus_per_node=gpus_per_node)


def _cpu_preset(processor_name: str) -> str:
    """Two kinds of machines were measured."""
    return "cpu-epyc" if "AMD" in processor_name else "cpu-xeon"


def field_names(kind: type, prefix: str = "") -> list[str]:
    """The dotted names of all fields of a file."""
    lines = []
    hints = typing.get_type_hints(kind)
    for each in fields(kind):
        inner = _of_mapping(hints[each.name]) if each.name == "compute" else hints[each.name]
        label = f"{prefix}{each.name}" + (".DTYPE" if each.name == "compute" else "")
        if is_dataclass(inner):
            lines += field_names(typing.cast(type, inner), f"{label}.")
        else:
            lines.append(label)
    return lines


def _of_mapping(hint: Any) -> Any:
    return typing.get_args(hint)[1]


def _parse(kind: type, content: Any, flag: str, prefix: str) -> Any:
    if not isinstance(content, dict):
        raise ValueError(f"{flag}: [{prefix.removesuffix('.')}] is no table")
    known = {each.name: each for each in fields(kind)}
    for name in content:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or list(known)
            raise ValueError(
                f"{flag}: {prefix}{name} is no field; nearest legal value: {prefix}{near[0]}"
            )
    missing = [
        f"{prefix}{each.name} ({each.metadata['meaning']})"
        for each in known.values()
        if each.name not in content and each.default is MISSING
    ]
    if missing:
        raise ValueError(f"{flag}: lacks {', '.join(missing)}")
    hints = typing.get_type_hints(kind)
    values = {
        name: _value(known[name], hints[name], value, flag, f"{prefix}{name}")
        for name, value in content.items()
    }
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _value(described: Field[Any], hint: Any, value: Any, flag: str, name: str) -> Any:
    if is_dataclass(hint):
        return _parse(typing.cast(type, hint), value, flag, f"{name}.")
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{flag}: {name} is an empty table ({described.metadata['meaning']})")
        inner = _of_mapping(hint)
        if is_dataclass(inner):
            wrong = [key for key in value if key not in _DTYPES]
            if wrong:
                near = difflib.get_close_matches(wrong[0], _DTYPES, n=1) or _DTYPES[:1]
                raise ValueError(
                    f"{flag}: [{name}.{wrong[0]}] is no dtype; nearest legal value: "
                    f"[{name}.{near[0]}]"
                )
        wrong = [key for key in value if inner is float and not (key.isdecimal() and int(key) > 1)]
        if wrong:
            raise ValueError(
                f"{flag}: {name}.{wrong[0]} is no number of ranks; nearest legal value: {name}.2"
            )
        return {key: _value(described, inner, v, flag, f"{name}.{key}") for key, v in value.items()}
    if hint is str:
        if not isinstance(value, str):
            raise ValueError(f"{flag}: {name} = {value!r} is no text")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (hint is int and value != int(value)):
        wanted = "a whole number" if hint is int else "a number"
        raise ValueError(
            f"{flag}: {name} = {value!r} is not {wanted} ({described.metadata['meaning']})"
        )
    most = described.metadata["most"]
    if value < 0 or value > most or (value == 0 and not described.metadata["zero"]):
        above = "at least" if described.metadata["zero"] else "above"
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        raise ValueError(
            f"{flag}: {name} = {value:g}: must be {above} 0{limit} "
            f"({described.metadata['meaning']})"
        )
    return hint(value)

"""What a launch on a machine with GPUs needs of us, as far as it shows without one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed

from megatron.boost import launch
from megatron.boost.cpu import process_group_ended
from tests.support.distributed import run_ranks
from tests.support.refusals import COLA
from tests.support.runs import DATA, MODEL, TRAINING

ROOT = Path(__file__).parents[2]


Packages = dict[str, bool]


def flags_with_packages(
    cases: list[tuple[list[str], Packages]],
) -> list[tuple[list[str], list[str]]]:
    """What is added to each command line, and said, where these packages are installed."""
    return [_flags_with(command_line, **packages) for command_line, packages in cases]


def _flags_with(
    command_line: list[str], *, apex: bool, transformer_engine: bool
) -> tuple[list[str], list[str]]:
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.common.embeddings import rope_utils

    from megatron.boost.arguments import prepare

    find_spec = importlib.util.find_spec

    def found(name: str, *rest: Any) -> Any:
        return apex or None if name in OF_APEX else find_spec(name, *rest)

    rope = "something" if transformer_engine else None
    with (
        mock.patch.object(importlib.util, "find_spec", found),
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb", rope),
        mock.patch.object(extension, "HAVE_TE", transformer_engine),
    ):
        argv, said = prepare(command_line)
    return argv[len(command_line) :], said


OF_APEX = {"fused_weight_gradient_mlp_cuda", "scaled_masked_softmax_cuda"}
APEX = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"]
ROPE = "--no-rope-fusion"
OF_MEGATRON = ["--transformer-impl=local", "--no-persist-layer-norm"]
INSTALLED: list[tuple[Packages, list[str], list[str]]] = [
    ({"apex": True, "transformer_engine": True}, [], []),
    ({"apex": False, "transformer_engine": True}, APEX, []),
    ({"apex": True, "transformer_engine": False}, [ROPE], OF_MEGATRON),
    ({"apex": False, "transformer_engine": False}, [*APEX, ROPE], OF_MEGATRON),
]


def test_megatron_is_not_asked_for_packages_that_are_not_there() -> None:
    base = [*MODEL, *DATA, *TRAINING]
    given = [*base, *APEX, "--transformer-impl", "transformer_engine"]
    cases = [
        (line, packages) for packages, *_ in INSTALLED for line in (base, [*base, *COLA.split()])
    ]
    (found,) = run_ranks(flags_with_packages, 1, [*cases, (given, INSTALLED[-1][0])])
    for i, (_, every, of_megatron) in enumerate(INSTALLED):
        (added, said), (added_to_cola, _) = found[2 * i : 2 * i + 2]
        assert added == [*every, *of_megatron]
        assert len(said) == bool(added)
        assert [f for f in added_to_cola if f in (*APEX, ROPE, *OF_MEGATRON)] == every
    assert found[-1][0] == [ROPE, "--no-persist-layer-norm"]


TP2 = ["--tensor-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        (TP2, None, "1"),
        (["--tensor-model-parallel-size=2"], None, "1"),
        (["--use-checkpoint-args"], None, "1"),
        (TP2, "8", "8"),
        ([], None, None),
        (["--tensor-model-parallel-size", "1"], None, None),
        ([*TP2, "--use-torch-fsdp2"], None, None),
        ([*TP2, "--use-megatron-fsdp"], None, None),
    ],
)
def test_kernels_start_in_order_where_megatron_demands_it(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], given: str | None, expected: str | None
) -> None:
    """It refuses tensor parallelism without, and FSDP with it. CUDA reads it when first used."""
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []

    def look() -> bool:
        seen.append(os.environ.get(name))
        return False

    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(torch.cuda, "is_available", look)
    assert launch.main(["--device", "cuda", *flags]) == 2
    assert seen[0] == expected


@pytest.mark.parametrize(
    ("backend", "error", "destroyed"),
    [
        ("nccl", None, True),
        ("nccl", SystemExit, True),
        ("nccl", RuntimeError, False),
        ("gloo", RuntimeError, True),
    ],
)
def test_an_error_under_nccl_is_told_before_the_other_ranks_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    error: type[BaseException] | None,
    destroyed: bool,
) -> None:
    calls = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: calls.append(1))
    if error is None:
        with process_group_ended():
            pass
    else:
        with pytest.raises(error), process_group_ended():
            raise error
    assert bool(calls) == destroyed


RANDOM_STATES: list[tuple[str, str, dict[str, bool], bool]] = [
    ("gloo", "nccl", {}, True),
    ("nccl", "gloo", {}, True),
    ("nccl", "nccl", {}, False),
    ("unknown", "gloo", {}, True),
    ("unknown", "nccl", {}, False),
    ("gloo", "nccl", {"finetune": True}, False),
    ("gloo", "nccl", {"restarts": True}, False),
    ("gloo", "nccl", {"no_load_rng": True}, False),
]
"""The backend of the stored run, that of this one, more of it, and whether states are left."""


def lines_on_random_states() -> list[list[str]]:
    from megatron.boost.stored_run import StoredRun
    from megatron.boost.training import _leave_random_states

    found = []
    for stored, own, given, _ in RANDOM_STATES:
        then = Namespace() if stored == "unknown" else Namespace(distributed_backend=stored)
        run = StoredRun("--load x", then, None, restarts=given.get("restarts", False))
        flags = {"no_load_rng": False, "finetune": False} | given
        arguments = Namespace(distributed_backend=own, **flags)
        said = _leave_random_states(run, arguments)
        assert arguments.no_load_rng == (bool(said) or flags["no_load_rng"])
        found.append(said)
    return found


def test_random_states_of_another_kind_of_device_are_left() -> None:
    (found,) = run_ranks(lines_on_random_states, 1)
    assert [bool(said) for said in found] == [left for *_, left in RANDOM_STATES]


@pytest.mark.slow
def test_on_cpu_megatron_does_without_packages_for_gpus(tmp_path: Path) -> None:
    """Installed ones, here stand-ins that say so when they are imported."""
    for package in ("apex", "amp_C", "transformer_engine"):
        (tmp_path / f"{package}.py").write_text(f"raise SystemExit('{package} was imported')\n")
    program = """
from megatron.boost.cpu import megatron_on_cpu
with megatron_on_cpu():
    import megatron.core.models.gpt
    import megatron.core.optimizer
    from megatron.core.extensions.transformer_engine import HAVE_TE
import sys
print(HAVE_TE, [name for name, module in sys.modules.items() if module is None])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("False [")
    for package in ("'apex'", "'amp_C'", "'transformer_engine'"):
        assert package not in done.stdout


def moved() -> list[bool]:
    return [_moved(use_cpu_initialization) for use_cpu_initialization in (False, True)]


def _moved(use_cpu_initialization: bool) -> bool:
    from megatron.boost import builder

    stage = mock.Mock()
    stage.decoder.layers = []
    arguments = Namespace(use_cpu_initialization=use_cpu_initialization)
    with (
        mock.patch.object(builder, "finish_model"),
        mock.patch.object(builder, "true_vocabulary"),
    ):
        builder._finish_model(arguments, mock.Mock(), [stage])
    return bool(stage.cuda.called)


def test_weights_drawn_on_the_cpu_go_to_the_gpu() -> None:
    assert run_ranks(moved, 1) == [[False, True]]

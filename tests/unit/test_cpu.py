"""Megatron on CPU: the stand-ins, where they reach, and that nothing of them is left."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron.boost import cuda_stand_ins
from megatron.boost.cpu import CPU_FLAGS, with_cpu_flags
from megatron.boost.cuda_stand_ins import cuda_on_cpu
from megatron.boost.patches import all_patches, apply_always
from tests.support.distributed import run_ranks


class _OnesInBackward(torch.autograd.Function):
    """Its backward asks for a CUDA device, as a checkpoint's repeated forward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.ones(3, device="cuda")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0)])
def test_cuda_devices_are_the_cpu(device: Any) -> None:
    with cuda_on_cpu():
        made = [
            torch.empty(2, device=device),
            torch.tensor([1.0], device=device),
            torch.ones(2).to(device),
            torch.ones(2).to(device=device, dtype=torch.float64),
            torch.ones(2).new_zeros(3, device=device),
            nn.Linear(2, 2, device=device).weight,
            nn.Linear(2, 2).to(device).weight,
            nn.Linear(2, 2).cuda().weight,
            torch.ones(2).cuda(non_blocking=True),
            torch.ones(2).pin_memory(),
            torch.empty(2, pin_memory=True),
        ]
        assert torch.device("cuda", 0) == torch.device("cpu") == torch.device("cuda:0")
        assert torch.device("meta").type == "meta"
        assert torch.empty(2, device="meta").is_meta
        assert not torch.cuda.is_available()
    assert {tensor.device.type for tensor in made} == {"cpu"}


@pytest.mark.parametrize(
    "backward",
    [
        lambda x: _OnesInBackward.apply(x).sum().backward(),
        lambda x: torch.autograd.backward(_OnesInBackward.apply(x).sum()),
        lambda x: torch.autograd.grad(_OnesInBackward.apply(x).sum(), x),
    ],
    ids=["Tensor.backward", "autograd.backward", "autograd.grad"],
)
def test_a_backward_may_ask_for_cuda(backward: Any) -> None:
    with cuda_on_cpu():
        backward(torch.ones(3, requires_grad=True))


def test_threads_started_inside_may_ask_for_cuda() -> None:
    with cuda_on_cpu(), ThreadPoolExecutor(1) as executor:
        assert executor.submit(torch.ones, 2, device="cuda").result().sum() == 2


def test_streams_and_events_order_nothing() -> None:
    with cuda_on_cpu():
        stream, start, end = torch.cuda.Stream(), torch.cuda.Event(True), torch.cuda.Event(True)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            start.record()
            tensor = torch.ones(2, device="cuda")
            tensor.record_stream(stream)
            end.record(stream)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        assert end.query() and start.elapsed_time(end) > 0
        with pytest.raises(RuntimeError, match="recorded"):
            torch.cuda.Event().elapsed_time(end)


def test_memory_is_the_resident_set() -> None:
    with cuda_on_cpu():
        before = torch.cuda.memory_allocated()
        kept = torch.ones(16 << 20)
        assert kept.nbytes <= torch.cuda.memory_allocated() - before < 2 * kept.nbytes
        assert torch.cuda.max_memory_allocated() > kept.nbytes
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > kept.nbytes


DRAWS = {
    "factory": lambda: torch.randn(4, device="cuda"),
    "like": lambda: torch.rand_like(torch.ones(4)),
    "in place": lambda: torch.ones(4).normal_(),
    "init": lambda: nn.init.trunc_normal_(torch.ones(4)),
    "dropout": lambda: functional.dropout(torch.ones(64), 0.5),
    "attention": lambda: functional.scaled_dot_product_attention(
        *torch.ones(3, 1, 8, 8).unbind(), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_a_gpu_would_draw_comes_from_a_generator_of_its_own(draw: Any) -> None:
    with cuda_on_cpu():
        cpu_state = torch.get_rng_state()
        torch.cuda.manual_seed(7)
        first, state = draw(), torch.cuda.get_rng_state()
        second = draw()
        torch.cuda.set_rng_state(state)
        torch.testing.assert_close(draw(), second, rtol=0, atol=0)
        torch.cuda.manual_seed(7)
        torch.testing.assert_close(draw(), first, rtol=0, atol=0)
        assert not torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), cpu_state)


def test_what_the_cpu_draws_on_a_gpu_machine_leaves_that_generator_alone() -> None:
    with cuda_on_cpu():
        state = torch.cuda.get_rng_state()
        torch.randn(4)
        torch.randn(4, device="cpu")
        torch.ones(4).normal_(generator=torch.Generator())
        # DataLoader's base seed: a resumed run makes a data loader that an unbroken one does not.
        next(iter(torch.utils.data.DataLoader([1, 2])))
        assert torch.equal(torch.cuda.get_rng_state(), state)


def test_manual_seed_seeds_both_generators() -> None:
    with cuda_on_cpu():
        torch.manual_seed(5)
        assert torch.equal(torch.randn(4), torch.randn(4, device="cuda"))


def _surroundings() -> dict[str, Any]:
    """Everything that Megatron on CPU replaces."""
    names = cuda_stand_ins._stand_ins(torch.Generator())
    return {
        **{f"torch.cuda.{name}": getattr(torch.cuda, name) for name in names},
        **{f"random.{name}": getattr(torch.cuda.random, name, None) for name in names},
        "engine": torch.autograd._engine_run_backward,
        "thread": threading.Thread.run,
        "type": torch.Tensor.type,
        "compile": torch.compile,
        "modes": torch.overrides._get_current_function_mode_stack(),
        **_megatron_surroundings(),
    }


def _megatron_surroundings() -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.datasets import utils
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.optimizer import optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training.initialize import initialize_megatron

    return {
        "compile_helpers": utils.compile_helpers,
        "defaults": initialize_megatron.__defaults__,
        "norm": WrappedTorchNorm.__new__,
        "metadata": dist_checkpointing.load_content_metadata,
        **_members("optimizer", DistributedOptimizer),
        **_members("float16", optimizer.Float16OptimizerWithFloat16Params),
        **_members("fp32", optimizer.FP32Optimizer),
        **_members("queue", AsyncCallsQueue),
    }


def _members(name: str, owner: type) -> dict[str, Any]:
    return {f"{name}.{member}": value for member, value in vars(owner).items()}


def _left_over(context: AbstractContextManager[Any]) -> tuple[set[str], set[str]]:
    """Names that differ inside `context`, and those that still do after an error ended it."""
    before = _surroundings()
    with pytest.raises(ZeroDivisionError), context:
        inside = _surroundings()
        raise ZeroDivisionError
    after = _surroundings()
    return (
        {name for name in before if before[name] is not inside[name] and name != "modes"},
        {name for name in before if before[name] != after[name]},
    )


def _check_that_all_is_undone() -> None:
    from megatron.boost.cpu import megatron_on_cpu

    changed, left_over = _left_over(megatron_on_cpu())
    assert {"torch.cuda.device_count", "engine", "type", "compile", "defaults"} <= changed
    assert left_over == set() and "norm" not in changed, (left_over, changed)
    # What is wrong on every device is put right without a trace of the CPU.
    changed, left_over = _left_over(apply_always())
    assert changed == {
        "compile_helpers",
        "norm",
        "metadata",
        *(
            f"{kind}.{name}"
            for kind in ("optimizer", "float16", "fp32")
            for name in ("sharded_state_dict", "load_state_dict")
        ),
        "optimizer.state_dict",
        "optimizer._set_main_param_and_optimizer_states",
        "optimizer.load_parameter_state_from_dp_reshardable",
    }
    assert left_over == set()
    with megatron_on_cpu():
        with megatron_on_cpu():
            pass
        assert torch.ones(1, device="cuda").device.type == "cpu"


def test_all_is_undone_and_cuda_runs_get_nothing_of_it() -> None:
    run_ranks(_check_that_all_is_undone, 1, init_process_group=False)


def test_every_patch_says_what_it_is() -> None:
    for patch in all_patches():
        assert patch.reason and patch.apply.__module__ == f"megatron.boost.patches.{patch.name}"


def test_cpu_flags_are_added_once() -> None:
    argv = ["--lr", "1e-3", "--transformer-impl", "local", "--no-rope-fusion"]
    completed = with_cpu_flags(argv)
    assert completed[: len(argv)] == argv
    assert completed.count("--transformer-impl") == completed.count("--no-rope-fusion") == 1
    assert with_cpu_flags(completed) == completed
    assert with_cpu_flags(["--distributed-backend=gloo"]).count("--distributed-backend") == 0
    assert len(with_cpu_flags([])) == len(CPU_FLAGS) + 2


def test_cpu_flags_set_what_megatron_demands_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    with_cpu_flags([])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--transformer-impl", "transformer_engine"],
            "--transformer-impl transformer_engine: .*nearest legal value: local",
        ),
        (["--distributed-backend=nccl"], "--distributed-backend nccl: .*legal value: gloo"),
    ],
)
def test_flags_that_contradict_the_cpu_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_cpu_flags(argv)

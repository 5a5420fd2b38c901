"""How a group's weights lie in Megatron's buffers: evenly, in the order of their use, so that they
are one strided batched GEMM on CUDA, and so are their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.distributed.test_parity import CASES
from tests.support.distributed import run_ranks
from tests.support.parallel_gpt import parallel_gpt, tensor_parallel_state

GROUPS = (
    ("self_attention.q_proj", "self_attention.k_proj", "self_attention.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


def distances(tensors: list[Tensor]) -> list[int]:
    """From each to the next, in elements."""
    starts = [tensor.data_ptr() // tensor.element_size() for tensor in tensors]
    return [after - before for before, after in zip(starts, starts[1:], strict=False)]


def of_groups() -> list[list[int]]:
    """On a rank: the distances of every group's B's and of their main gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    case, found = CASES["btp"], []
    for distributed_optimizer in (False, True):
        with tensor_parallel_state(1), parallel_gpt(case) as model:
            settings = DistributedDataParallelConfig(
                use_distributed_optimizer=distributed_optimizer
            )
            DistributedDataParallel(model.config, settings, model)
            for group in GROUPS:
                weights: list[Any] = [
                    model.get_parameter(f"decoder.layers.0.{name}.B") for name in group
                ]
                found.append(distances([weight.main_grad for weight in weights]))
                if distributed_optimizer:
                    found.append(distances([weight.data for weight in weights]))
    return found


def test_a_groups_weights_follow_one_another_evenly() -> None:
    (found,) = run_ranks(of_groups, 1)
    assert len(found) == 3 * len(GROUPS)
    for steps in found:
        assert steps[0] > 0 and set(steps) == {steps[0]}, found

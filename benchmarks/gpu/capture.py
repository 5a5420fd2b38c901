"""Can csrc's kernels be captured in a CUDA graph?

A latent epilogue and the up-projections that follow it are captured once, and replayed on other
latents. Capture fails if anything waits for the device; the replay must give what the same calls
give eagerly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.plan import DTYPE, TP, Measured, Plan, first_line
from benchmarks.gpu.report import Section
from benchmarks.op_cases import Maker, RankSizes, implementation

_FACT = "cuda_graph_capture"


def measure(device: torch.device, plan: Plan) -> Measured:
    """Whether they can."""
    if device.type != "cuda":
        print("  CUDA graphs are not for CPU", flush=True)
        return Measured()
    try:
        return Measured(facts={_FACT: _captured(device, RankSizes.of(plan.models[0], TP))})
    # Whatever capturing raises is the answer.
    except Exception as error:
        return Measured(facts={_FACT: False}, failures={_FACT: first_line(error)})


def sections(plan: Plan, measured: Measured) -> list[Section]:
    """The answer."""
    found = measured.facts.get(_FACT)
    answer = "not measured" if found is None else "yes" if found else "NO"
    row = ["latent epilogue and up-projections of q, k, v", answer]
    head = ["", "captured, replayed, and equal to the eager calls"]
    return [Section("CUDA graphs", head, [row], "", {_FACT: found})]


@torch.no_grad()
def _captured(device: torch.device, sizes: RankSizes) -> bool:
    """Whether replaying gives what the calls give; raises what capturing raises."""
    ops = implementation("csrc", "cuda")
    m = Maker(device, DTYPE)
    n, ranks = sizes.tokens, (sizes.rank,) * 3
    h, other = m.normal(n, sum(ranks)), m.normal(n, sum(ranks))
    statistics = m.statistics(n, sizes.hidden)
    weights = m.weights(3, sizes.width, sizes.rank)

    def outputs() -> list[Tensor]:
        z, _ = ops.latent_epilogue(
            h, ranks, "silu", statistics=statistics, hidden_size=sizes.hidden, eps=1e-6
        )
        found: list[Tensor] = ops.up_projection(z, weights)
        return found

    # cuBLAS takes its workspace at the first call, which must not be in the graph.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs()
    h.copy_(other)
    graph.replay()
    eager = outputs()
    return all(
        torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2)
        for a, b in zip(captured, eager, strict=True)
    )

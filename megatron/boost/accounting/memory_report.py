"""Megatron's report of the memory that a run needs in theory, for our architectures."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.boost.accounting.activations import micro_batches_in_flight, rank_activation_bytes
from megatron.boost.accounting.parameters import layer_parameters, rank_parameters
from megatron.boost.accounting.sizes import Layout, Model
from megatron.boost.accounting.state import rank_state_bytes

_MIB = 1024 * 1024


@dataclass(frozen=True)
class MemoryFootprint:
    """What one rank of the stage that needs most holds, in MiB."""

    pp_rank: int
    weight_and_optimizer_mib: float
    activation_mib: float

    @property
    def total_mib(self) -> float:
        """Both."""
        return self.weight_and_optimizer_mib + self.activation_mib


def memory_footprint(model: Model, layout: Layout) -> MemoryFootprint:
    """State and activations of the pipeline stage where their sum is largest."""
    stages = [
        MemoryFootprint(
            pp_rank,
            rank_state_bytes(model, layout, pp_rank).total / _MIB,
            rank_activation_bytes(model, layout, pp_rank) / _MIB,
        )
        for pp_rank in range(layout.pipeline_parallel)
    ]
    return max(stages, key=lambda stage: stage.total_mib)


def memory_report_lines(model: Model, layout: Layout) -> list[str]:
    """The break-down that goes before Megatron's closing line, in its words."""
    layers = sum(layer_parameters(model, layer) for layer in range(model.num_layers))
    block = layers + model.hidden_size
    vocabulary = (1 if model.tied else 2) * model.padded_vocab_size * model.hidden_size
    footprint = memory_footprint(model, layout)
    lines = [
        f"Number of parameters in transformer block in billions: {block / 1e9: .2f}",
        f"Number of parameters in embedding layers in billions: {vocabulary / 1e9:.2f}",
        f"Total number of parameters in billions: {(block + vocabulary) / 1e9:.2f}",
    ]
    for pp_rank in range(layout.pipeline_parallel):
        most = " (the most loaded)" if pp_rank == footprint.pp_rank else ""
        lines.append(
            f"Number of parameters in the shard of pipeline rank {pp_rank}{most} in billions: "
            f"{rank_parameters(model, layout, pp_rank) / 1e9:.4f}"
        )
    held = micro_batches_in_flight(layout, footprint.pp_rank)
    lines.append(f"Number of in-flight microbatches: {max(held)}")
    return lines


def closing_line(footprint: MemoryFootprint) -> str:
    """Megatron's own line, in its format."""
    return (
        f"Theoretical memory footprints: weight and optimizer="
        f"{footprint.weight_and_optimizer_mib:.2f} MB, "
        f"activation={footprint.activation_mib:.2f} MB, total={footprint.total_mib:.2f} MB\n"
    )

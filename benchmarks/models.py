"""The variants as models on this rank, all in one process, and one training iteration of each."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.harness import Step, measure
from benchmarks.heap import bytes_in_use
from benchmarks.plain_torch import PlainLlama
from benchmarks.variants import DTYPES, Sizes, Variant
from boost_layers.communication import LEDGER
from megatron.boost.ranks import megatron_group

_TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
_SEED = 1234
_NORM_EPS = 1e-6

LossOf = Callable[[Tensor, Tensor], Tensor]
"""Tokens and labels `[b, s]` → the mean loss."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What variants of one model must agree in, so that the race is between equals."""

    loss: float
    embedding_gradient_norm: float
    """It has come back through every layer, and every strategy splits it by vocabulary."""

    def agrees(self, other: Fingerprint, tolerance: float) -> bool:
        """Whether both numbers differ by at most `tolerance`, relatively."""
        return math.isclose(self.loss, other.loss, rel_tol=tolerance) and math.isclose(
            self.embedding_gradient_norm, other.embedding_gradient_norm, rel_tol=tolerance
        )


def race(
    device: torch.device,
    variants: Sequence[Variant],
    sizes: Sizes,
    dtype: str,
    rounds: int,
    beside: Mapping[str, Callable[[], object]] | None = None,
) -> list[Step]:
    """Run on a rank: build all `variants` with the whole world as tensor-parallel group, see that
    they compute the same, and take `rounds` rounds of iterations of each.

    Plain models take the weights of our model before them. What is `beside` takes turns with the
    models. Rank 0 prints a line a round.

    Returns:
        This rank's steps.

    Raises:
        RuntimeError: if variants of one model disagree in loss or gradient.
    """
    with megatron_group(device):
        iterations = iterations_of(device, variants, sizes, DTYPES[dtype])
        _require_agreement(
            {v: iterations[v.key].fingerprint() for v in variants}, _TOLERANCES[dtype]
        )
        LEDGER.timed = True
        return measure(
            {key: iteration.run for key, iteration in iterations.items()} | dict(beside or {}),
            rounds,
            device,
            partial(_print_round, rounds),
        )


def race_with_memory(
    device: torch.device,
    variants: Sequence[Variant],
    sizes: Sizes,
    dtype: str,
    rounds: int,
) -> tuple[list[Step], dict[str, float], dict[str, float]]:
    """As `race`, and what a layer keeps between its forward and its backward.

    That is the memory in use after a forward less that before it, of a model with all layers less
    the same of one with half of them, so that embedding, head and loss do not count.

    Returns:
        This rank's steps; by variant, MiB kept per layer; by variant, collectives that a layer
        issues when it computes again.

    Raises:
        RuntimeError: if variants of one model disagree in loss or gradient.
    """
    half = replace(sizes, layers=sizes.layers // 2)
    with megatron_group(device):
        kept = {}
        for variant in variants:
            bytes_kept = [
                _kept_bytes(device, iterations_of(device, [variant], s, DTYPES[dtype])[variant.key])
                for s in (sizes, half)
            ]
            mib = (bytes_kept[0] - bytes_kept[1]) / 2**20
            kept[variant.key] = mib / (sizes.layers - half.layers)
    steps = race(device, variants, sizes, dtype, rounds)
    with megatron_group(device):
        iterations = iterations_of(device, variants, half, DTYPES[dtype])
        again = {key: _recompute_collectives(i) / half.layers for key, i in iterations.items()}
    return steps, kept, again


def _kept_bytes(device: torch.device, iteration: Iteration) -> int:
    """The second iteration's, when what the first one made for good is there."""
    iteration.run()
    iteration.model.zero_grad(set_to_none=True)
    gc.collect()
    before = bytes_in_use(device)
    loss = iteration.loss_of(iteration.tokens, iteration.labels)
    kept = bytes_in_use(device) - before
    # On to the end, so that no rank waits for this one.
    loss.backward()
    return kept


def _recompute_collectives(iteration: Iteration) -> int:
    LEDGER.clear()
    iteration.run()
    return sum(
        count.calls
        for (scope, phase, _), count in LEDGER.counts.items()
        if (scope, phase) == ("layer", "recompute")
    )


def _require_agreement(fingerprints: Mapping[Variant, Fingerprint], tolerance: float) -> None:
    first: dict[tuple[bool, bool], tuple[Variant, Fingerprint]] = {}
    for variant, fingerprint in fingerprints.items():
        model = variant.low_rank, variant.half_depth
        other, expected = first.setdefault(model, (variant, fingerprint))
        if not fingerprint.agrees(expected, tolerance):
            raise RuntimeError(
                f"{variant.key} computes another model than {other.key}: {fingerprint}, {expected}"
            )


def _print_round(rounds: int, steps: Sequence[Step]) -> None:
    if distributed.get_rank() == 0:
        seconds = sum(step.milliseconds for step in steps) / 1000.0
        print(f"  round {steps[0].round_number + 1} of {rounds}: {seconds:.1f} s", flush=True)


@dataclass(frozen=True)
class Iteration:
    """A training iteration of one model on one fixed batch, without an optimiser."""

    model: nn.Module
    loss_of: LossOf
    tokens: Tensor
    labels: Tensor

    def run(self) -> Tensor:
        """Drop the gradients, then forward and backward."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss_of(self.tokens, self.labels)
        loss.backward()
        return loss

    def fingerprint(self) -> Fingerprint:
        """Of one iteration; one all-reduce of a number."""
        loss = self.run()
        gradient = self.model.get_parameter("embedding.word_embeddings.weight").grad
        assert gradient is not None
        square = gradient.double().square().sum()
        distributed.all_reduce(square)
        return Fingerprint(loss=loss.item(), embedding_gradient_norm=square.sqrt().item())


def batch_of(device: torch.device, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Random tokens and labels `[b, s]`, always the same."""
    generator = torch.Generator().manual_seed(_SEED)
    text = torch.randint(
        sizes.vocabulary, (sizes.micro_batch, sizes.sequence + 1), generator=generator
    ).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def iterations_of(
    device: torch.device, variants: Sequence[Variant], sizes: Sizes, dtype: torch.dtype
) -> dict[str, Iteration]:
    """One iteration of each variant, by key; plain models take the weights of our model before
    them."""
    tokens, labels = batch_of(device, sizes)
    weights: dict[bool, Mapping[str, Tensor]] = {}
    iterations = {}
    for variant in variants:
        model: nn.Module
        loss_of: LossOf
        if variant.layers is not None:
            model = _gpt_model(variant, sizes.of(variant), dtype)
            loss_of = partial(_gpt_loss, model)
            weights[variant.low_rank] = dict(model.named_parameters())
        else:
            model = PlainLlama(sizes, _NORM_EPS, low_rank=variant.low_rank).to(device, dtype)
            model.load_state_dict(weights[variant.low_rank])
            loss_of = model
        iterations[variant.key] = Iteration(model, loss_of, tokens, labels)
    return iterations


def _gpt_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    losses: Tensor = model(tokens, positions, None, labels=labels)
    return losses.mean()


def _gpt_model(variant: Variant, sizes: Sizes, dtype: torch.dtype) -> nn.Module:
    """Megatron's `GPTModel` with our layers; its weights depend on `variant.low_rank` alone."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from boost_layers.embedding import fuse_embedding_border
    from boost_layers.specs import low_rank_spec
    from boost_layers.vocabulary import initialize_vocabulary

    assert variant.layers is not None
    group = ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp
    fields: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": _NORM_EPS,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": group.size(),
        "sequence_parallel": variant.sequence_parallel and group.size() > 1,
        "gradient_accumulation_fusion": False,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "pipeline_dtype": dtype,
    }
    if variant.full_recompute:
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    config = TransformerConfig(**fields)
    model = GPTModel(
        config,
        low_rank_spec(config, replace(variant.layers, rank=sizes.rank, seed=_SEED)),
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.sequence,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    fuse_embedding_border(model)
    initialize_vocabulary(model, config, sizes.vocabulary, _SEED, group)
    return model

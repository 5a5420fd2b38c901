"""A dense LLaMA as the low-rank model that it becomes, made one layer at a time.

Whoever writes the model asks for its tensors in order; a layer's factors are made when the first of
them is asked for, and its weights are let go with the layer. Ranks by energy need every layer's
spectrum first, so the layers are read twice then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from math import prod, sqrt
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from boost_layers.config import PROJECTIONS, flag_of
from boost_layers.initialization import balanced_factors, draw_uniform
from megatron.boost.conversion.calibration import (
    LayerInputs,
    calibration_tokenizer,
    calibration_tokens,
    refuse_few_tokens,
    refuse_short_text,
)
from megatron.boost.conversion.checkpoint_reader import CheckpointReader
from megatron.boost.conversion.description import EMBEDDING, ModelDescription, module_of
from megatron.boost.conversion.factorisation_report import FactorisationReport
from megatron.boost.conversion.factorisation_settings import (
    ANNEAL_STEPS,
    FactorisationSettings,
    with_possible_ranks,
    with_ranks,
)
from megatron.boost.conversion.hf_config import hf_from_description
from megatron.boost.conversion.importing import HfSource, ImportPlan
from megatron.boost.conversion.rank_choice import Choice, Curve, choose_ranks
from megatron.boost.conversion.tokenizer_files import has_tokenizer
from megatron.boost.conversion.truncation import Factors, decompose, energies, fit

_LONGEST_SEQUENCE = 2048
_ROUNDING = 1e-6


class FactorisedModel:
    """A dense model's tensors as those of a low-rank one; see `tensor`.

    On construction ranks are chosen; with `--energy` or `--parameter-budget` all layers are read
    for that.

    Args:
        source: the dense model.
        read: gives a canonical tensor of it, on the CPU.
        settings: what it shall become.
        tokenizer: the folder with its tokenizer, for calibration.
        device: where the decompositions are computed; default: CUDA where there is one.

    Raises:
        ValueError: for ranks and budgets that cannot be had, calibration without a tokenizer or a
            text, and weights that are not finite.
    """

    def __init__(
        self,
        source: ModelDescription,
        read: Callable[[str], Tensor],
        settings: FactorisationSettings,
        tokenizer: Path | None = None,
        device: torch.device | str | None = None,
    ):
        if source.low_rank.low_rank:
            raise ValueError(
                f"--low-rank-arch {settings.low_rank.arch}: the source is low-rank already "
                f"({source.low_rank.arch}); nearest legal value: leave it out"
            )
        self.source = source
        self.settings = settings
        self._read = read
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._tokens = self._calibration_tokens(tokenizer)
        self._inputs: LayerInputs | None = None
        self._layer = -1
        self._weights: dict[str, Tensor] = {}
        self._moments: Mapping[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self.description, notes = self._described()
        self.report = FactorisationReport(
            source.parameter_count(),
            self.description.parameter_count(),
            calibration_tokens=0 if self._tokens is None else self._tokens.numel(),
            notes=[
                *notes,
                *_notes_on_size(source, self.description),
                *_notes_on_function(self.description),
            ],
        )

    def tensor(self, name: str) -> Tensor:
        """A canonical tensor of the low-rank model, on the CPU, factors in their weight's dtype.

        Layers must be asked for in order, their tensors in any order and once each.
        """
        if not name.startswith("decoder.layers."):
            return self._read(name)
        layer = int(name.split(".")[2])
        if layer != self._layer:
            self._enter(layer)
        prefix, _, part = name.rpartition(".")
        if part in ("A", "B"):
            if name not in self._factors:
                self._factorise(layer, prefix)
            return self._factors.pop(name)
        if part.startswith("gate_"):
            return _closed_gate(name, self.description)
        return self._weight(name)

    def _described(self) -> tuple[ModelDescription, list[str]]:
        """The low-rank model, and what was decided about its ranks."""
        low_rank = self.settings.low_rank
        lowered: dict[str, int] = {}
        notes = []
        if self.settings.by_energy:
            choice = self._chosen()
            low_rank = with_ranks(low_rank, choice.ranks)
            notes.append(
                "ranks: "
                + ", ".join(f"{p.removesuffix('_proj')} {r}" for p, r in choice.ranks.items())
                + f"; every projection keeps at least {choice.energy:.2%} of its energy"
            )
            if choice.ended_by_budget and self.settings.energy is not None:
                notes.append(
                    f"--parameter-budget was reached before --energy {self.settings.energy}: "
                    f"{choice.energy:.2%} is kept where least is"
                )
        else:
            low_rank, lowered = with_possible_ranks(low_rank, self.source)
        if lowered:
            notes.append(
                "full rank, since the weight has no more: "
                + ", ".join(f"{p.removesuffix('_proj')} {r}" for p, r in lowered.items())
            )
        amount = low_rank.activation_amount(0)
        return replace(self.source, low_rank=low_rank, activation_amount=amount), notes

    def _chosen(self) -> Choice:
        """Ranks by energy, after one pass over all layers."""
        layers = [i for i in range(self.source.num_layers) if self._is_factorised(i)]
        found: dict[str, list[Tensor]] = {name: [] for name in PROJECTIONS}
        console = Console(stderr=True)
        every = range(max(layers) + 1)
        shown = track(every, "energies", console=console, disable=not console.is_terminal)
        for layer in shown:
            self._enter(layer)
            for name in PROJECTIONS if layer in layers else ():
                weight = self._weight(_whole(layer, name) + ".weight").to(self._device)
                with _named(layer, name):
                    found[name].append(energies(weight, self._moments.get(name)).cpu())
        self._layer, self._inputs = -1, None
        curves = {
            name: Curve(torch.stack(each), sum(self.source.width_of(name)))
            for name, each in found.items()
        }
        return choose_ranks(
            curves,
            self._parameters,
            energy=1.0 if self.settings.energy is None else self.settings.energy,
            budget=self._budget(),
            multiple=self.settings.rank_multiple,
        )

    def _is_factorised(self, layer: int) -> bool:
        return self.settings.low_rank.of_layer(layer).low_rank

    def _parameters(self, ranks: Mapping[str, int]) -> int:
        """Those of the low-rank model with these ranks. The search asks thousands of times, so
        they are not counted tensor by tensor."""
        low_rank, count = self.settings.low_rank, self._parameters_outside
        for name, rank in ranks.items():
            count += self._factorised_layers * rank * sum(self.source.width_of(name))
            if low_rank.crossing:
                count += (self._factorised_layers - 1) * _gate_parameters(low_rank.lax_gate, rank)
        return count

    @cached_property
    def _factorised_layers(self) -> int:
        return sum(self._is_factorised(layer) for layer in range(self.source.num_layers))

    @cached_property
    def _parameters_outside(self) -> int:
        """Those of the dense model without the projections that are factorised."""
        of_layer = sum(prod(self.source.width_of(name)) for name in PROJECTIONS)
        return self.source.parameter_count() - self._factorised_layers * of_layer

    def _budget(self) -> int | None:
        budget = self.settings.parameter_budget
        if budget is None:
            return None
        return int(budget if budget > 1.0 else budget * self.source.parameter_count())

    def _calibration_tokens(self, tokenizer: Path | None) -> Tensor | None:
        path = self.settings.calibration
        if path is None:
            return None
        if tokenizer is None or not has_tokenizer(tokenizer):
            raise ValueError(
                f"--calibration {path}: the source has no tokenizer to read it with; "
                "nearest legal value: leave it out"
            )
        length = min(self.source.max_positions, _LONGEST_SEQUENCE)
        limit = self.settings.calibration_tokens
        inputs = max(self.source.width_of(name)[1] for name in PROJECTIONS)
        refuse_few_tokens(inputs, length, limit=limit)
        tokens = calibration_tokens(path, calibration_tokenizer(tokenizer), length, limit)
        refuse_short_text(path, inputs, length, tokens=tokens.numel())
        return tokens

    def _enter(self, layer: int) -> None:
        """Go on to a layer: with calibration its weights are read and its moments found."""
        assert layer == self._layer + 1, f"layer {layer} after layer {self._layer}"
        assert not self._factors, f"never asked for: {', '.join(self._factors)}"
        self._layer, self._weights, self._moments = layer, {}, {}
        if self._tokens is None:
            return
        if self._inputs is None:
            from transformers import LlamaConfig

            config = LlamaConfig(**hf_from_description(self.source))
            embedding = self._read(EMBEDDING)
            self._inputs = LayerInputs(config, self._tokens, embedding, self._device)
        names = self.source.layer_tensors(layer)
        self._weights = {name: self._read(name) for name in names}
        self._moments = self._inputs.next(
            {_transformers_name(name): weight for name, weight in self._weights.items()}
        )

    def _weight(self, name: str) -> Tensor:
        """A tensor of the present layer of the dense model."""
        known = self._weights.get(name)
        return self._read(name) if known is None else known

    def _factorise(self, layer: int, prefix: str) -> None:
        """Make both factors of a projection and report on them."""
        projection = prefix.rpartition(".")[2]
        weight = self._weight(f"{prefix}.weight")
        moment = self._moments.get(projection)
        rank = self.description.rank_of(projection)
        on_device = weight.to(self._device)
        with _named(layer, projection):
            decomposition = decompose(on_device, moment)
        factors = decomposition.factors(rank, weight.dtype)
        self._factors[f"{prefix}.A"] = factors.A.cpu()
        self._factors[f"{prefix}.B"] = factors.B.cpu()
        measured = fit(on_device, factors, moment)
        squares = float(decomposition.energies.sum())
        self.report.add(layer, projection, rank, measured, squares)


def low_rank_plan(
    source: HfSource,
    settings: FactorisationSettings,
    device: torch.device | str | None = None,
) -> tuple[ImportPlan, FactorisationReport]:
    """The plan by which a dense LLaMA becomes a low-rank checkpoint, and the report that is filled
    while the plan is carried out.

    Args:
        source: a dense LLaMA, with its tokenizer beside it if there is calibration.
        settings: what it shall become.
        device: as for `FactorisedModel`.

    Raises:
        ValueError: as `FactorisedModel`.
    """
    folder = source.reader.folder
    model = FactorisedModel(source.description, source.tensor, settings, folder, device)
    names = model.description.tensors()
    made_of = {name: _made_of(name) for name in names}
    plan = ImportPlan(
        source=source,
        description=model.description,
        make={name: partial(model.tensor, name) for name in names},
        dtypes={
            name: source.dtype(of[0]) if of else model.description.dtype
            for name, of in made_of.items()
        },
        made_of=made_of,
        act_anneal=model.description.low_rank.act_anneal,
    )
    return plan, model.report


def check_factors(plan: ImportPlan, report: FactorisationReport, checkpoint: Path) -> None:
    """Compare the factors that a checkpoint holds with the dense weights that they replace.

    Raises:
        ValueError: for a projection that is farther from its weight than the report says.
    """
    reader = CheckpointReader(checkpoint)
    for row in report.rows:
        prefix = _whole(row.layer, row.projection)
        factors = Factors(reader.tensor(f"{prefix}.A"), reader.tensor(f"{prefix}.B"))
        found = fit(plan.source.tensor(f"{prefix}.weight"), factors).weight_error
        if not found <= row.fit.weight_error + _ROUNDING:
            raise ValueError(
                f"--check: {prefix} in the checkpoint is {found:.3g} from the source's weight, and "
                f"its factors were {row.fit.weight_error:.3g}; nothing was written"
            )


def _made_of(name: str) -> tuple[str, ...]:
    """The canonical tensors of the dense model that one of the low-rank model is made of."""
    prefix, _, part = name.rpartition(".")
    if part.startswith("gate_"):
        return ()
    return (f"{prefix}.weight",) if part in ("A", "B") else (name,)


def _whole(layer: int, projection: str) -> str:
    """The canonical name of a projection."""
    return f"decoder.layers.{layer}.{module_of(projection)}.{projection}"


def _transformers_name(canonical: str) -> str:
    """A layer's tensor's name in transformers' layer."""
    name = canonical.split(".", 3)[3]
    name = name.replace("self_attention.", "self_attn.")
    return name.replace("pre_mlp_layernorm.", "post_attention_layernorm.")


@contextmanager
def _named(layer: int, projection: str) -> Iterator[None]:
    """Context whose refusals say which projection they are about."""
    try:
        yield
    except ValueError as refusal:
        raise ValueError(f"layer {layer}, {projection}: {refusal}") from refusal


def _gate_parameters(gate: str, rank: int) -> int:
    """Those of one projection's LaX gate."""
    if gate == "tensor":
        left, right = balanced_factors(rank)
        return left * left + right * right
    return rank * rank + rank


def _closed_gate(name: str, description: ModelDescription) -> Tensor:
    """LaX's gate as it must begin: its output is 0, and its gradient is not. E₁ᵀ·Z·E₂ with E₁ = 0
    and E₂ as in training from scratch, or W = 0 and b = 0."""
    shape = description.layer_tensors(int(name.split(".")[2]))[name]
    if name.endswith("gate_right"):
        bound, seed = sqrt(6.0 / shape[0]), description.low_rank.seed
        drawn = draw_uniform(shape, bound, seed, name, torch.device("cpu"))
        return drawn.to(description.dtype)
    return torch.zeros(shape, dtype=description.dtype)


def _notes_on_size(source: ModelDescription, made: ModelDescription) -> list[str]:
    """That both factors of a high rank are more than the weight was."""
    before, after = source.parameter_count(), made.parameter_count()
    if after <= before:
        return []
    return [
        f"the low-rank model is larger than the dense one: {after:,} parameters instead of "
        f"{before:,}; lower ranks, or --parameter-budget with a share below 1, make it smaller"
    ]


def _notes_on_function(description: ModelDescription) -> list[str]:
    """In what the low-rank model is more than the dense one's weights of a lower rank."""
    low_rank, notes = description.low_rank, []
    if low_rank.activation != "identity":
        flag = flag_of("act_anneal")
        changed = f"φ ({low_rank.activation} between the factors) changes the function: "
        if low_rank.act_anneal:
            notes.append(
                f"{changed}the checkpoint begins without it, as the dense model with weights of a "
                f"lower rank, and φ grows over the first {low_rank.act_anneal} steps of training; "
                f"train it with --use-checkpoint-args, or with {flag} STEPS"
            )
        else:
            notes.append(
                f"{changed}with {flag} 0 it is there from the start, and the dense model's quality "
                f"is lost; to keep it, import with {flag} {ANNEAL_STEPS}"
            )
    if low_rank.crossing:
        notes.append(
            "LaX: the gates begin at 0, so that no latent crosses over yet and the function is "
            f"that of the base ({low_rank.lax_base}); training opens them"
        )
    return notes

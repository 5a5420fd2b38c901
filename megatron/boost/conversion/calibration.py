"""The inputs that a dense LLaMA's projections get on calibration text, one layer at a time.

A batch of hidden states goes through one layer of transformers' LLaMA after the other. Of the
inputs x of each projection only their second moment is kept, H = mean of x·xᵀ; the inputs are those
of the dense model, also behind layers that are factorised. In memory are one layer's weights, its
moments and the hidden states, whatever the model's depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.boost.preprocessing.inputs import why_not

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerBase

_READ_BY = {
    "self_attn.q_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
"""A module of transformers' layer, and the projections that read the same input as it."""

_BLOCK_CHARACTERS = 1 << 20
_SEQUENCES_AT_ONCE = 4


def calibration_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the source model, of the files in its folder alone.

    Raises:
        ValueError: for files that are no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as fault:  # the libraries raise KeyError and bare Exceptions for bad files
        damaged = folder / "tokenizer.json"
        reason = (str(fault).strip() or repr(fault)).splitlines()[0]
        raise ValueError(
            f"--calibration: {damaged if damaged.is_file() else folder}: no tokenizer can be made "
            f"of it ({reason})"
        ) from fault


def refuse_few_tokens(inputs: int, length: int, *, limit: int) -> None:
    """Raise ValueError for a `--calibration-tokens` below the number of a projection's inputs.

    H of fewer tokens than it has rows is singular: directions that no token reached would count
    for nothing, and the energies that are kept would be shares of too little.

    Args:
        inputs: of the widest projection.
        length: tokens of a sequence, of which only whole ones are used.
        limit: the value of the flag.
    """
    if (limit // length * length or limit) < inputs:
        raise ValueError(
            f"--calibration-tokens {limit}: a projection has {inputs} inputs, which fewer tokens "
            f"do not tell apart; nearest legal value: {_least_tokens(inputs, length)}"
        )


def refuse_short_text(path: Path, inputs: int, length: int, *, tokens: int) -> None:
    """Raise ValueError for a text with fewer tokens than a projection has inputs, as
    `refuse_few_tokens` does.

    Args:
        path: of the text.
        inputs: of the widest projection.
        length: tokens of a sequence, of which only whole ones are used.
        tokens: how many were found.
    """
    if tokens < inputs:
        raise ValueError(
            f"--calibration {path}: {tokens} tokens of it can be used, and a projection has "
            f"{inputs} inputs, which fewer tokens do not tell apart; nearest legal value: a text "
            f"of {_least_tokens(inputs, length)} tokens"
        )


def _least_tokens(inputs: int, length: int) -> int:
    """In sequences of `length`, or in one that is shorter."""
    return inputs if inputs < length else -(-inputs // length) * length


def calibration_tokens(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, limit: int
) -> Tensor:
    """The beginning of a text as sequences of tokens, `[n, length]`, int64.

    Each sequence begins with the tokenizer's BOS token where the tokenizer would set one. A text
    shorter than one sequence is one of its own length.

    Args:
        path: a UTF-8 text file.
        tokenizer: the source model's.
        length: tokens of a sequence.
        limit: the number of tokens after which reading stops.

    Raises:
        ValueError: for a file that is missing, no UTF-8, or has no tokens.
    """
    flag = f"--calibration {path}"
    begin = tokenizer("")["input_ids"][:1]
    begin = begin if begin and begin[0] == tokenizer.bos_token_id else []
    of_text = length - len(begin)
    wanted = max(limit // length, 1) * of_text
    ids: list[int] = []
    for block in _blocks(path, flag):
        ids += tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= wanted:
            break
    if not ids:
        raise ValueError(f"{flag}: there is no text in it")
    of_text = min(of_text, len(ids))
    sequences = torch.tensor(ids[: min(len(ids), wanted) // of_text * of_text]).view(-1, of_text)
    first = torch.tensor(begin, dtype=torch.int64).expand(len(sequences), -1)
    return torch.cat([first, sequences], dim=1)


def _blocks(path: Path, flag: str) -> Iterator[str]:
    """The text in blocks that end with a line, as far as lines are not endless."""
    if not path.is_file():
        raise ValueError(f"{flag}: {why_not(path, 'file')}")
    try:
        with path.open(encoding="utf-8-sig") as text:
            while block := text.read(_BLOCK_CHARACTERS):
                yield block + text.readline(_BLOCK_CHARACTERS)
    except UnicodeDecodeError as fault:
        raise ValueError(f"{flag}: is no UTF-8 text: {fault}") from fault


class LayerInputs:
    """Hidden states on their way through the layers of a dense LLaMA; see `next`."""

    def __init__(
        self,
        config: LlamaConfig,
        tokens: Tensor,
        embedding: Tensor,
        device: torch.device | str = "cpu",
    ):
        """Args:
        config: the source's, of transformers.
        tokens: `[n, s]`.
        embedding: the source's, `[V, d]`, of any dtype.
        device: where the layers are computed; the hidden states wait in the host's memory.

        Raises:
            ValueError: for a token that the embedding has no row for.
        """
        if int(tokens.max()) >= len(embedding):
            raise ValueError(
                f"--calibration: the tokenizer gave token {int(tokens.max())}, and the model has "
                f"{len(embedding)}: it is another model's tokenizer"
            )
        self._hidden = embedding[tokens].float()
        self._device = torch.device(device)
        self._model = _one_layer(config).to(self._device)
        self._layer = 0

    def next(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take the hidden states through the next layer.

        Args:
            weights: the layer's, by their names in transformers' layer
                (`self_attn.q_proj.weight`, `input_layernorm.weight`, …), of any dtype. The layer is
                computed in fp32.

        Returns:
            H `[in, in]` by projection (`q_proj` …), fp64, on the device; projections that read the
            same input share one tensor.

        Raises:
            ValueError: if an input is not finite.
        """
        layer = self._model.layers[0]
        layer.load_state_dict(dict(weights), strict=True)
        sums: dict[str, Tensor] = {}
        hooks = [
            layer.get_submodule(name).register_forward_pre_hook(_adding_to(sums, name))
            for name in _READ_BY
        ]
        with torch.no_grad():
            for batch in self._hidden.split(_SEQUENCES_AT_ONCE):
                out = self._model(inputs_embeds=batch.to(self._device), use_cache=False)
                batch.copy_(out.last_hidden_state)
        for hook in hooks:
            hook.remove()
        count = self._hidden.shape[0] * self._hidden.shape[1]
        for name, total in sums.items():
            if not total.isfinite().all():
                raise ValueError(
                    f"--calibration: the input of layer {self._layer}'s {name} is not finite"
                )
            total /= count
        self._layer += 1
        return {reader: sums[name] for name, readers in _READ_BY.items() for reader in readers}


def _adding_to(sums: dict[str, Tensor], name: str) -> Any:
    """A hook that adds Σ x·xᵀ of a module's input to `sums[name]`, in fp64."""

    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, 1).double()
        if name in sums:
            sums[name].addmm_(x.t(), x)
        else:
            sums[name] = x.t() @ x

    return add


def _one_layer(config: LlamaConfig) -> Any:
    """transformers' model of one layer, in fp32, without embedding and final norm."""
    from transformers import LlamaConfig, LlamaModel

    settings = {**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 1, "layer_types": None}
    # transformers warns of ids that are no row of the vocabulary.
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    settings.pop("dtype", None)
    settings.pop("torch_dtype", None)
    model = LlamaModel(LlamaConfig(**settings)).eval()
    model.norm = nn.Identity()
    return model.requires_grad_(False)

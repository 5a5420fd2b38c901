"""Letting a causal language model of transformers go on with a prompt, token by token."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from unittest import mock

import torch
from torch import distributed

from megatron.boost.evaluation.of_hugging_face import quiet_transformers
from megatron.boost.preprocessing.inputs import why_not

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_SMALLEST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and how many there are.

    Greedy as long as nothing says otherwise: any of `top_k`, `top_p` and `temperature` turns
    sampling on, and a temperature of 0 is greedy again.

    Raises:
        ValueError: for a value that is no way to sample.
    """

    max_new_tokens: int = 128
    top_k: int | None = None
    """Sample among this many of the most probable tokens."""
    top_p: float | None = None
    """Sample among the fewest tokens that together have this probability."""
    temperature: float | None = None
    """The logits are divided by it."""
    seed: int = 1234
    """Every prompt is sampled from this seed, whatever was generated before it."""

    def __post_init__(self) -> None:
        for flag, value, legal, rule, nearest in (
            (
                "--max-new-tokens",
                self.max_new_tokens,
                self.max_new_tokens >= 1,
                "must be at least 1",
                1,
            ),
            (
                "--top-k",
                self.top_k,
                self.top_k is None or self.top_k >= 1,
                "must be at least 1",
                1,
            ),
            (
                "--top-p",
                self.top_p,
                self.top_p is None or 0 < self.top_p <= 1,
                "must be above 0 and at most 1",
                0.01 if self.top_p is not None and self.top_p <= 0 else 1.0,
            ),
            (
                "--temperature",
                self.temperature,
                self.temperature is None or 0 <= self.temperature < float("inf"),
                "must be a number from 0 on, and finite",
                0 if self.temperature is not None and self.temperature < 0 else 1.0,
            ),
            (
                "--seed",
                self.seed,
                _SMALLEST_SEED <= self.seed <= _LARGEST_SEED,
                f"must be from {_SMALLEST_SEED} to {_LARGEST_SEED}, as torch takes them",
                _LARGEST_SEED if self.seed > 0 else _SMALLEST_SEED,
            ),
        ):
            if not legal:
                raise ValueError(f"{flag} {value}: {rule}; nearest legal value: {nearest}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                "--temperature 0: is greedy, and --top-k and --top-p sample; nearest legal value: "
                "0.1, or leave them out"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken each time."""
        chosen = (self.top_k, self.top_p, self.temperature)
        return self.temperature == 0 or all(value is None for value in chosen)

    def for_model(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, room: int
    ) -> GenerationConfig:
        """These settings for transformers, with the tokens that end a text from the model's own
        generation settings; of those nothing else is taken over, so greedy is greedy.

        Args:
            model: the one that is to generate.
            tokenizer: its EOS ends a text where the model names no token.
            room: how many tokens it has positions for.
        """
        from transformers import GenerationConfig

        own = model.generation_config
        eos = own.eos_token_id if own is not None else None
        eos = eos if eos is not None else getattr(model.config, "eos_token_id", None)
        eos = eos if eos is not None else tokenizer.eos_token_id
        last = eos[0] if isinstance(eos, list) else eos
        pad = own.pad_token_id if own is not None else None
        settings: dict[str, Any] = {
            "max_new_tokens": min(self.max_new_tokens, room),
            "do_sample": not self.greedy,
            "use_cache": True,
            "eos_token_id": eos,
            "pad_token_id": pad if pad is not None else (last if last is not None else 0),
        }
        if not self.greedy:
            settings |= {
                # 0 and 1 switch transformers' own defaults off.
                "top_k": self.top_k if self.top_k is not None else 0,
                "top_p": self.top_p if self.top_p is not None else 1.0,
                "temperature": self.temperature if self.temperature is not None else 1.0,
            }
        return GenerationConfig(**settings)


@dataclass(frozen=True)
class Completion:
    """What a model made of one prompt."""

    prompt: str
    text: str
    """What follows the prompt, without special tokens."""
    prompt_tokens: int
    new_tokens: int
    ended: bool
    """Whether the model ended the text, rather than the limit on its length."""
    seconds: float


@torch.inference_mode()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: Sampling,
    output: TextIO,
) -> Completion:
    """Generate what follows a prompt, and write both to `output` while it comes.

    Uses the model's KV cache. Ends at the model's positions at the latest.

    Raises:
        ValueError: as `tokens_of_prompt`.
    """
    ids = tokens_of_prompt(model, tokenizer, prompt)
    settings = sampling.for_model(model, tokenizer, _room(model, ids))
    inputs = torch.tensor([ids], device=model.device)
    torch.manual_seed(sampling.seed)
    started = time.perf_counter()
    with quiet_transformers(), mock.patch.object(model, "generation_config", settings):
        result = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=settings,
            streamer=_streamer(tokenizer, output),
        )
    seconds = time.perf_counter() - started
    whole = result[0].tolist()
    ends = settings.eos_token_id
    before = tokenizer.decode(ids, skip_special_tokens=True)
    return Completion(
        prompt,
        tokenizer.decode(whole, skip_special_tokens=True).removeprefix(before),
        prompt_tokens=len(ids),
        new_tokens=len(whole) - len(ids),
        ended=whole[-1] in (ends if isinstance(ends, list) else [ends]),
        seconds=seconds,
    )


def tokens_of_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> list[int]:
    """The prompt's tokens, with the special ones that the tokenizer puts before a text, and none of
    those that it would put behind.

    Raises:
        ValueError: for a prompt without tokens, with tokens that the model does not have, or as
            long as the model's positions.
    """
    ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
    plain: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            ids = ids[: start + len(plain)]
            break
    if not ids:
        raise ValueError(f"--prompt {prompt!r}: has no tokens; nearest legal value: a word")
    vocab_size = model.config.vocab_size
    if max(ids) >= vocab_size:
        raise ValueError(
            f"--prompt: the tokenizer makes token {max(ids)}, and the model's are 0 to "
            f"{vocab_size - 1}; nearest legal value: --tokenizer-model with the model's own"
        )
    if _room(model, ids) < 1:
        positions = model.config.max_position_embeddings
        raise ValueError(
            f"--prompt: has {len(ids)} tokens, and the model {positions} positions; nearest legal "
            f"value: {positions - 1} tokens"
        )
    return ids


def _room(model: PreTrainedModel, ids: list[int]) -> int:
    """How many tokens the model has positions for behind the prompt's."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return sys.maxsize if positions is None else int(positions) - len(ids)


def _streamer(tokenizer: PreTrainedTokenizerBase, output: TextIO) -> Any:
    """Writes tokens as text to `output` as soon as they are whole words."""
    from transformers import TextStreamer

    class Writer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            output.write(text + "\n" * stream_end)
            output.flush()

    # The prompt passes through it as well: what follows is decoded as its continuation.
    return Writer(tokenizer, skip_special_tokens=True)


def complete_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    sampling: Sampling,
    output: TextIO,
) -> list[Completion]:
    """Complete prompts, with a blank line between them. Ranks share them out, each with the whole
    model: the text is that of one process, since every prompt is sampled from the seed.

    The first rank writes: its own prompts as they come, the others' when they are finished. Every
    rank must call it, with the same prompts; the group's backend must take tensors of the CPU.

    Returns:
        on the first rank all completions, in order; on the others their own.

    Raises:
        ValueError: as `tokens_of_prompt`, before anything is written.
    """
    for prompt in prompts:
        tokens_of_prompt(model, tokenizer, prompt)
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    rank = distributed.get_rank() if ranks > 1 else 0
    done = []
    for number, prompt in enumerate(prompts):
        owner = number % ranks
        if rank == 0 and number:
            output.write("\n")
        if owner == rank == 0:
            done.append(complete(model, tokenizer, prompt, sampling, output))
        elif owner == rank:
            text = io.StringIO()
            done.append(complete(model, tokenizer, prompt, sampling, text))
            distributed.send_object_list([done[-1], text.getvalue()], dst=0)
        elif rank == 0:
            received: list[Any] = [None, None]
            distributed.recv_object_list(received, src=owner)
            done.append(received[0])
            output.write(received[1])
            output.flush()
    return done


def prompts_of(texts: Sequence[str], files: Sequence[Path], standard_input: TextIO) -> list[str]:
    """The prompts that a command line gives, in order: those in words, then a file each.

    Args:
        texts: of `--prompt`; "-" is what comes on standard input.
        files: of `--prompt-file`. The line break that ends a file is no part of the prompt.
        standard_input: read when there is nothing else, too.

    Raises:
        ValueError: if there is no prompt, or a file of it cannot be read as UTF-8.
    """
    prompts = []
    for text in texts or ([] if files else ["-"]):
        prompts.append(_from(standard_input) if text == "-" else _utf_8(f"--prompt {text!r}", text))
    for file in files:
        if not file.is_file():
            raise ValueError(f"--prompt-file {file}: {why_not(file, 'file')}")
        try:
            prompts.append(file.read_bytes().decode("utf-8-sig").removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise _no_utf_8(f"--prompt-file {file}", error) from None
    return prompts


def _from(standard_input: TextIO) -> str:
    if standard_input.isatty():
        raise ValueError('--prompt: is missing; nearest legal value: --prompt "Once upon a time"')
    try:
        text = standard_input.read()
    except UnicodeDecodeError as error:
        raise _no_utf_8("--prompt -", error) from None
    return _utf_8("--prompt -", text).removesuffix("\n")


def _utf_8(where: str, text: str) -> str:
    """`text`, in which Python would have left bytes that are no UTF-8 as halves of surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise _no_utf_8(where, error) from None


def _no_utf_8(where: str, error: UnicodeEncodeError | UnicodeDecodeError) -> ValueError:
    return ValueError(f"{where}: invalid UTF-8 at byte {error.start + 1} ({error.reason})")

"""From what a user asks to be measured to the result: data, model, windows, sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.boost.cpu import megatron_on_cpu, process_group_ended, with_cpu_flags
from megatron.boost.evaluation.of_hugging_face import load_folder, nats_of_windows, read_config
from megatron.boost.evaluation.ranks import (
    device_of,
    join_world,
    largest,
    rank,
    summed,
    world_size,
)
from megatron.boost.evaluation.result import Evaluation, Sums
from megatron.boost.evaluation.tokenizers import (
    beginning,
    required,
    tokenizer_of_checkpoint,
    tokenizer_of_folder,
)
from megatron.boost.evaluation.tokens import (
    Documents,
    IndexedTokens,
    Segment,
    TokenStream,
    refuse_foreign_tokens,
    segments,
    text_bytes,
    tokens_of_text,
)
from megatron.boost.evaluation.windows import Window, cut, share_of
from megatron.boost.launch import rendezvous_alone, start_kernels_in_order
from megatron.boost.patches import apply_always

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_WINDOW_UNASKED = 4096
"""Where only a model's positions are known: some have 131,072, whose logits fit nowhere."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure: a model, either in `load` or in `hf`, on tokens in `data` or in `text`."""

    load: Path | None = None
    """A folder that Megatron saved to."""
    step: int | None = None
    """The iteration in it; None: the last."""
    hf: Path | None = None
    """A folder of transformers."""
    data: str | None = None
    """The prefix of a Megatron data set."""
    split: str | None = None
    """Megatron's shares of it, of which the validation part is measured; None: all of it."""
    text: tuple[Path, ...] = ()
    """Text files, one document each."""
    tokenizer_model: str | None = None
    window: int | None = None
    """Tokens in a window; None: as many as the model was trained on, or has positions for."""
    stride: int | None = None
    """None: that of the window, so that no token is read twice."""
    documents: Documents | None = None
    """None: "joined" for a data set, as in training, "separate" for text files."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    rows: int = 4
    """Windows that are scored together."""
    device: str = "auto"
    dtype: str | None = None
    trust_remote_code: bool = False

    @property
    def where(self) -> str:
        """The flag that names the model, and its value."""
        return f"--hf {self.hf}" if self.hf is not None else f"--load {self.load}"

    @property
    def what(self) -> str:
        """The flag that names the tokens, and its value."""
        if self.data is not None:
            return f"--data {self.data}"
        return f"--text {' '.join(map(str, self.text))}"


@dataclass(frozen=True)
class _Task:
    """The windows to score, and what else there is to know of the tokens."""

    stream: TokenStream
    segments: list[Segment]
    windows: list[Window]
    window: int
    stride: int
    text_bytes: int
    """This rank's share."""

    @property
    def longest(self) -> int:
        return max(window.length for window in self.windows)


def evaluate(request: Request, on_windows: Callable[[int, int], None]) -> Evaluation:
    """Measure a model. Every rank that torchrun started must call it, and gets the result.

    Args:
        request: what to measure; the same on all ranks.
        on_windows: told, as the scoring goes, how many windows this rank has read and how many it
            reads in all.

    Raises:
        ValueError: for what cannot be measured, before any process group is made.
    """
    if request.tensor_parallel > 1:
        start_kernels_in_order()
    device = device_of(request.device)
    with process_group_ended():
        if request.hf is not None:
            return _evaluate_folder(request, device, on_windows)
        return _evaluate_checkpoint(request, device, on_windows)


def _evaluate_folder(
    request: Request, device: torch.device, on_windows: Callable[[int, int], None]
) -> Evaluation:
    assert request.hf is not None
    for flag, size in (
        ("--tensor-model-parallel-size", request.tensor_parallel),
        ("--pipeline-model-parallel-size", request.pipeline_parallel),
    ):
        if size > 1:
            raise ValueError(
                f"{flag} {size}: a Hugging Face folder is evaluated with the whole model on every "
                "rank, and the text shared out; nearest legal value: 1, or --load with a "
                "Megatron checkpoint"
            )
    config = read_config(request.hf, request.trust_remote_code).get_text_config()
    tokenizer = tokenizer_of_folder(request.hf, request.tokenizer_model)
    positions = getattr(config, "max_position_embeddings", None)
    task = _task(
        request,
        tokenizer,
        vocab_size=config.vocab_size,
        usual_window=min(positions or LONGEST_WINDOW_UNASKED, LONGEST_WINDOW_UNASKED),
        positions=positions,
    )
    dtype = None if request.dtype is None else _DTYPES[request.dtype]
    model = load_folder(
        request.hf, dtype=dtype, device=device, trust_remote_code=request.trust_remote_code
    )
    join_world(device)
    own = share_of(task.windows, rank(), world_size())
    count = _counter(len(own), on_windows)
    started = time.perf_counter()
    sums = nats_of_windows(model, task.stream, own, request.rows, count)
    return _result(task, sums, time.perf_counter() - started, device)


def _evaluate_checkpoint(
    request: Request, device: torch.device, on_windows: Callable[[int, int], None]
) -> Evaluation:
    assert request.load is not None
    if request.trust_remote_code:
        raise ValueError(
            "--trust-remote-code: a Megatron checkpoint brings no code; nearest legal value: "
            "leave it out"
        )
    on_cpu = device.type == "cpu"
    with ExitStack() as stack:
        if on_cpu:
            stack.enter_context(megatron_on_cpu())
        stack.enter_context(apply_always())
        from megatron.boost.evaluation.of_megatron import (
            CheckpointModel,
            Layout,
            configure,
            run_of_checkpoint,
            vocabulary_of,
        )

        layout = Layout(
            tensor_parallel=request.tensor_parallel,
            pipeline_parallel=request.pipeline_parallel,
            micro_batch_size=request.rows,
        )
        layout.refuse_world(world_size())
        run = run_of_checkpoint(request.load, request.step)
        stored = run.arguments
        tokenizer = tokenizer_of_checkpoint(request.load, stored, request.tokenizer_model)
        vocab_size = vocabulary_of(run, None if tokenizer is None else len(tokenizer))
        task = _task(
            request,
            tokenizer,
            vocab_size=vocab_size,
            usual_window=getattr(stored, "seq_length", None)
            or min(stored.max_position_embeddings, LONGEST_WINDOW_UNASKED),
            positions=stored.max_position_embeddings,
        )
        settings = configure(
            run,
            request.load,
            request.step,
            layout,
            window=task.longest,
            vocab_size=vocab_size,
            dtype=request.dtype,
            cpu_flags=with_cpu_flags if on_cpu else list,
        )
        rendezvous_alone()
        model = CheckpointModel(settings, vocab_size, run.iteration)
        count = _counter(len(model.share_of(task.windows)), on_windows)
        started = time.perf_counter()
        sums = model.nats_of_windows(task.stream, task.windows, count)
        return _result(task, sums, time.perf_counter() - started, device)


def _task(
    request: Request,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    usual_window: int,
    positions: int | None,
) -> _Task:
    """The windows that are asked for.

    Args:
        request: what to measure.
        tokenizer: the model's, if it is known.
        vocab_size: the model's number of tokens.
        usual_window: tokens in a window, unless the user says so.
        positions: the model's; None: any number.

    Raises:
        ValueError: for tokens or windows that the model does not take.
    """
    window = request.window if request.window is not None else usual_window
    if positions is not None and window > positions:
        raise ValueError(
            f"--seq-length {window}: the model has {positions} positions; nearest legal value: "
            f"{positions}"
        )
    stride = request.stride if request.stride is not None else window
    if stride > window:
        raise ValueError(
            f"--stride {stride}: would leave tokens out between windows of {window} "
            f"(--seq-length); nearest legal value: {window}"
        )
    if request.split is not None and request.data is None:
        raise ValueError(
            f"--split {request.split}: is a data set's, and text files are measured whole; nearest "
            "legal value: leave it out"
        )
    sizes: list[int] = []
    stream: TokenStream
    if request.data is not None:
        stream = IndexedTokens(request.data, request.split)
    else:
        needed = required(tokenizer, request.where, request.what)
        stream, sizes = tokens_of_text(request.text, needed)
    usual: Documents = "separate" if request.text else "joined"
    begins = None if tokenizer is None else tokenizer.bos_token_id
    parts = segments(stream, request.documents or usual, beginning(tokenizer), begins)
    windows = cut(parts, window, stride)
    if not windows:
        raise ValueError(
            f"{request.what}: has {int(np.ptp(stream.boundaries))} tokens, none of which follows "
            "another one; nearest legal value: a text of two tokens"
        )
    refuse_foreign_tokens(stream, vocab_size, request.what)
    size = 0
    if request.text and rank() == 0:
        size = sum(sizes) - _bytes_of_unscored(stream, parts, needed)
    elif not request.text and tokenizer is not None:
        size = text_bytes(stream, parts, tokenizer, rank(), world_size())
    return _Task(stream, parts, windows, window, stride, size)


def _bytes_of_unscored(
    stream: TokenStream, parts: Sequence[Segment], tokenizer: PreTrainedTokenizerBase
) -> int:
    """The bytes of the first tokens that nothing predicts; a special one, as BOS is, has none."""
    first = [stream.read(part.start, part.start + 1) for part in parts if part.prefix is None]
    texts = (tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in first)
    return sum(len(text.encode("utf-8")) for text in texts)


def _counter(total: int, on_windows: Callable[[int, int], None]) -> Callable[[int], None]:
    """Adds up the windows of batches for `on_windows`."""
    read = 0

    def count(more: int) -> None:
        nonlocal read
        read = min(read + more, total)
        on_windows(read, total)

    on_windows(0, total)
    return count


def _result(
    task: _Task, sums: tuple[float, int], seconds: float, device: torch.device
) -> Evaluation:
    """The sums of all ranks as one result."""
    nats, tokens, size = summed([*sums, task.text_bytes], device)
    expected = sum(window.scored for window in task.windows)
    assert int(tokens) == expected, f"scored {int(tokens)} tokens of {expected}"
    return Evaluation(
        Sums(nats, int(tokens), int(size)),
        documents=len(task.stream.boundaries) - 1,
        windows=len(task.windows),
        window_tokens=task.window,
        stride_tokens=task.stride,
        seconds=largest(seconds, device),
    )

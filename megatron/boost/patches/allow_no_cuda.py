"""`pretrain()` calls `initialize_megatron()` with defaults, and those assert that CUDA is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.boost.patches import Patch


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.training.initialize import initialize_megatron

    # allow_no_cuda is the first parameter. Its default is changed rather than the function
    # wrapped, because modules that imported the function keep their own reference to it.
    defaults = initialize_megatron.__defaults__
    assert defaults and initialize_megatron.__code__.co_varnames[0] == "allow_no_cuda"
    initialize_megatron.__defaults__ = (True, *defaults[1:])
    try:
        yield
    finally:
        initialize_megatron.__defaults__ = defaults


PATCH = Patch(
    name="allow_no_cuda",
    reason="pretrain() has no way to pass allow_no_cuda=True on and stops without a GPU",
    needs="cpu",
    apply=_apply,
)

"""Setting an attribute for the length of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives `owner.name` another `value`; on exit the old one, or none, is there again.

    What `owner` inherits is shadowed, not changed: on exit the inherited value shows again.
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

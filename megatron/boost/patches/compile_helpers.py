"""`compile_helpers()` runs `make` in the package's folder, and the wheel has no Makefile there."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from megatron.boost.patches import Patch
from megatron.boost.patches.replacement import replaced


@contextlib.contextmanager
def _apply() -> Iterator[None]:
    from megatron.core.datasets import utils

    compile_with_make = utils.compile_helpers

    def compile_helpers() -> None:
        """Runs `make` unless the compiled helpers are there already, as the wheel has them."""
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_with_make()

    with replaced(utils, "compile_helpers", compile_helpers):
        yield


PATCH = Patch(
    name="compile_helpers",
    reason="initialisation runs make where pip installed no Makefile and ends the process",
    needs="always",
    apply=_apply,
)

"""Settings that every test needs before torch is imported."""

import os
from collections.abc import Iterator

import pytest

# One thread a process, here as in the ranks: two ranks on two cores must not fight over them, and
# a reference computed here must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"

# What a shared check asserts shall say what it found, as a test's own assertions do.
pytest.register_assert_rewrite("tests.support")


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """What a test sets in the environment, and what Megatron sets there when it builds a model in
    the test's own process, is gone after the test: programs that later tests start inherit it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

"""Settings that every test needs before torch is imported."""

import os

import pytest

# One thread a process, here as in the ranks: two ranks on two cores must not fight over them, and
# a reference computed here must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"

# What a shared check asserts shall say what it found, as a test's own assertions do.
pytest.register_assert_rewrite("tests.support")

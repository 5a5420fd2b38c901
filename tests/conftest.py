"""Settings that every test needs before torch is imported."""

import os

# One thread a process, here as in the ranks: two ranks on two cores must not fight over them, and
# a reference computed here must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"

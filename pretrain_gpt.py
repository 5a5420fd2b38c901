"""Pre-train a GPT with Megatron-Core: full-rank as Megatron does it, or low-rank with BTP.

torchrun --nproc-per-node N pretrain_gpt.py [Megatron's flags] [--low-rank-arch cola …]; `--help`
lists both.
"""

import sys
import time

_STARTED = time.time()

from megatron.boost.launch import main  # noqa: E402 (the clock starts before the imports)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], started=_STARTED))

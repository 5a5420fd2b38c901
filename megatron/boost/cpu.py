"""Megatron-Core, as pip installs it, on a machine without a GPU: its ranks talk over gloo.

`megatron_on_cpu()` is the one entry point; `python -m megatron.boost.cpu SCRIPT ARGS` runs a whole
Megatron script in it, alone or on every rank of a `torchrun`. It changes Megatron's and torch's
behaviour in this process only, and undoes that on exit.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import distributed

from megatron.boost.command_line import BAD_INPUT, print_error
from megatron.boost.cuda_stand_ins import cuda_on_cpu
from megatron.boost.flags import values_of
from megatron.boost.patches import (
    apply_always,
    apply_cpu,
    check_megatron_core_release,
    installed_megatron_core,
)
from megatron.boost.quiet import quiet_output

CPU_FLAGS: tuple[str, ...] = (
    "--transformer-impl=local",
    "--distributed-backend=gloo",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-rope-fusion",
)
"""Megatron's flags for a machine without CUDA, Transformer Engine and apex."""

_FOR_GPUS_ALONE = (
    "amp_C",
    "apex",
    "fused_weight_gradient_mlp_cuda",
    "transformer_engine",
    "transformer_engine_torch",
)
"""Packages whose kernels Megatron takes wherever they are installed, optimizer and norm of the
gradients included, and which have none for the CPU."""

_active = False


def with_cpu_flags(argv: Sequence[str]) -> list[str]:
    """`argv`, Megatron's flags, followed by those of `CPU_FLAGS` that it lacks.

    Also sets CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands for tensor parallelism whatever
    the device.

    Raises:
        ValueError: where `argv` gives a flag of `CPU_FLAGS` another value.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    missing = []
    for needed in CPU_FLAGS:
        flag, _, value = needed.partition("=")
        given = values_of(argv, flag)
        if value and any(other != value for other in given):
            other = next(other for other in given if other != value)
            raise ValueError(f"{flag} {other}: does not run on CPU; nearest legal value: {value}")
        if not given:
            missing += [flag, value] if value else [flag]
    return [*argv, *missing]


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Context in which Megatron-Core and its training loop run on the CPU, over gloo.

    Inside another one it does nothing.

    Raises:
        ValueError: if megatron-core is not of the release that the patches are for.
    """
    global _active
    if _active:
        yield
        return
    _active = True
    try:
        with _without(_FOR_GPUS_ALONE), apply_cpu(), cuda_on_cpu():
            yield
    finally:
        _active = False


@contextlib.contextmanager
def _without(packages: Sequence[str]) -> Iterator[None]:
    """Context in which importing `packages` fails, as if they were not installed; those that are
    imported already stay."""
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def main(argv: Sequence[str]) -> int:
    """Runs a Megatron script on the CPU as `__main__`, this rank of it.

    Args:
        argv: `[--verbose] SCRIPT [FLAGS]`; `CPU_FLAGS` are added to the script's flags, and
            `--verbose` leaves upstream's notices on the terminal.

    Returns:
        The exit code: 0, or 2 for bad input, said in one `error: …` line. The script's own errors
        are raised.
    """
    verbose = list(argv[:1]) == ["--verbose"]
    script, *flags = argv[verbose:] or [""]
    try:
        if not Path(script).is_file():
            raise ValueError(f"SCRIPT {script!r}: there is no such file")
        flags = with_cpu_flags(flags)
        # A checkout's own megatron folder comes first for its scripts, as without us.
        sys.path.insert(0, str(Path(script).resolve().parent))
        check_megatron_core_release(installed_megatron_core())
    except ValueError as refusal:
        if os.environ.get("RANK", "0") == "0":
            print_error(str(refusal))
        return BAD_INPUT
    sys.argv = [script, *flags]
    with quiet_output(verbose=verbose), megatron_on_cpu(), apply_always(), process_group_ended():
        runpy.run_path(script, run_name="__main__")
    return 0


@contextlib.contextmanager
def process_group_ended() -> Iterator[None]:
    """Destroys the process group on exit: without that a good run ends in "terminate called".

    Not under NCCL after an error: it waits for kernels that the other ranks will never join, and
    the error would be told when their time is up, if at all. torchrun ends them at once.
    """
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        if distributed.is_initialized() and not (failed and distributed.get_backend() == "nccl"):
            distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

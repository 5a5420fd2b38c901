"""Says which implementation of the ops serves which device: `python -m boost_layers.ops`."""

from __future__ import annotations

import importlib

from boost_layers import ops
from boost_layers.ops.dispatch import problem_of_csrc


def report() -> list[str]:
    """One line for the extension, one for each device type."""
    problem = problem_of_csrc()
    if problem is not None:
        lines = [f"extension (csrc): {problem}"]
    else:
        built = importlib.import_module("boost_layers.ops._C")
        for_cuda = f"CUDA {built.cuda_architectures}" if built.cuda_architectures else "no CUDA"
        lines = [
            f"extension (csrc): CPU ({', '.join(built.cpu_instruction_sets)}), {for_cuda}; "
            f"torch {built.torch_version}, {built.compiler}"
        ]
    return lines + [f"{device}: {name}" for device, name in ops.in_use().items()]


if __name__ == "__main__":
    print("\n".join(report()))

"""Triton: every op is there, and every kernel compiles for a GPU."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost_layers import ops
from boost_layers.ops import reference
from tests.support.triton_interpreter import (
    BF16,
    F32,
    names_there,
    normal,
    process,
    signature_of,
)

pytestmark = pytest.mark.slow


def test_every_op_is_there_with_its_signature(interpreter: ProcessPoolExecutor) -> None:
    names = {name: signature_of(reference, name) for name in reference.__all__}
    assert interpreter.submit(names_there).result() == names


def _compile_launches() -> list[str]:
    """Compiles what a few calls launch for a GPU that need not be there; the kernels' names."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from boost_layers.ops import triton_kernels as ops

    compiled = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **more: Any):
        types, constants = {}, dict(more)
        for name, value in zip(kernel.arg_names, args, strict=False):
            if isinstance(value, Tensor):
                types[name] = "*" + {F32: "fp32", BF16: "bf16"}[value.dtype]
            elif value is None:
                constants[name] = value
            else:
                types[name] = "i32"
        types.update(dict.fromkeys(constants, "constexpr"))
        source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        compiled.append(kernel.__name__)

    JITFunction.run = run  # type: ignore[method-assign]
    x, wide, weight = normal(4, 96, dtype=BF16), normal(4, 1), normal(96, dtype=BF16)
    slots = torch.empty(4, 6, dtype=BF16)
    ops.residual_add_rms_stats(x, x.clone(), slots)
    ops.read_statistics(slots)
    ops.residual_gradient(x, x, wide)
    online = {"statistics": slots, "hidden_size": 96, "eps": 1e-5}
    norm: dict[str, Any] = {"norm": "layernorm", "weight": weight, "bias": weight}
    ops.latent_epilogue(x, [64, 32], "gelu", gated=x, **norm, **online)
    ops.latent_epilogue_backward(x.flatten(), [64, 32], "silu", h=x, v=x, dv=x, **norm, **online)
    ops.gated_product(x, x, "swiglu")
    ops.gated_product_backward(x, x, x, "swiglu")
    heads = normal(4, 1, 3, 32, dtype=BF16)
    ops.rotary_backward([heads], 1, slots, slots, interleaved=True)
    ops.rms_norm(x, weight, 1e-5)
    ops.rms_norm_backward(x, x, weight, wide, x)
    return compiled


def test_every_kernel_compiles(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses."""
    pytest.importorskip("triton")
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DISABLE_LINE_INFO": "1"}
    with process(TRITON_INTERPRET="0", **environment) as executor:
        compiled = executor.submit(_compile_launches).result()
    sources = (Path(ops.__file__).parent / "triton_kernels").glob("*.py")
    kernels = re.findall(r"def (\w+_kernel)\(", "".join(path.read_text() for path in sources))
    assert sorted(compiled) == sorted(kernels) and kernels

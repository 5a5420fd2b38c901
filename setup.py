"""Builds the extension of csrc where torch is there to build it with; the metadata stands in
pyproject.toml.

BOOST_BUILD says what is built: `none`, a package of plain Python, which works on its PyTorch
reference; `cpu`, the CPU's kernels; `cuda`, CUDA's too. Unset, it is as much as can be: nothing
without torch (an isolated build), CUDA where nvcc and a CUDA build of torch are found.
TORCH_CUDA_ARCH_LIST names other architectures than sm_80 and sm_90 with PTX.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
EXTENSION = "boost_layers.ops._C"
DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"
CXX_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden"]
# What ptxas says is read by `make check-cuda`.
NVCC_FLAGS = ["-O3", "-std=c++20", "-lineinfo", "-Xptxas", "-v"]
INSTRUCTION_SETS = {
    "default": "-DCPU_CAPABILITY=DEFAULT -DCPU_CAPABILITY_DEFAULT",
    "avx2": "-DCPU_CAPABILITY=AVX2 -DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c",
    "avx512": (
        "-DCPU_CAPABILITY=AVX512 -DCPU_CAPABILITY_AVX512 -mavx512f -mavx512bw -mavx512vl "
        "-mavx512dq -mfma -mf16c"
    ),
}


def chosen_build() -> str:
    """none, cpu or cuda; ends with the reason if what was asked for cannot be built."""
    asked = os.environ.get("BOOST_BUILD", "")
    if asked not in ("", "none", "cpu", "cuda"):
        raise SystemExit(f"BOOST_BUILD={asked}: must be none, cpu or cuda")
    if asked == "none":
        return asked
    try:
        from torch.version import cuda
    except ImportError:
        if asked:
            raise SystemExit(
                f"BOOST_BUILD={asked}: torch is not there; install it, and build with "
                "--no-build-isolation"
            ) from None
        return "none"
    missing = "torch is a build without CUDA" if cuda is None else None
    if missing is None and shutil.which("nvcc") is None:
        missing = "nvcc is not on the PATH"
    if asked == "cuda" and missing:
        raise SystemExit(f"BOOST_BUILD=cuda: {missing}")
    return asked or ("cpu" if missing else "cuda")


def toolkit() -> Path:
    """The folder of the CUDA toolkit, as nvcc finds it: on the PATH there may be a wrapper."""
    plan = subprocess.run(
        ["nvcc", "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    (top,) = re.findall(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    return Path(top).resolve()


def sources(folder: str, *patterns: str) -> list[str]:
    """Relative to the project, as setuptools wants them."""
    found = [path for pattern in patterns for path in (ROOT / folder).glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extension(build: str) -> dict:
    """What `setup` is told of the extension."""
    if build == "cuda":
        os.environ.setdefault("CUDA_HOME", str(toolkit()))
    import torch
    from torch.utils import cpp_extension

    class BuildExtension(cpp_extension.BuildExtension):
        """Compiles the CPU's kernels once for each instruction set."""

        def build_extension(self, ext) -> None:
            x86 = platform.machine() in ("x86_64", "AMD64")
            for name in INSTRUCTION_SETS if x86 else ["default"]:
                flags = [*CXX_FLAGS, *INSTRUCTION_SETS[name].split(), "-Wno-maybe-uninitialized"]
                ext.extra_objects += self.compiler.compile(
                    [f"csrc/cpu/kernels_{name}.cpp"],
                    output_dir=self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=flags,
                )
            super().build_extension(ext)

    settings = {
        "sources": [
            "csrc/build_info.cpp",
            "csrc/torch_bindings.cpp",
            *sources("csrc/torch", "*.cpp"),
        ],
        "include_dirs": cpp_extension.include_paths(),
        "define_macros": [("BOOST_TORCH_VERSION", f'"{torch.__version__}"')],
        "extra_compile_args": {"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    }
    make = cpp_extension.CppExtension
    if build == "cuda":
        make = cpp_extension.CUDAExtension
        architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
        settings["sources"] += sources("csrc/cuda", "*.cpp", "*.cu")
        settings["extra_link_args"] = ["-lcublas"]
        # torch's wheels bring cuBLAS as a package of its own, under its versioned name only.
        wheels = Path(torch.__file__).parents[1] / "nvidia"
        for library in wheels.glob("cu[0-9]*/lib/libcublas.so.*"):
            settings["include_dirs"].append(str(library.parents[1] / "include"))
            settings["extra_link_args"] = [f"-L{library.parent}", f"-l:{library.name}"]
        settings["define_macros"] += [
            ("BOOST_WITH_CUDA", None),
            ("BOOST_CUDA_ARCHITECTURES", f'"{architectures}"'),
        ]
    else:
        settings["extra_compile_args"] = CXX_FLAGS
    return {
        "ext_modules": [make(EXTENSION, **settings)],
        "cmdclass": {"build_ext": BuildExtension},
    }


build = chosen_build()
setup(**({} if build == "none" else extension(build)))

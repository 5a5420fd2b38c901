// What is no operator: how the extension was built.

#include <pybind11/pybind11.h>

#ifndef BOOST_CUDA_ARCHITECTURES
#define BOOST_CUDA_ARCHITECTURES ""
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "BOOST's operators; loading this module registers torch.ops.boost.";
    m.attr("cuda_architectures") = BOOST_CUDA_ARCHITECTURES;
    m.attr("torch_version") = BOOST_TORCH_VERSION;
#if defined(__clang__)
    m.attr("compiler") = "clang " __clang_version__;
#else
    m.attr("compiler") = "gcc " __VERSION__;
#endif
#if defined(__x86_64__)
    m.attr("cpu_instruction_sets") = pybind11::make_tuple("default", "AVX2", "AVX512");
#else
    m.attr("cpu_instruction_sets") = pybind11::make_tuple("default");
#endif
}

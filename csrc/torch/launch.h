// Runs a kernel where its tensors are: on CUDA's current stream, or on the CPU's threads with the
// instruction set that torch uses itself.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "../cpu/kernels.h"

#ifdef BOOST_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/kernels.h"
#endif

namespace boost {

using at::Tensor;

// As torch names it: DEFAULT, AVX2, AVX512.
inline const cpu::Kernels& cpu_kernels() {
    static const cpu::Kernels& kernels = []() -> const cpu::Kernels& {
#if defined(__x86_64__)
        const std::string capability = at::get_cpu_capability();
        if (capability == "AVX512") return cpu::kernels_avx512();
        if (capability == "AVX2") return cpu::kernels_avx2();
#endif
        return cpu::kernels_default();
    }();
    return kernels;
}

// Elements that are worth a thread of their own.
constexpr int64_t kGrain = 32768;

template <typename Arguments>
void on_cpu(void (*kernel)(const Arguments&, int64_t, int64_t), const Arguments& arguments,
            int64_t items, int64_t elements_each) {
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
    at::parallel_for(0, items, grain,
                     [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

// Tokens whose gradients are added up one after the other; their sums are added up pairwise, so
// that the error does not grow with the number of tokens.
constexpr int64_t kItemsAPart = 16;

// How many partial sums are made on the CPU.
inline int cpu_parts(int64_t items) {
    return static_cast<int>(std::max<int64_t>(1, (items + kItemsAPart - 1) / kItemsAPart));
}

template <typename Arguments>
void on_cpu_in_parts(void (*kernel)(const Arguments&, int, int64_t, int64_t),
                     const Arguments& arguments, int64_t items, int parts) {
    at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part) {
            kernel(arguments, static_cast<int>(part), items * part / parts,
                   items * (part + 1) / parts);
        }
    });
}

#ifdef BOOST_WITH_CUDA
template <typename Arguments>
void on_cuda(void (*kernel)(const Arguments&, cudaStream_t), const Arguments& arguments,
             const Tensor& where) {
    const c10::cuda::CUDAGuard guard(where.device());
    kernel(arguments, c10::cuda::getCurrentCUDAStream());
}

// Runs the kernel `name` where the tensor `where` is; on the CPU over `items` of so many elements.
#define BOOST_RUN(name, arguments, where, items, elements_each) \
    ((where).is_cuda() ? on_cuda(cuda::name, arguments, where)  \
                       : on_cpu(cpu_kernels().name, arguments, items, elements_each))
#define BOOST_RUN_IN_PARTS(name, arguments, where, items)      \
    ((where).is_cuda() ? on_cuda(cuda::name, arguments, where) \
                       : on_cpu_in_parts(cpu_kernels().name, arguments, items, (arguments).parts))
#else
#define BOOST_RUN(name, arguments, where, items, elements_each) \
    on_cpu(cpu_kernels().name, arguments, items, elements_each)
#define BOOST_RUN_IN_PARTS(name, arguments, where, items) \
    on_cpu_in_parts(cpu_kernels().name, arguments, items, (arguments).parts)
#endif

// How many partial sums a kernel makes of `items` where the tensor `where` is.
inline int parts_for(const Tensor& where, int64_t items) {
#ifdef BOOST_WITH_CUDA
    if (where.is_cuda()) return cuda::parts_for(items);
#endif
    return cpu_parts(items);
}

}  // namespace boost

#ifdef BOOST_WITH_CUDA

#include "gemms_cuda.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>

#include <vector>

#include "../cuda/gemm.h"
#include "arguments.h"

namespace boost {
namespace {

cuda::Matrix matrix_of(const Tensor& t, bool transposed) {
    return {t.mutable_data_ptr(), t.size(0), t.size(1), t.stride(0), transposed};
}

std::vector<cuda::Matrix> matrices(const std::vector<Tensor>& tensors, bool transposed) {
    std::vector<cuda::Matrix> found;
    for (const Tensor& t : tensors) found.push_back(matrix_of(t, transposed));
    return found;
}

// cuBLAS wants rows that do not overlap, as those of an expanded tensor do.
std::vector<Tensor> all_readable(at::TensorList tensors) {
    std::vector<Tensor> found;
    for (const Tensor& t : tensors) {
        const bool overlap = t.size(0) > 1 && t.stride(0) < t.size(1);
        found.push_back(overlap ? t.contiguous() : readable(t));
    }
    return found;
}

}  // namespace

void multiply_on_cuda(at::TensorList c, at::TensorList a, bool transpose_a, at::TensorList b,
                      bool transpose_b, double beta) {
    const c10::cuda::CUDAGuard guard(c[0].device());
    const std::vector<Tensor> left = all_readable(a), right = all_readable(b);
    for (const Tensor& out : c) written_rows(out, "gemm", "the result");
    cuda::gemms(at::cuda::getCurrentCUDABlasHandle(), static_cast<int>(c.size()),
                matrices(left, transpose_a).data(), matrices(right, transpose_b).data(),
                matrices(c.vec(), false).data(), dtype_of(a[0], "gemm", "an operand"),
                dtype_of(c[0], "gemm", "the result"), beta);
}

}  // namespace boost

#endif

#include "gemms.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#ifdef BOOST_WITH_CUDA
#include "gemms_cuda.h"
#endif

namespace boost {

void multiply(const Tensor& c, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
              double beta) {
    multiply(at::TensorList(c), at::TensorList(a), transpose_a, at::TensorList(b), transpose_b,
             beta);
}

void multiply(at::TensorList c, at::TensorList a, bool transpose_a, at::TensorList b,
              bool transpose_b, double beta) {
#ifdef BOOST_WITH_CUDA
    if (c[0].is_cuda()) return multiply_on_cuda(c, a, transpose_a, b, transpose_b, beta);
#endif
    for (size_t i = 0; i < c.size(); ++i) {
        Tensor out = c[i];
        const Tensor left = transpose_a ? a[i].t() : a[i], right = transpose_b ? b[i].t() : b[i];
        if (out.scalar_type() != left.scalar_type()) {
            // torch's CPU GEMM rounds to the dtype of its operands, so they are widened first.
            const Tensor product = at::mm(left.to(out.scalar_type()), right.to(out.scalar_type()));
            beta == 0 ? out.copy_(product) : out.add_(product);
        } else if (beta == 0) {
            at::mm_out(out, left, right);
        } else {
            at::addmm_out(out, out, left, right);
        }
    }
}

}  // namespace boost

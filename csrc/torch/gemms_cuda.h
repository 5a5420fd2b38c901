// The GEMMs of gemms.h on CUDA, by cuBLAS.

#pragma once

#include <ATen/core/Tensor.h>

namespace boost {

void multiply_on_cuda(at::TensorList c, at::TensorList a, bool transpose_a, at::TensorList b,
                      bool transpose_b, double beta);

}  // namespace boost

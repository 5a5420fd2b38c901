// C = op(A)·op(B) + beta·C, one or several, for tensors of rows that may stand apart.

#pragma once

#include <ATen/core/Tensor.h>

namespace boost {

using at::Tensor;

// `transpose_a`: Aᵀ is meant. beta is 0 or 1. C may be wider than A and B (fp32 for bf16 and fp16).
void multiply(const Tensor& c, const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
              double beta);

// Each C_i from A_i and B_i: as few GEMMs as their shapes and their places in memory allow.
void multiply(at::TensorList c, at::TensorList a, bool transpose_a, at::TensorList b,
              bool transpose_b, double beta);

}  // namespace boost

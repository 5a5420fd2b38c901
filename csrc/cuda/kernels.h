// The CUDA kernels as functions: arguments of common/kernels.h with device pointers, and a stream.
// They launch and return: no synchronisation, no allocation, fit for graph capture. Nothing is
// launched (and nothing written) if there are no rows or they are empty. A failed launch throws
// std::runtime_error, dtypes that do not go together std::invalid_argument.
//
// Accesses are 16 bytes wide where pointers, strides and widths allow, and single elements
// otherwise.

#pragma once

#include <cuda_runtime.h>

#include "../common/kernels.h"

namespace boost::cuda {

// How many partial sums the gradients of norms and of γ take, `parts`: over tokens in
// latent_epilogue_backward and rms_norm_backward, over the rows of the weights in
// fold_gamma_backward. 0 if there are none. Every part is written, so they need not be cleared
// beforehand; the kernels take other numbers too.
int parts_for(int64_t rows);

void rms_stats(const RmsStats& arguments, cudaStream_t stream);
// S of n tokens, from slots of bf16 or as it is in fp32.
void read_statistics(const Statistics& statistics, float* sum, int64_t n, cudaStream_t stream);
void residual_gradient(const ResidualGradient& arguments, cudaStream_t stream);
void latent_epilogue(const LatentEpilogue& arguments, cudaStream_t stream);
void latent_epilogue_backward(const LatentEpilogueBackward& arguments, cudaStream_t stream);
void fold_gamma(const FoldGamma& arguments, cudaStream_t stream);
void fold_gamma_backward(const FoldGammaBackward& arguments, cudaStream_t stream);
void gated_product(const GatedProduct& arguments, cudaStream_t stream);
void gated_product_backward(const GatedProductBackward& arguments, cudaStream_t stream);
void rotary(const Rotary& arguments, cudaStream_t stream);
void rms_norm(const RmsNorm& arguments, cudaStream_t stream);
void rms_norm_backward(const RmsNormBackward& arguments, cudaStream_t stream);

}  // namespace boost::cuda

// The GEMMs of kernels 3 and 4 over cuBLAS, on row-major matrices of device memory whose rows may
// stand apart. They run on the handle's stream, with its math mode; alpha and beta are on the host,
// so its pointer mode must be that (as torch's is).
//
// Dtypes: A and B alike; C of theirs, or fp32 for bf16 and fp16. fp32 arithmetic, fp64 for fp64.
// Others, sizes that do not go together and sizes beyond 2³¹ throw std::invalid_argument; cuBLAS'
// errors std::runtime_error.
//
//   up                         y_i  = z_i·B_iᵀ     A = z,  B = B, transposed
//   its input gradient         dz_i = dy_i·B_i     A = dy, B = B
//   its weight gradient        dB_i = dy_iᵀ·z_i    A = dy, transposed, B = z; C may be main_grad
//   down                       H    = x·foldedᵀ    A = x,  B = folded, transposed
//   its input gradient         dx  += dH·folded    A = dH, B = folded; beta = 1
//   its weight gradient        M    = dHᵀ·x        A = dH, transposed, B = x; C in fp32

#pragma once

#include <cublas_v2.h>

#include <cstdint>

#include "../common/kernels.h"

namespace boost::cuda {

// A matrix as it lies in memory, its rows `stride` elements apart; `transposed` says that its
// transpose is meant.
struct Matrix {
    void* data = nullptr;
    int64_t rows = 0, columns = 0, stride = 0;
    bool transposed = false;
};

// How far apart in elements the matrices of a batch are: at least 0, and those of C more.
struct BatchStrides {
    int64_t a = 0, b = 0, c = 0;
};

// C = alpha·A·B + beta·C, `batch` times. With beta = 0, C is not read. Without products (A has no
// columns) beta must be 0 or 1.
void gemm(cublasHandle_t handle, const Matrix& a, const Matrix& b, const Matrix& c, DType dtype,
          DType c_dtype, double alpha, double beta, int batch = 1, BatchStrides strides = {});

// C_i = A_i·B_i + beta·C_i for `count` of them: neighbours of equal shape that follow one another
// evenly spaced in memory as one batch, others singly.
void gemms(cublasHandle_t handle, int count, const Matrix* a, const Matrix* b, const Matrix* c,
           DType dtype, DType c_dtype, double beta);

}  // namespace boost::cuda

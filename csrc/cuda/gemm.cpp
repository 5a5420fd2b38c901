// cuBLAS wants columns next to each other: a row-major matrix is the transpose of that, so
// Cᵀ = Bᵀ·Aᵀ is asked for, with the operands swapped and otherwise as they lie.

#include "gemm.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

namespace boost::cuda {
namespace {

cudaDataType_t data_type(DType dtype) {
    switch (dtype) {
        case DType::kFloat:
            return CUDA_R_32F;
        case DType::kDouble:
            return CUDA_R_64F;
        case DType::kBFloat16:
            return CUDA_R_16BF;
        case DType::kHalf:
            return CUDA_R_16F;
    }
    throw std::invalid_argument("gemm: unknown dtype");
}

int64_t size_of(DType dtype) {
    if (dtype == DType::kDouble) return 8;
    return dtype == DType::kFloat ? 4 : 2;
}

bool is_narrow(DType dtype) { return size_of(dtype) == 2; }

int64_t rows_meant(const Matrix& m) { return m.transposed ? m.columns : m.rows; }
int64_t columns_meant(const Matrix& m) { return m.transposed ? m.rows : m.columns; }

void check(cublasStatus_t status) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        throw std::runtime_error(std::string("gemm: ") + cublasGetStatusString(status));
    }
}

int narrowed(int64_t size) {
    if (size < 0 || size > INT32_MAX) throw std::invalid_argument("gemm: sizes beyond 2^31");
    return static_cast<int>(size);
}

// The stride of a single row means nothing, and may be less than cuBLAS accepts.
int leading(const Matrix& m) {
    if (m.rows > 1 && m.stride < m.columns) {
        throw std::invalid_argument("gemm: rows overlap");
    }
    const int64_t least = std::max<int64_t>(1, m.columns);
    return narrowed(m.rows > 1 ? std::max(m.stride, least) : least);
}

cublasOperation_t operation(const Matrix& m) { return m.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

bool alike(const Matrix& one, const Matrix& other) {
    return one.rows == other.rows && one.columns == other.columns && one.stride == other.stride &&
           one.transposed == other.transposed;
}

// From one matrix to the next in elements, if it is a whole number of them.
std::optional<int64_t> distance(const Matrix& from, const Matrix& to, DType dtype) {
    const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to.data) -
                                            reinterpret_cast<uintptr_t>(from.data));
    if (bytes % size_of(dtype) != 0) return std::nullopt;
    return bytes / size_of(dtype);
}

// How many of the matrices from the first on are alike and evenly spaced, and how far apart.
struct Run {
    int length;
    int64_t stride;
};

Run run_of(const Matrix* matrices, int count, DType dtype) {
    Run run{1, 0};
    while (run.length < count) {
        const Matrix &last = matrices[run.length - 1], &next = matrices[run.length];
        if (!alike(last, next)) break;
        const std::optional<int64_t> stride = distance(last, next, dtype);
        if (!stride || (run.length > 1 && *stride != run.stride)) break;
        run.stride = *stride;
        ++run.length;
    }
    return run;
}

// What a sum of no products leaves in C. cuBLAS need not write it then.
void without_products(cublasHandle_t handle, const Matrix& c, DType dtype, double beta, int batch,
                      int64_t stride) {
    if (beta == 1) return;
    if (beta != 0) throw std::invalid_argument("gemm: without products beta must be 0 or 1");
    cudaStream_t stream;
    check(cublasGetStream(handle, &stream));
    for (int64_t i = 0; i < batch; ++i) {
        char* const data = static_cast<char*>(c.data) + i * stride * size_of(dtype);
        const cudaError_t status = cudaMemset2DAsync(data, leading(c) * size_of(dtype), 0,
                                                     c.columns * size_of(dtype), c.rows, stream);
        if (status != cudaSuccess) {
            throw std::runtime_error(std::string("gemm: ") + cudaGetErrorString(status));
        }
    }
}

}  // namespace

void gemm(cublasHandle_t handle, const Matrix& a, const Matrix& b, const Matrix& c, DType dtype,
          DType c_dtype, double alpha, double beta, int batch, BatchStrides strides) {
    if (c_dtype != dtype && !(is_narrow(dtype) && c_dtype == DType::kFloat)) {
        throw std::invalid_argument(
            "gemm: C must be of the dtype of A and B, or fp32 for bf16 and "
            "fp16");
    }
    if (c.transposed || rows_meant(a) != c.rows || columns_meant(b) != c.columns ||
        columns_meant(a) != rows_meant(b)) {
        throw std::invalid_argument("gemm: shapes do not go together");
    }
    if (c.rows == 0 || c.columns == 0 || batch == 0) return;
    if (columns_meant(a) == 0) return without_products(handle, c, c_dtype, beta, batch, strides.c);
    const bool is_double = dtype == DType::kDouble;
    const float alpha_float = static_cast<float>(alpha), beta_float = static_cast<float>(beta);
    const void* factor = is_double ? static_cast<const void*>(&alpha) : &alpha_float;
    const void* kept = is_double ? static_cast<const void*>(&beta) : &beta_float;
    const auto compute = is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
    const int m = narrowed(c.columns), n = narrowed(c.rows), k = narrowed(columns_meant(a));
    if (batch == 1) {
        check(cublasGemmEx(handle, operation(b), operation(a), m, n, k, factor, b.data,
                           data_type(dtype), leading(b), a.data, data_type(dtype), leading(a), kept,
                           c.data, data_type(c_dtype), leading(c), compute, CUBLAS_GEMM_DEFAULT));
    } else {
        check(cublasGemmStridedBatchedEx(
            handle, operation(b), operation(a), m, n, k, factor, b.data, data_type(dtype),
            leading(b), strides.b, a.data, data_type(dtype), leading(a), strides.a, kept, c.data,
            data_type(c_dtype), leading(c), strides.c, batch, compute, CUBLAS_GEMM_DEFAULT));
    }
}

void gemms(cublasHandle_t handle, int count, const Matrix* a, const Matrix* b, const Matrix* c,
           DType dtype, DType c_dtype, double beta) {
    for (int i = 0; i < count;) {
        const Run of_a = run_of(a + i, count - i, dtype), of_b = run_of(b + i, count - i, dtype),
                  of_c = run_of(c + i, count - i, c_dtype);
        // cuBLAS promises nothing for strides that go back, and matrices that are one and the same
        // cannot be written side by side.
        const bool forward = of_a.stride >= 0 && of_b.stride >= 0 && of_c.stride > 0;
        const int of_all = forward ? std::min({of_a.length, of_b.length, of_c.length}) : 1;
        gemm(handle, a[i], b[i], c[i], dtype, c_dtype, 1.0, beta, of_all,
             {of_a.stride, of_b.stride, of_c.stride});
        i += of_all;
    }
}

}  // namespace boost::cuda

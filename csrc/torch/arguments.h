// Tensors as the kernels' arguments, and the checks that name an argument when it does not fit.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <string>

#include "../common/kernels.h"

namespace boost {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& t, const char* op, const char* name) {
    switch (t.scalar_type()) {
        case at::kFloat:
            return DType::kFloat;
        case at::kDouble:
            return DType::kDouble;
        case at::kBFloat16:
            return DType::kBFloat16;
        case at::kHalf:
            return DType::kHalf;
        default:
            TORCH_CHECK_VALUE(false, op, ": ", name, " must be fp32, fp64, bf16 or fp16, not ",
                              t.scalar_type());
    }
}

// The dtype of statistics and of arithmetic.
inline at::ScalarType wide(at::ScalarType dtype) {
    return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_dtype(const Tensor& t, at::ScalarType dtype, const char* op, const char* name) {
    TORCH_CHECK_VALUE(t.scalar_type() == dtype, op, ": ", name, " must be ", dtype, ", not ",
                      t.scalar_type());
}

inline void check_shape(const Tensor& t, at::IntArrayRef shape, const char* op, const char* name) {
    TORCH_CHECK_VALUE(t.sizes() == shape, op, ": ", name, " must be of shape ", shape, ", not ",
                      t.sizes());
}

inline void check_matrix(const Tensor& t, const char* op, const char* name) {
    TORCH_CHECK_VALUE(t.dim() == 2, op, ": ", name, " must have two dimensions, not ", t.dim());
}

inline void check_device(const Tensor& t, const Tensor& like, const char* op, const char* name) {
    TORCH_CHECK_VALUE(t.device() == like.device(), op, ": ", name, " must be on ", like.device(),
                      ", not ", t.device());
}

inline bool has_rows(const Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1; }

// A matrix that is read: the same numbers with the elements of a row next to each other.
inline Tensor readable(const Tensor& t) { return has_rows(t) ? t : t.contiguous(); }

inline Rows rows_of(const Tensor& t) { return {t.mutable_data_ptr(), t.stride(0)}; }

inline Rows rows_of(const OptionalTensor& t) { return t ? rows_of(*t) : Rows{}; }

// A matrix that is written must be one of rows already.
inline Rows written_rows(const Tensor& t, const char* op, const char* name) {
    TORCH_CHECK_VALUE(has_rows(t), op, ": ", name,
                      " must have the elements of a row next to each other");
    return rows_of(t);
}

inline Tensor matrix(const Tensor& like, int64_t rows, int64_t columns, at::ScalarType dtype) {
    return at::empty({rows, columns}, like.options().dtype(dtype));
}

}  // namespace boost

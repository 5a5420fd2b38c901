// Kernel 1 as operators: sum_of_squares, rms_stats, residual_add_rms_stats, read_statistics,
// residual_gradient.

#include "arguments.h"
#include "launch.h"
#include "ops.h"

namespace boost {
namespace {

Tensor stats_of(const char* op, const Tensor& x, const OptionalTensor& delta,
                const OptionalTensor& slots, int64_t tp_rank) {
    const DType dtype = dtype_of(x, op, "x");
    const int64_t n = x.size(0);
    Tensor s = matrix(x, n, 1, wide(x.scalar_type()));
    RmsStats a{};
    a.x = rows_of(x);
    a.delta = rows_of(delta);
    a.sum = s.mutable_data_ptr();
    a.n = n, a.k = x.size(1), a.dtype = dtype;
    if (slots) {
        check_matrix(*slots, op, "slots");
        check_device(*slots, x, op, "slots");
        TORCH_CHECK_VALUE(slots->size(0) == n, op, ": slots must have a row for each of the ", n,
                          " tokens, not ", slots->size(0));
        a.slots = written_rows(*slots, op, "slots");
        a.slots_dtype = dtype_of(*slots, op, "slots");
        a.columns = slots->size(1);
        a.tp_rank = static_cast<int>(tp_rank);
        if (slots->scalar_type() == at::kBFloat16) {
            TORCH_CHECK_VALUE(a.columns % 3 == 0 && 0 <= tp_rank && 3 * tp_rank < a.columns, op,
                              ": slots of bf16 must have three columns for each rank, and tp_rank ",
                              tp_rank, " be one of them; they have ", a.columns);
        } else {
            check_dtype(*slots, wide(x.scalar_type()), op, "slots");
            TORCH_CHECK_VALUE(a.columns == 1, op, ": slots of ", slots->scalar_type(),
                              " must have one column, not ", a.columns);
        }
    }
    if (a.k == 0) {
        s.zero_();
        if (slots) slots->zero_();
    } else if (n > 0) {
        BOOST_RUN(rms_stats, a, x, n, a.k);
    }
    return s;
}

}  // namespace

Tensor rms_stats(const Tensor& x, const OptionalTensor& slots, int64_t tp_rank) {
    check_matrix(x, "rms_stats", "x");
    return stats_of("rms_stats", readable(x), {}, slots, tp_rank);
}

Tensor sum_of_squares(const Tensor& x) {
    check_matrix(x, "sum_of_squares", "x");
    return stats_of("sum_of_squares", readable(x), {}, {}, 0);
}

Tensor residual_add_rms_stats(const Tensor& x, const Tensor& delta, const OptionalTensor& slots,
                              int64_t tp_rank) {
    const char* op = "residual_add_rms_stats";
    check_matrix(x, op, "x");
    check_shape(delta, x.sizes(), op, "delta");
    check_dtype(delta, x.scalar_type(), op, "delta");
    check_device(delta, x, op, "delta");
    written_rows(x, op, "x");
    return stats_of(op, x, readable(delta), slots, tp_rank);
}

Tensor read_statistics(const Tensor& block) {
    const char* op = "read_statistics";
    check_matrix(block, op, "block");
    if (block.scalar_type() != at::kBFloat16) {
        TORCH_CHECK_VALUE(block.scalar_type() == wide(block.scalar_type()), op,
                          ": block must be bf16, fp32 or fp64, not ", block.scalar_type());
        TORCH_CHECK_VALUE(block.size(1) == 1, op, ": block of ", block.scalar_type(),
                          " must have one column, not ", block.size(1));
        return block.clone();
    }
    TORCH_CHECK_VALUE(block.size(1) > 0 && block.size(1) % 3 == 0, op,
                      ": block of bf16 must have three columns for each rank, not ", block.size(1));
    const Tensor rows = readable(block);
    Tensor s = matrix(block, block.size(0), 1, at::kFloat);
    const Statistics statistics{rows_of(rows), rows.size(1), 1.0, 0.0};
    const auto sum = static_cast<float*>(s.mutable_data_ptr());
    const int64_t n = block.size(0);
#ifdef BOOST_WITH_CUDA
    if (block.is_cuda()) {
        const c10::cuda::CUDAGuard guard(block.device());
        if (n > 0) cuda::read_statistics(statistics, sum, n, c10::cuda::getCurrentCUDAStream());
        return s;
    }
#endif
    cpu_kernels().read_statistics(statistics, sum, 0, n);
    return s;
}

Tensor residual_gradient(const Tensor& dresidual, const Tensor& x, const Tensor& ds) {
    const char* op = "residual_gradient";
    check_matrix(dresidual, op, "dresidual");
    check_shape(x, dresidual.sizes(), op, "x");
    check_dtype(x, dresidual.scalar_type(), op, "x");
    check_device(x, dresidual, op, "x");
    check_shape(ds, {x.size(0), 1}, op, "ds");
    check_dtype(ds, wide(x.scalar_type()), op, "ds");
    check_device(ds, dresidual, op, "ds");
    const Tensor given = readable(dresidual), tokens = readable(x), slope = ds.contiguous();
    Tensor dx = matrix(x, x.size(0), x.size(1), x.scalar_type());
    const ResidualGradient a{rows_of(given),         rows_of(tokens), rows_of(dx),
                             slope.const_data_ptr(), x.size(0),       x.size(1),
                             dtype_of(x, op, "x")};
    if (x.numel() > 0) BOOST_RUN(residual_gradient, a, x, a.n, a.k);
    return dx;
}

}  // namespace boost

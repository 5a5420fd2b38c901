// Kernels 3 and 4 as operators: the GEMMs of up- and down-projections.
//
// On the CPU each is torch's own GEMM into a given place. On CUDA, projections of equal shape are
// one strided batched GEMM where their weights are evenly spaced in memory (gemms.h).

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "arguments.h"
#include "gemms.h"
#include "ops.h"

namespace boost {
namespace {

// Member i of a flat tensor of contiguous [n, widths[i]] one after the other.
std::vector<Tensor> members(const Tensor& flat, int64_t n, const std::vector<int64_t>& widths) {
    std::vector<Tensor> found;
    int64_t start = 0;
    for (const int64_t width : widths) {
        found.push_back(flat.narrow(0, start, n * width).view({n, width}));
        start += n * width;
    }
    return found;
}

std::vector<int64_t> sizes_along(at::TensorList tensors, int64_t axis) {
    std::vector<int64_t> sizes;
    for (const Tensor& t : tensors) sizes.push_back(t.size(axis));
    return sizes;
}

int64_t total(const std::vector<int64_t>& sizes) {
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += size;
    return sum;
}

// Tokens of flat z with members of these ranks.
int64_t tokens_of(const Tensor& z, const std::vector<int64_t>& ranks, const char* op,
                  const char* name) {
    for (const int64_t rank : ranks) {
        TORCH_CHECK_VALUE(rank > 0, op, ": ", name, " must have ranks of at least 1, not ", rank);
    }
    TORCH_CHECK_VALUE(z.dim() == 1 && z.numel() % total(ranks) == 0, op, ": z must be flat, with ",
                      total(ranks), " elements for each token, not ", z.sizes());
    return z.numel() / total(ranks);
}

void check_matrices(at::TensorList tensors, const Tensor& like, const char* op, const char* name) {
    TORCH_CHECK_VALUE(!tensors.empty(), op, ": ", name, " must not be empty");
    for (const Tensor& t : tensors) {
        check_matrix(t, op, name);
        check_dtype(t, like.scalar_type(), op, name);
        check_device(t, like, op, name);
    }
}

// Sequence, batch and width of x; a matrix is a batch of one.
Tensor as_batched(const Tensor& x, const char* op, const char* name) {
    TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, op, ": ", name,
                      " must be [n, k] or [s, b, k], not of ", x.dim(), " dimensions");
    return x.dim() == 3 ? x : x.unsqueeze(1);
}

// x as one matrix if its tokens are evenly spaced in memory, else nothing.
OptionalTensor as_matrix(const Tensor& x) {
    const bool one_each = x.size(1) <= 1;
    if (!one_each && x.size(0) > 1 && x.stride(0) != x.size(1) * x.stride(1)) return {};
    const int64_t stride = one_each ? x.stride(0) : x.stride(1);
    return x.as_strided({x.size(0) * x.size(1), x.size(2)}, {stride, x.stride(2)});
}

// Calls f(matrix of a, matrix of b) once, or for each element of the batch where one of the two has
// its tokens elsewhere.
template <typename F>
void over_tokens(const Tensor& a, const Tensor& b, F&& f) {
    const OptionalTensor whole_a = as_matrix(a), whole_b = as_matrix(b);
    if (whole_a && whole_b) return f(*whole_a, *whole_b);
    for (int64_t i = 0; i < a.size(1); ++i) f(a.select(1, i), b.select(1, i));
}

}  // namespace

Tensor up_projection(const Tensor& z, at::TensorList weights) {
    const char* op = "up_projection";
    check_matrices(weights, z, op, "weights");
    const std::vector<int64_t> ranks = sizes_along(weights, 1), outs = sizes_along(weights, 0);
    const int64_t n = tokens_of(z, ranks, op, "weights");
    Tensor y = at::empty({n * total(outs)}, z.options());
    multiply(members(y, n, outs), members(z.contiguous(), n, ranks), false, weights, true, 0);
    return y;
}

Tensor up_projection_dgrad(at::TensorList dys, at::TensorList weights) {
    const char* op = "up_projection_dgrad";
    TORCH_CHECK_VALUE(!dys.empty(), op, ": dys must not be empty");
    check_matrices(dys, dys[0], op, "dys");
    check_matrices(weights, dys[0], op, "weights");
    TORCH_CHECK_VALUE(dys.size() == weights.size(), op, ": dys must be ", weights.size(),
                      " tensors as weights are, not ", dys.size());
    const int64_t n = dys[0].size(0);
    const std::vector<int64_t> ranks = sizes_along(weights, 1);
    for (size_t i = 0; i < dys.size(); ++i) {
        check_shape(dys[i], {n, weights[i].size(0)}, op, "dys");
    }
    Tensor dz = at::empty({n * total(ranks)}, dys[0].options());
    multiply(members(dz, n, ranks), dys, false, weights, false, 0);
    return dz;
}

namespace {

std::vector<Tensor> members_of_wgrad(const char* op, at::TensorList dys, const Tensor& z,
                                     const std::vector<int64_t>& ranks, const char* name) {
    check_matrices(dys, z, op, "dys");
    TORCH_CHECK_VALUE(ranks.size() == dys.size(), op, ": ", name, " must be ", dys.size(),
                      " as dys are, not ", ranks.size());
    const int64_t n = tokens_of(z, ranks, op, name);
    for (const Tensor& dy : dys) {
        TORCH_CHECK_VALUE(dy.size(0) == n, op, ": dys must have a row for each of the ", n,
                          " tokens of z, not ", dy.size(0));
    }
    return members(z.contiguous(), n, ranks);
}

void check_main_grad(const Tensor& grad, at::IntArrayRef shape, const Tensor& like, const char* op,
                     const char* name) {
    check_shape(grad, shape, op, name);
    check_device(grad, like, op, name);
    TORCH_CHECK_VALUE(
        grad.scalar_type() == like.scalar_type() || grad.scalar_type() == wide(like.scalar_type()),
        op, ": ", name, " must be ", like.scalar_type(), " or ", wide(like.scalar_type()), ", not ",
        grad.scalar_type());
}

}  // namespace

std::vector<Tensor> up_projection_wgrad(at::TensorList dys, const Tensor& z,
                                        at::IntArrayRef ranks) {
    const std::vector<int64_t> widths = ranks.vec();
    const std::vector<Tensor> parts =
        members_of_wgrad("up_projection_wgrad", dys, z, widths, "ranks");
    std::vector<Tensor> found;
    for (size_t i = 0; i < dys.size(); ++i) {
        found.push_back(matrix(z, dys[i].size(1), widths[i], z.scalar_type()));
    }
    multiply(found, dys, true, parts, false, 0);
    return found;
}

void up_projection_accumulate(at::TensorList dys, const Tensor& z, at::TensorList main_grads) {
    const char* op = "up_projection_accumulate";
    for (const Tensor& grad : main_grads) check_matrix(grad, op, "main_grads");
    const std::vector<Tensor> parts =
        members_of_wgrad(op, dys, z, sizes_along(main_grads, 1), "main_grads");
    for (size_t i = 0; i < dys.size(); ++i) {
        check_main_grad(main_grads[i], {dys[i].size(1), main_grads[i].size(1)}, z, op,
                        "main_grads");
        check_dtype(main_grads[i], main_grads[0].scalar_type(), op, "main_grads");
    }
    multiply(main_grads, dys, true, parts, false, 1);
}

void down_projection(const Tensor& x, const Tensor& weight, const Tensor& out) {
    const char* op = "down_projection";
    const Tensor from = as_batched(x, op, "x"), to = as_batched(out, op, "out");
    check_matrices(weight, x, op, "weight");
    check_device(out, x, op, "out");
    check_shape(to, {from.size(0), from.size(1), weight.size(0)}, op, "out");
    TORCH_CHECK_VALUE(from.size(2) == weight.size(1), op, ": weight must have ", from.size(2),
                      " columns as x has, not ", weight.size(1));
    TORCH_CHECK_VALUE(out.scalar_type() == x.scalar_type() || out.scalar_type() == at::kFloat, op,
                      ": out must be of the dtype of x, ", x.scalar_type(), ", or fp32, not ",
                      out.scalar_type());
    over_tokens(from, to,
                [&](const Tensor& a, const Tensor& c) { multiply(c, a, false, weight, true, 0); });
}

Tensor down_projection_dgrad(const Tensor& dh, const Tensor& weight) {
    const char* op = "down_projection_dgrad";
    check_matrix(dh, op, "dh");
    check_matrices(weight, dh, op, "weight");
    TORCH_CHECK_VALUE(dh.size(1) == weight.size(0), op, ": weight must have ", dh.size(1),
                      " rows as dh has columns, not ", weight.size(0));
    Tensor dx = matrix(dh, dh.size(0), weight.size(1), dh.scalar_type());
    multiply(dx, dh, false, weight, false, 0);
    return dx;
}

void down_projection_add_dgrad(const Tensor& dx, const Tensor& dh, const Tensor& weight) {
    const char* op = "down_projection_add_dgrad";
    check_matrix(dh, op, "dh");
    check_matrices(weight, dh, op, "weight");
    check_shape(dx, {dh.size(0), weight.size(1)}, op, "dx");
    check_dtype(dx, dh.scalar_type(), op, "dx");
    check_device(dx, dh, op, "dx");
    multiply(dx, dh, false, weight, false, 1);
}

Tensor down_projection_wgrad(const Tensor& dh, const Tensor& x, at::ScalarType dtype) {
    const char* op = "down_projection_wgrad";
    const Tensor tokens = as_batched(x, op, "x"), grads = as_batched(dh, op, "dh");
    check_dtype(dh, x.scalar_type(), op, "dh");
    check_device(dh, x, op, "dh");
    check_shape(grads, {tokens.size(0), tokens.size(1), grads.size(2)}, op, "dh");
    TORCH_CHECK_VALUE(dtype == x.scalar_type() || dtype == wide(x.scalar_type()), op,
                      ": dtype must be that of x, ", x.scalar_type(), ", or ",
                      wide(x.scalar_type()), ", not ", dtype);
    Tensor m = matrix(x, grads.size(2), tokens.size(2), dtype);
    double beta = 0;
    over_tokens(grads, tokens, [&](const Tensor& d, const Tensor& t) {
        multiply(m, d, true, t, false, beta);
        beta = 1;
    });
    return m;
}

void down_projection_accumulate(const Tensor& dh, const Tensor& x, const Tensor& main_grad) {
    const char* op = "down_projection_accumulate";
    const Tensor tokens = as_batched(x, op, "x"), grads = as_batched(dh, op, "dh");
    check_dtype(dh, x.scalar_type(), op, "dh");
    check_device(dh, x, op, "dh");
    check_shape(grads, {tokens.size(0), tokens.size(1), grads.size(2)}, op, "dh");
    check_main_grad(main_grad, {grads.size(2), tokens.size(2)}, x, op, "main_grad");
    over_tokens(grads, tokens, [&](const Tensor& d, const Tensor& t) {
        multiply(main_grad, d, true, t, false, 1);
    });
}

}  // namespace boost

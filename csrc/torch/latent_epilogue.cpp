// Kernel 2 as operators: latent_epilogue and its backward.

#include <ATen/ops/zeros.h>

#include <numeric>

#include "arguments.h"
#include "launch.h"
#include "ops.h"

namespace boost {
namespace {

Activation activation_of(std::string_view name, const char* op) {
    if (name == "silu") return Activation::kSilu;
    if (name == "gelu") return Activation::kGelu;
    TORCH_CHECK_VALUE(name == "identity", op, ": activation must be silu, gelu or identity, not ",
                      name);
    return Activation::kIdentity;
}

LatentNorm norm_of(std::string_view name, const char* op) {
    if (name == "rmsnorm") return LatentNorm::kRms;
    if (name == "layernorm") return LatentNorm::kLayer;
    TORCH_CHECK_VALUE(name == "none", op, ": norm must be none, rmsnorm or layernorm, not ", name);
    return LatentNorm::kNone;
}

// The fields that both directions have.
template <typename Arguments>
void set_common(Arguments& a, const char* op, const Tensor& value, const OptionalTensor& statistics,
                const OptionalTensor& weight, const OptionalTensor& bias, at::IntArrayRef ranks,
                std::string_view activation, std::string_view norm, int64_t hidden_size, double eps,
                at::ScalarType dtype) {
    const int64_t n = value.size(0), width = value.size(1);
    a.n = n, a.width = width;
    TORCH_CHECK_VALUE(!ranks.empty() && ranks.size() <= kMaxGroups, op, ": ranks must be 1 to ",
                      kMaxGroups, " numbers, not ", ranks.size());
    for (const int64_t rank : ranks) {
        TORCH_CHECK_VALUE(rank >= 0, op, ": ranks must not be negative, as ", rank, " is");
    }
    TORCH_CHECK_VALUE(std::accumulate(ranks.begin(), ranks.end(), int64_t{0}) == width, op,
                      ": ranks must add up to the width ", width, " of the latents, not ", ranks);
    a.groups = static_cast<int>(ranks.size());
    std::copy(ranks.begin(), ranks.end(), a.ranks);
    a.activation = activation_of(activation, op);
    a.norm = norm_of(norm, op);
    a.norm_eps = kLatentNormEps;
    TORCH_CHECK_VALUE(weight.has_value() == (a.norm != LatentNorm::kNone), op,
                      ": weight goes with a norm, and only with one");
    TORCH_CHECK_VALUE(bias.has_value() == (a.norm == LatentNorm::kLayer), op,
                      ": bias goes with norm layernorm, and only with it");
    for (const auto& [tensor, name] : {std::pair{&weight, "weight"}, std::pair{&bias, "bias"}}) {
        if (!*tensor) continue;
        check_shape(**tensor, {width}, op, name);
        check_dtype(**tensor, dtype, op, name);
        check_device(**tensor, value, op, name);
    }
    a.weight = weight ? weight->const_data_ptr() : nullptr;
    a.bias = bias ? bias->const_data_ptr() : nullptr;
    if (statistics) {
        check_matrix(*statistics, op, "statistics");
        check_device(*statistics, value, op, "statistics");
        TORCH_CHECK_VALUE(statistics->size(0) == n, op,
                          ": statistics must have a row for each of the ", n, " tokens, not ",
                          statistics->size(0));
        const int64_t columns = statistics->size(1);
        if (columns == 1) {
            check_dtype(*statistics, wide(dtype), op, "statistics");
        } else {
            check_dtype(*statistics, at::kBFloat16, op, "statistics");
            TORCH_CHECK_VALUE(columns % 3 == 0, op,
                              ": statistics must have three columns for each rank, or one, not ",
                              columns);
        }
        a.statistics = {rows_of(*statistics), columns, static_cast<double>(hidden_size), eps};
    }
}

OptionalTensor readable(const OptionalTensor& t) {
    return t ? OptionalTensor(boost::readable(*t)) : t;
}

OptionalTensor contiguous(const OptionalTensor& t) {
    return t ? OptionalTensor(t->contiguous()) : t;
}

void check_value(const Tensor& t, at::IntArrayRef shape, const Tensor& like, const char* op,
                 const char* name) {
    check_shape(t, shape, op, name);
    check_device(t, like, op, name);
}

}  // namespace

std::tuple<Tensor, Tensor> latent_epilogue(const Tensor& h, const OptionalTensor& statistics,
                                           const OptionalTensor& gated,
                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                           at::IntArrayRef ranks, std::string_view activation,
                                           std::string_view norm, int64_t hidden_size, double eps,
                                           at::ScalarType dtype) {
    const char* op = "latent_epilogue";
    check_matrix(h, op, "h");
    const int64_t n = h.size(0), width = h.size(1);
    TORCH_CHECK_VALUE(h.scalar_type() == dtype || h.scalar_type() == wide(dtype), op,
                      ": h must be of the result's dtype ", dtype, " or ", wide(dtype), ", not ",
                      h.scalar_type());
    const Tensor rows = boost::readable(h);
    const OptionalTensor block = readable(statistics), beside = readable(gated);
    const OptionalTensor gamma = contiguous(weight), beta = contiguous(bias);
    LatentEpilogue a{};
    set_common(a, op, h, block, gamma, beta, ranks, activation, norm, hidden_size, eps, dtype);
    Tensor z = at::empty({n * width}, h.options().dtype(dtype));
    Tensor v = matrix(h, gated ? n : 0, width, dtype);
    a.h = rows_of(rows);
    a.z = z.mutable_data_ptr();
    if (gated) {
        check_value(*gated, h.sizes(), h, op, "gated");
        check_dtype(*gated, dtype, op, "gated");
        a.gated = rows_of(beside);
        a.v = v.mutable_data_ptr();
    }
    a.h_dtype = dtype_of(h, op, "h");
    a.dtype = dtype_of(z, op, "dtype");
    if (n * width > 0) BOOST_RUN(latent_epilogue, a, h, n, width);
    return {z, v};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> latent_epilogue_backward(
    const Tensor& dz, const OptionalTensor& dv, const OptionalTensor& h, const OptionalTensor& v,
    const OptionalTensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
    at::IntArrayRef ranks, std::string_view activation, std::string_view norm, int64_t hidden_size,
    double eps) {
    const char* op = "latent_epilogue_backward";
    TORCH_CHECK_VALUE(h || v, op, ": h or v must be given");
    TORCH_CHECK_VALUE(h || !statistics, op, ": h must be given with statistics");
    const Tensor& value = v ? *v : *h;
    check_matrix(value, op, v ? "v" : "h");
    const int64_t n = value.size(0), width = value.size(1);
    const at::ScalarType dtype = dz.scalar_type();
    check_value(dz, {n * width}, value, op, "dz");
    if (h) check_value(*h, value.sizes(), value, op, "h");
    const OptionalTensor rows = readable(h), given = readable(v), beside = readable(dv);
    const OptionalTensor block = readable(statistics);
    const OptionalTensor gamma = contiguous(weight), beta = contiguous(bias);
    const Tensor incoming = dz.contiguous();
    LatentEpilogueBackward a{};
    set_common(a, op, value, block, gamma, beta, ranks, activation, norm, hidden_size, eps, dtype);
    const at::ScalarType h_dtype = h ? h->scalar_type() : dtype;
    TORCH_CHECK_VALUE(h_dtype == dtype || h_dtype == wide(dtype), op, ": h must be of dz's dtype ",
                      dtype, " or ", wide(dtype), ", not ", h_dtype);
    for (const auto& [tensor, name] : {std::pair{&v, "v"}, std::pair{&dv, "dv"}}) {
        if (!*tensor) continue;
        check_value(**tensor, value.sizes(), value, op, name);
        check_dtype(**tensor, dtype, op, name);
    }
    Tensor dh = matrix(value, n, width, h_dtype);
    Tensor dv_out = matrix(value, v ? n : 0, width, dtype);
    Tensor ds = matrix(value, statistics ? n : 0, 1, wide(dtype));
    a.parts = parts_for(value, n);
    const auto sums = dz.options().dtype(wide(dtype));
    Tensor dweight = at::zeros({weight ? a.parts : 0, width}, sums);
    Tensor dbias = at::zeros({bias ? a.parts : 0, width}, sums);
    a.dz = incoming.const_data_ptr();
    a.dv_in = rows_of(beside);
    a.h = rows_of(rows);
    a.v = rows_of(given);
    a.dh = dh.mutable_data_ptr();
    a.dv = v ? dv_out.mutable_data_ptr() : nullptr;
    a.ds = statistics ? ds.mutable_data_ptr() : nullptr;
    a.dweight = weight ? dweight.mutable_data_ptr() : nullptr;
    a.dbias = bias ? dbias.mutable_data_ptr() : nullptr;
    a.h_dtype = dtype_of(dh, op, "h");
    a.dtype = dtype_of(dz, op, "dz");
    if (n * width > 0) BOOST_RUN_IN_PARTS(latent_epilogue_backward, a, value, n);
    const auto summed = [&](const Tensor& parts, bool given) {
        return given ? parts.sum(0).to(dtype) : at::empty({0}, dz.options());
    };
    return {dh, dv_out, ds, summed(dweight, weight.has_value()), summed(dbias, bias.has_value())};
}

}  // namespace boost

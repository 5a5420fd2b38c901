// γ folded into grouped down-projections, as operators.

#include <ATen/ops/zeros.h>

#include "arguments.h"
#include "launch.h"
#include "ops.h"

namespace boost {
namespace {

template <typename Arguments>
void set_weights(Arguments& a, const Tensor& gamma, const std::vector<Tensor>& weights,
                 const char* op) {
    TORCH_CHECK_VALUE(!weights.empty() && weights.size() <= kMaxGroups, op,
                      ": weights must be 1 to ", kMaxGroups, " tensors, not ", weights.size());
    TORCH_CHECK_VALUE(gamma.dim() == 1, op, ": gamma must have one dimension, not ", gamma.dim());
    a.groups = static_cast<int>(weights.size());
    a.k = gamma.size(0);
    a.dtype = dtype_of(gamma, op, "gamma");
    a.gamma = gamma.const_data_ptr();
    for (int i = 0; i < a.groups; ++i) {
        check_matrix(weights[i], op, "weights");
        check_dtype(weights[i], gamma.scalar_type(), op, "weights");
        check_device(weights[i], gamma, op, "weights");
        TORCH_CHECK_VALUE(weights[i].size(1) == a.k, op, ": weights must have ", a.k,
                          " columns as gamma has, not ", weights[i].size(1));
        a.rows[i] = weights[i].size(0);
        a.weights[i] = weights[i].const_data_ptr();
    }
}

std::vector<Tensor> contiguous(at::TensorList tensors) {
    std::vector<Tensor> found;
    for (const Tensor& t : tensors) found.push_back(t.contiguous());
    return found;
}

template <typename Arguments>
int64_t all_rows(const Arguments& a) {
    int64_t rows = 0;
    for (int i = 0; i < a.groups; ++i) rows += a.rows[i];
    return rows;
}

Tensor backward(const char* op, const Tensor& m, const Tensor& gamma, at::TensorList weights,
                const std::vector<Tensor>& dweights, bool accumulate) {
    const Tensor scale = gamma.contiguous(), product = m.contiguous();
    const std::vector<Tensor> factors = contiguous(weights);
    FoldGammaBackward a{};
    set_weights(a, scale, factors, op);
    const int64_t rows = all_rows(a);
    check_shape(m, {rows, a.k}, op, "m");
    check_device(m, gamma, op, "m");
    TORCH_CHECK_VALUE(
        m.scalar_type() == gamma.scalar_type() || m.scalar_type() == wide(gamma.scalar_type()), op,
        ": m must be of gamma's dtype or ", wide(gamma.scalar_type()), ", not ", m.scalar_type());
    a.m = product.const_data_ptr();
    a.m_dtype = dtype_of(m, op, "m");
    a.accumulate = accumulate;
    a.dweight_dtype = dtype_of(dweights[0], op, "dweights");
    for (int i = 0; i < a.groups; ++i) a.dweights[i] = dweights[i].mutable_data_ptr();
    a.parts = parts_for(gamma, rows);
    Tensor dgamma = at::zeros({a.parts, a.k}, gamma.options().dtype(wide(gamma.scalar_type())));
    a.dgamma = dgamma.mutable_data_ptr();
    if (m.numel() > 0) BOOST_RUN_IN_PARTS(fold_gamma_backward, a, gamma, rows);
    return dgamma.sum(0).to(gamma.scalar_type());
}

}  // namespace

Tensor fold_gamma(const Tensor& gamma, at::TensorList weights) {
    const Tensor scale = gamma.contiguous();
    const std::vector<Tensor> factors = contiguous(weights);
    FoldGamma a{};
    set_weights(a, scale, factors, "fold_gamma");
    const int64_t rows = all_rows(a);
    Tensor folded = matrix(gamma, rows, a.k, gamma.scalar_type());
    a.folded = folded.mutable_data_ptr();
    if (folded.numel() > 0) BOOST_RUN(fold_gamma, a, gamma, rows, a.k);
    return folded;
}

std::tuple<std::vector<Tensor>, Tensor> fold_gamma_backward(const Tensor& m, const Tensor& gamma,
                                                            at::TensorList weights) {
    std::vector<Tensor> dweights;
    for (const Tensor& w : weights) {
        dweights.push_back(
            at::empty(w.sizes(), w.options().memory_format(at::MemoryFormat::Contiguous)));
    }
    Tensor dgamma = backward("fold_gamma_backward", m, gamma, weights, dweights, false);
    return {dweights, dgamma};
}

Tensor fold_gamma_accumulate(const Tensor& m, const Tensor& gamma, at::TensorList weights,
                             at::TensorList main_grads) {
    const char* op = "fold_gamma_accumulate";
    TORCH_CHECK_VALUE(weights.size() == main_grads.size(), op, ": main_grads must be ",
                      weights.size(), " tensors as weights are, not ", main_grads.size());
    TORCH_CHECK_VALUE(!weights.empty(), op, ": weights must not be empty");
    const at::ScalarType first = main_grads[0].scalar_type();
    TORCH_CHECK_VALUE(first == gamma.scalar_type() || first == wide(gamma.scalar_type()), op,
                      ": main_grads must be of gamma's dtype or ", wide(gamma.scalar_type()),
                      ", not ", first);
    for (size_t i = 0; i < weights.size(); ++i) {
        check_shape(main_grads[i], weights[i].sizes(), op, "main_grads");
        check_dtype(main_grads[i], first, op, "main_grads");
        check_device(main_grads[i], gamma, op, "main_grads");
        TORCH_CHECK_VALUE(main_grads[i].is_contiguous(), op, ": main_grads must be contiguous");
    }
    return backward(op, m, gamma, weights, main_grads.vec(), true);
}

}  // namespace boost

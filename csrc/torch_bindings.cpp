// The operators' schemas. `torch.ops.boost` is what boost_layers/ops/csrc.py calls; fake
// implementations and autograd formulas are registered there.

#include <torch/library.h>

#include "torch/ops.h"

TORCH_LIBRARY(boost, m) {
    m.set_python_module("boost_layers.ops.registrations");
    m.def("sum_of_squares(Tensor x) -> Tensor");
    m.def("rms_stats(Tensor x, Tensor(a!)? slots, int tp_rank) -> Tensor");
    m.def(
        "residual_add_rms_stats(Tensor(a!) x, Tensor delta, Tensor(b!)? slots, int tp_rank)"
        " -> Tensor");
    m.def("read_statistics(Tensor block) -> Tensor");
    m.def("residual_gradient(Tensor dresidual, Tensor x, Tensor ds) -> Tensor");
    m.def(
        "latent_epilogue(Tensor h, Tensor? statistics, Tensor? gated, Tensor? weight, Tensor? bias,"
        " int[] ranks, str activation, str norm, int hidden_size, float eps, ScalarType dtype)"
        " -> (Tensor z, Tensor v)");
    m.def(
        "latent_epilogue_backward(Tensor dz, Tensor? dv, Tensor? h, Tensor? v, Tensor? statistics,"
        " Tensor? weight, Tensor? bias, int[] ranks, str activation, str norm, int hidden_size,"
        " float eps) -> (Tensor dh, Tensor dv, Tensor ds, Tensor dweight, Tensor dbias)");
    m.def("fold_gamma(Tensor gamma, Tensor[] weights) -> Tensor");
    m.def(
        "fold_gamma_backward(Tensor m, Tensor gamma, Tensor[] weights)"
        " -> (Tensor[] dweights, Tensor dgamma)");
    m.def(
        "fold_gamma_accumulate(Tensor m, Tensor gamma, Tensor[] weights, Tensor(a!)[] main_grads)"
        " -> Tensor dgamma");
    m.def("up_projection(Tensor z, Tensor[] weights) -> Tensor");
    m.def("up_projection_dgrad(Tensor[] dys, Tensor[] weights) -> Tensor");
    m.def("up_projection_wgrad(Tensor[] dys, Tensor z, int[] ranks) -> Tensor[]");
    m.def("up_projection_accumulate(Tensor[] dys, Tensor z, Tensor(a!)[] main_grads) -> ()");
    m.def("down_projection(Tensor x, Tensor weight, Tensor(a!) out) -> ()");
    m.def("down_projection_dgrad(Tensor dh, Tensor weight) -> Tensor");
    m.def("down_projection_add_dgrad(Tensor(a!) dx, Tensor dh, Tensor weight) -> ()");
    m.def("down_projection_wgrad(Tensor dh, Tensor x, ScalarType dtype) -> Tensor");
    m.def("down_projection_accumulate(Tensor dh, Tensor x, Tensor(a!) main_grad) -> ()");
    m.def("gated_product(Tensor gate, Tensor up, str kind) -> Tensor");
    m.def("gated_product_backward(Tensor dm, Tensor gate, Tensor up, str kind) -> Tensor");
    m.def("rotary_(Tensor(a!)[] tensors, Tensor cos, Tensor sin, bool interleaved) -> ()");
    m.def(
        "rotary_backward(Tensor[] grads, int rotated, Tensor cos, Tensor sin, bool interleaved)"
        " -> Tensor");
    m.def("rms_norm(Tensor x, Tensor gamma, float eps) -> (Tensor y, Tensor rho)");
    m.def(
        "rms_norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor rho, Tensor? dresidual)"
        " -> (Tensor dx, Tensor dgamma)");
}

namespace {

void implement(torch::Library& m) {
    m.impl("sum_of_squares", &boost::sum_of_squares);
    m.impl("rms_stats", &boost::rms_stats);
    m.impl("residual_add_rms_stats", &boost::residual_add_rms_stats);
    m.impl("read_statistics", &boost::read_statistics);
    m.impl("residual_gradient", &boost::residual_gradient);
    m.impl("latent_epilogue", &boost::latent_epilogue);
    m.impl("latent_epilogue_backward", &boost::latent_epilogue_backward);
    m.impl("fold_gamma", &boost::fold_gamma);
    m.impl("fold_gamma_backward", &boost::fold_gamma_backward);
    m.impl("fold_gamma_accumulate", &boost::fold_gamma_accumulate);
    m.impl("up_projection", &boost::up_projection);
    m.impl("up_projection_dgrad", &boost::up_projection_dgrad);
    m.impl("up_projection_wgrad", &boost::up_projection_wgrad);
    m.impl("up_projection_accumulate", &boost::up_projection_accumulate);
    m.impl("down_projection", &boost::down_projection);
    m.impl("down_projection_dgrad", &boost::down_projection_dgrad);
    m.impl("down_projection_add_dgrad", &boost::down_projection_add_dgrad);
    m.impl("down_projection_wgrad", &boost::down_projection_wgrad);
    m.impl("down_projection_accumulate", &boost::down_projection_accumulate);
    m.impl("gated_product", &boost::gated_product);
    m.impl("gated_product_backward", &boost::gated_product_backward);
    m.impl("rotary_", &boost::rotary_);
    m.impl("rotary_backward", &boost::rotary_backward);
    m.impl("rms_norm", &boost::rms_norm);
    m.impl("rms_norm_backward", &boost::rms_norm_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(boost, CPU, m) { implement(m); }
#ifdef BOOST_WITH_CUDA
TORCH_LIBRARY_IMPL(boost, CUDA, m) { implement(m); }
#endif

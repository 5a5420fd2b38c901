// The operators: what `torch.ops.boost` calls. Shapes as in common/kernels.h; the Python side
// (boost_layers/ops) documents each.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace boost {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ε of LaX's norm over a latent, as in its released configurations.
constexpr double kLatentNormEps = 1e-6;

Tensor sum_of_squares(const Tensor& x);
Tensor rms_stats(const Tensor& x, const OptionalTensor& slots, int64_t tp_rank);
Tensor residual_add_rms_stats(const Tensor& x, const Tensor& delta, const OptionalTensor& slots,
                              int64_t tp_rank);
Tensor read_statistics(const Tensor& block);
Tensor residual_gradient(const Tensor& dresidual, const Tensor& x, const Tensor& ds);

std::tuple<Tensor, Tensor> latent_epilogue(const Tensor& h, const OptionalTensor& statistics,
                                           const OptionalTensor& gated,
                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                           at::IntArrayRef ranks, std::string_view activation,
                                           std::string_view norm, int64_t hidden_size, double eps,
                                           at::ScalarType dtype);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> latent_epilogue_backward(
    const Tensor& dz, const OptionalTensor& dv, const OptionalTensor& h, const OptionalTensor& v,
    const OptionalTensor& statistics, const OptionalTensor& weight, const OptionalTensor& bias,
    at::IntArrayRef ranks, std::string_view activation, std::string_view norm, int64_t hidden_size,
    double eps);

Tensor fold_gamma(const Tensor& gamma, at::TensorList weights);
std::tuple<std::vector<Tensor>, Tensor> fold_gamma_backward(const Tensor& m, const Tensor& gamma,
                                                            at::TensorList weights);
Tensor fold_gamma_accumulate(const Tensor& m, const Tensor& gamma, at::TensorList weights,
                             at::TensorList main_grads);

Tensor up_projection(const Tensor& z, at::TensorList weights);
Tensor up_projection_dgrad(at::TensorList dys, at::TensorList weights);
std::vector<Tensor> up_projection_wgrad(at::TensorList dys, const Tensor& z, at::IntArrayRef ranks);
void up_projection_accumulate(at::TensorList dys, const Tensor& z, at::TensorList main_grads);
void down_projection(const Tensor& x, const Tensor& weight, const Tensor& out);
Tensor down_projection_dgrad(const Tensor& dh, const Tensor& weight);
void down_projection_add_dgrad(const Tensor& dx, const Tensor& dh, const Tensor& weight);
Tensor down_projection_wgrad(const Tensor& dh, const Tensor& x, at::ScalarType dtype);
void down_projection_accumulate(const Tensor& dh, const Tensor& x, const Tensor& main_grad);

Tensor gated_product(const Tensor& gate, const Tensor& up, std::string_view kind);
Tensor gated_product_backward(const Tensor& dm, const Tensor& gate, const Tensor& up,
                              std::string_view kind);
void rotary_(at::TensorList tensors, const Tensor& cos, const Tensor& sin, bool interleaved);
Tensor rotary_backward(at::TensorList grads, int64_t rotated, const Tensor& cos, const Tensor& sin,
                       bool interleaved);

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double eps);
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma,
                                             const Tensor& rho, const OptionalTensor& dresidual);

}  // namespace boost

// RMSNorm of whole tokens as operators.

#include <ATen/ops/zeros.h>

#include "arguments.h"
#include "launch.h"
#include "ops.h"

namespace boost {

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& gamma, double eps) {
    const char* op = "rms_norm";
    check_matrix(x, op, "x");
    check_shape(gamma, {x.size(1)}, op, "gamma");
    check_dtype(gamma, x.scalar_type(), op, "gamma");
    check_device(gamma, x, op, "gamma");
    const Tensor tokens = readable(x), weight = gamma.contiguous();
    Tensor y = matrix(x, x.size(0), x.size(1), x.scalar_type());
    Tensor rho = matrix(x, x.size(0), 1, wide(x.scalar_type()));
    const RmsNorm a{rows_of(tokens),
                    weight.const_data_ptr(),
                    y.mutable_data_ptr(),
                    rho.mutable_data_ptr(),
                    x.size(0),
                    x.size(1),
                    eps,
                    dtype_of(x, op, "x")};
    if (x.numel() > 0) BOOST_RUN(rms_norm, a, x, a.n, a.k);
    return {y, rho};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& gamma,
                                             const Tensor& rho, const OptionalTensor& dresidual) {
    const char* op = "rms_norm_backward";
    check_matrix(x, op, "x");
    for (const auto& [t, name] :
         {std::pair{&dy, "dy"}, std::pair{dresidual ? &*dresidual : &dy, "dresidual"}}) {
        check_shape(*t, x.sizes(), op, name);
        check_dtype(*t, x.scalar_type(), op, name);
        check_device(*t, x, op, name);
    }
    check_shape(gamma, {x.size(1)}, op, "gamma");
    check_dtype(gamma, x.scalar_type(), op, "gamma");
    check_device(gamma, x, op, "gamma");
    check_device(rho, x, op, "rho");
    check_shape(rho, {x.size(0), 1}, op, "rho");
    check_dtype(rho, wide(x.scalar_type()), op, "rho");
    const Tensor grad = readable(dy), tokens = readable(x), weight = gamma.contiguous();
    const Tensor root = rho.contiguous();
    const OptionalTensor beside =
        dresidual ? OptionalTensor(readable(*dresidual)) : OptionalTensor();
    Tensor dx = matrix(x, x.size(0), x.size(1), x.scalar_type());
    RmsNormBackward a{};
    a.dy = rows_of(grad), a.x = rows_of(tokens), a.dresidual = rows_of(beside);
    a.gamma = weight.const_data_ptr(), a.rho = root.const_data_ptr();
    a.dx = dx.mutable_data_ptr();
    a.n = x.size(0), a.k = x.size(1), a.dtype = dtype_of(x, op, "x");
    a.parts = parts_for(x, a.n);
    Tensor dgamma = at::zeros({a.parts, a.k}, x.options().dtype(wide(x.scalar_type())));
    a.dgamma = dgamma.mutable_data_ptr();
    if (x.numel() > 0) BOOST_RUN_IN_PARTS(rms_norm_backward, a, x, a.n);
    return {dx, dgamma.sum(0).to(gamma.scalar_type())};
}

}  // namespace boost

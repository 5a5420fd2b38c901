// Kernel 5 as operators: rotary embedding and the layout of heads.

#include "arguments.h"
#include "launch.h"
#include "ops.h"

namespace boost {
namespace {

Heads heads_of(const Tensor& t) {
    return {t.mutable_data_ptr(), t.size(2), t.stride(0), t.stride(1), t.stride(2)};
}

bool has_whole_heads(const Tensor& t) { return t.size(3) <= 1 || t.stride(3) == 1; }

// Everything but where the results go, for tensors that are readable already.
Rotary arguments_of(const char* op, const std::vector<Tensor>& tensors, int rotated,
                    const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
    TORCH_CHECK_VALUE(!tensors.empty() && tensors.size() <= kMaxGroups, op, ": 1 to ", kMaxGroups,
                      " tensors can be rotated, not ", tensors.size());
    const Tensor& first = tensors[0];
    Rotary a{};
    a.tensors = static_cast<int>(tensors.size());
    for (int i = 0; i < a.tensors; ++i) {
        const Tensor& t = tensors[i];
        TORCH_CHECK_VALUE(t.dim() == 4, op, ": every tensor must be [s, b, h, e], not of ", t.dim(),
                          " dimensions");
        TORCH_CHECK_VALUE(
            t.size(0) == first.size(0) && t.size(1) == first.size(1) && t.size(3) == first.size(3),
            op, ": all tensors must agree in s, b and e; they are ", first.sizes(), " and ",
            t.sizes());
        check_dtype(t, first.scalar_type(), op, "every tensor");
        check_device(t, first, op, "every tensor");
        a.in[i] = heads_of(t);
        a.rotated[i] = i < rotated;
    }
    a.s = first.size(0), a.b = first.size(1), a.e = first.size(3);
    TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(0) == a.s, op, ": cos must be [s, p] with s ", a.s,
                      ", not ", cos.sizes());
    check_shape(sin, cos.sizes(), op, "sin");
    a.p = cos.size(1);
    TORCH_CHECK_VALUE(a.p % 2 == 0 && a.p <= a.e, op, ": p of cos must be even and at most e ", a.e,
                      ", not ", a.p);
    for (const auto& [t, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
        check_dtype(*t, first.scalar_type(), op, name);
        check_device(*t, first, op, name);
    }
    a.cos = cos.const_data_ptr(), a.sin = sin.const_data_ptr();
    a.interleaved = interleaved, a.inverse = inverse;
    a.dtype = dtype_of(first, op, "every tensor");
    return a;
}

void run(const Rotary& a, const Tensor& where) {
    int64_t heads = 0;
    for (int i = 0; i < a.tensors; ++i) heads += a.in[i].heads;
    if (a.s * a.b * heads * a.e == 0) return;
    BOOST_RUN(rotary, a, where, a.s, a.b * heads * a.e);
}

}  // namespace

void rotary_(at::TensorList tensors, const Tensor& cos, const Tensor& sin, bool interleaved) {
    const char* op = "rotary_";
    const Tensor c = cos.contiguous(), s = sin.contiguous();
    Rotary a =
        arguments_of(op, tensors.vec(), static_cast<int>(tensors.size()), c, s, interleaved, false);
    for (int i = 0; i < a.tensors; ++i) {
        TORCH_CHECK_VALUE(has_whole_heads(tensors[i]), op,
                          ": the elements of a head must be next to each other");
        a.out[i] = a.in[i];
    }
    run(a, tensors[0]);
}

Tensor rotary_backward(at::TensorList grads, int64_t rotated, const Tensor& cos, const Tensor& sin,
                       bool interleaved) {
    const char* op = "rotary_backward";
    const Tensor c = cos.contiguous(), s = sin.contiguous();
    std::vector<Tensor> given;
    for (const Tensor& t : grads) {
        TORCH_CHECK_VALUE(t.dim() == 4, op, ": every tensor must be [s, b, h, e], not of ", t.dim(),
                          " dimensions");
        given.push_back(has_whole_heads(t) ? t : t.contiguous());
    }
    Rotary a = arguments_of(op, given, static_cast<int>(rotated), c, s, interleaved, true);
    int64_t elements = 0;
    for (const Tensor& t : given) elements += t.numel();
    const Tensor buffer = at::empty({elements}, given[0].options());
    int64_t start = 0;
    for (int i = 0; i < a.tensors; ++i) {
        a.out[i] = heads_of(buffer.narrow(0, start, given[i].numel()).view(given[i].sizes()));
        start += given[i].numel();
    }
    run(a, given[0]);
    return buffer;
}

}  // namespace boost

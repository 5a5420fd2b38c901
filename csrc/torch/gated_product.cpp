// Kernel 5 as operators: the gated product of the MLP.

#include "arguments.h"
#include "launch.h"
#include "ops.h"

namespace boost {
namespace {

bool swiglu(std::string_view kind, const char* op) {
    TORCH_CHECK_VALUE(kind == "swiglu" || kind == "product", op,
                      ": kind must be swiglu or product, not ", kind);
    return kind == "swiglu";
}

void check_same(const Tensor& t, const Tensor& gate, const char* op, const char* name) {
    check_shape(t, gate.sizes(), op, name);
    check_dtype(t, gate.scalar_type(), op, name);
    check_device(t, gate, op, name);
}

}  // namespace

Tensor gated_product(const Tensor& gate, const Tensor& up, std::string_view kind) {
    const char* op = "gated_product";
    check_matrix(gate, op, "gate");
    check_same(up, gate, op, "up");
    const Tensor g = readable(gate), u = readable(up);
    Tensor out = matrix(gate, gate.size(0), gate.size(1), gate.scalar_type());
    const GatedProduct a{rows_of(g),   rows_of(u),       out.mutable_data_ptr(),    gate.size(0),
                         gate.size(1), swiglu(kind, op), dtype_of(gate, op, "gate")};
    if (out.numel() > 0) BOOST_RUN(gated_product, a, gate, a.n, a.width);
    return out;
}

Tensor gated_product_backward(const Tensor& dm, const Tensor& gate, const Tensor& up,
                              std::string_view kind) {
    const char* op = "gated_product_backward";
    check_matrix(gate, op, "gate");
    check_same(up, gate, op, "up");
    check_same(dm, gate, op, "dm");
    const Tensor d = readable(dm), g = readable(gate), u = readable(up);
    Tensor both = at::empty({2, gate.size(0), gate.size(1)},
                            gate.options().memory_format(at::MemoryFormat::Contiguous));
    const GatedProductBackward a{rows_of(d),
                                 rows_of(g),
                                 rows_of(u),
                                 both[0].mutable_data_ptr(),
                                 both[1].mutable_data_ptr(),
                                 gate.size(0),
                                 gate.size(1),
                                 swiglu(kind, op),
                                 dtype_of(gate, op, "gate")};
    if (both.numel() > 0) BOOST_RUN(gated_product_backward, a, gate, a.n, a.width);
    return both;
}

}  // namespace boost

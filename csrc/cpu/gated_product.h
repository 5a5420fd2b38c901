// Kernel 5: SiLU(gate)∘up or gate∘up.

#pragma once

#include "activation.h"

namespace boost::cpu::CPU_CAPABILITY {

template <typename T>
void gated_product_of(const GatedProduct& a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const T *gate = row<T>(a.gate, i), *up = row<T>(a.up, i);
        T* out = static_cast<T*>(a.out) + i * a.width;
        for_each_vector<T>(a.width, [&](int64_t j, int64_t count) {
            Vector<T> g = widen(gate + j, count);
            if (a.swiglu) g = activate<Activation::kSilu>(g);
            narrow(out + j, g * widen(up + j, count), count);
        });
    }
}

void gated_product(const GatedProduct& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { gated_product_of<decltype(t)>(a, begin, end); });
}

template <typename T>
void gated_product_backward_of(const GatedProductBackward& a, int64_t begin, int64_t end) {
    using V = Vector<T>;
    for (int64_t i = begin; i < end; ++i) {
        const T *dout = row<T>(a.dout, i), *gate = row<T>(a.gate, i), *up = row<T>(a.up, i);
        T* dgate = static_cast<T*>(a.dgate) + i * a.width;
        T* dup = static_cast<T*>(a.dup) + i * a.width;
        for_each_vector<T>(a.width, [&](int64_t j, int64_t count) {
            const V d = widen(dout + j, count), g = widen(gate + j, count),
                    u = widen(up + j, count);
            if (a.swiglu) {
                const V s = sigmoid(g);
                narrow(dgate + j, d * u * (s * (V(1) + g * (V(1) - s))), count);
                narrow(dup + j, d * (g * s), count);
            } else {
                narrow(dgate + j, d * u, count);
                narrow(dup + j, d * g, count);
            }
        });
    }
}

void gated_product_backward(const GatedProductBackward& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { gated_product_backward_of<decltype(t)>(a, begin, end); });
}

}  // namespace boost::cpu::CPU_CAPABILITY

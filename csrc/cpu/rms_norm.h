// RMSNorm of whole tokens, for the borders and the full-rank baseline.

#pragma once

#include <cmath>

#include "lanes.h"

namespace boost::cpu::CPU_CAPABILITY {

template <typename T>
void rms_norm_of(const RmsNorm& a, int64_t begin, int64_t end) {
    using W = Wide<T>;
    const T* gamma = static_cast<const T*>(a.gamma);
    for (int64_t i = begin; i < end; ++i) {
        const T* x = row<T>(a.x, i);
        T* y = static_cast<T*>(a.y) + i * a.k;
        Vector<T> squares(0);
        for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
            const Vector<T> v = widen(x + j, count);
            squares = at::vec::fmadd(v, v, squares);
        });
        const W rho = std::sqrt(sum(squares) / static_cast<W>(a.k) + static_cast<W>(a.eps));
        static_cast<W*>(a.rho)[i] = rho;
        const Vector<T> divisor(rho);
        for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
            narrow(y + j, widen(x + j, count) / divisor * widen(gamma + j, count), count);
        });
    }
}

void rms_norm(const RmsNorm& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { rms_norm_of<decltype(t)>(a, begin, end); });
}

template <typename T>
void rms_norm_backward_of(const RmsNormBackward& a, int part, int64_t begin, int64_t end) {
    using V = Vector<T>;
    using W = Wide<T>;
    const T* gamma = static_cast<const T*>(a.gamma);
    W* dgamma = static_cast<W*>(a.dgamma) + part * a.k;
    for (int64_t i = begin; i < end; ++i) {
        const T *dy = row<T>(a.dy, i), *x = row<T>(a.x, i);
        T* dx = static_cast<T*>(a.dx) + i * a.k;
        const W rho = static_cast<const W*>(a.rho)[i];
        V dot(0);
        for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
            const V t = widen(dy + j, count) * widen(x + j, count) / V(rho);
            narrow(dgamma + j, widen(dgamma + j, count) + t, count);
            dot = at::vec::fmadd(t, widen(gamma + j, count), dot);
        });
        const V c(-sum(dot) / rho / static_cast<W>(a.k));
        const T* dresidual = a.dresidual.data == nullptr ? nullptr : row<T>(a.dresidual, i);
        for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
            const V g = widen(dy + j, count) * widen(gamma + j, count);
            V d = at::vec::fmadd(widen(x + j, count), c, g) / V(rho);
            if (dresidual != nullptr) d = d + widen(dresidual + j, count);
            narrow(dx + j, d, count);
        });
    }
}

void rms_norm_backward(const RmsNormBackward& a, int part, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { rms_norm_backward_of<decltype(t)>(a, part, begin, end); });
}

}  // namespace boost::cpu::CPU_CAPABILITY

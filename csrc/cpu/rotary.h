// Kernel 5: rotary embedding, and the change of layout between projections and attention.

#pragma once

#include <cstring>

#include "lanes.h"

namespace boost::cpu::CPU_CAPABILITY {

// Pairs (i, i + half) of one head.
template <typename T>
inline void rotate_halves(const T* in, T* out, const T* cos, const T* sin, int64_t half,
                          bool inverse) {
    using V = Vector<T>;
    const V sign(inverse ? -1 : 1);
    for_each_vector<T>(half, [&](int64_t j, int64_t count) {
        const V first = widen(in + j, count), second = widen(in + half + j, count);
        const V s1 = sign * widen(sin + j, count), s2 = sign * widen(sin + half + j, count);
        const V turned = first * widen(cos + j, count) - second * (inverse ? s2 : s1);
        const V other = second * widen(cos + half + j, count) + first * (inverse ? s1 : s2);
        narrow(out + j, turned, count);
        narrow(out + half + j, other, count);
    });
}

// Pairs (2i, 2i + 1) of one head.
template <typename T>
inline void rotate_adjacent(const T* in, T* out, const T* cos, const T* sin, int64_t p,
                            bool inverse) {
    using W = Wide<T>;
    const W sign = inverse ? -1 : 1;
    for (int64_t j = 0; j < p; j += 2) {
        const W first = in[j], second = in[j + 1];
        const W s1 = sign * W(sin[j]), s2 = sign * W(sin[j + 1]);
        out[j] = static_cast<T>(first * W(cos[j]) - second * (inverse ? s2 : s1));
        out[j + 1] = static_cast<T>(second * W(cos[j + 1]) + first * (inverse ? s1 : s2));
    }
}

template <typename T>
void rotary_of(const Rotary& a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const T* cos = static_cast<const T*>(a.cos) + i * a.p;
        const T* sin = static_cast<const T*>(a.sin) + i * a.p;
        for (int t = 0; t < a.tensors; ++t) {
            const Heads &from = a.in[t], &to = a.out[t];
            const int64_t rotated = a.rotated[t] ? a.p : 0;
            for (int64_t b = 0; b < a.b; ++b) {
                for (int64_t h = 0; h < from.heads; ++h) {
                    const T* in = static_cast<const T*>(from.data) + i * from.stride_s +
                                  b * from.stride_b + h * from.stride_h;
                    T* out = static_cast<T*>(to.data) + i * to.stride_s + b * to.stride_b +
                             h * to.stride_h;
                    if (rotated > 0 && a.interleaved) {
                        rotate_adjacent(in, out, cos, sin, rotated, a.inverse);
                    } else if (rotated > 0) {
                        rotate_halves(in, out, cos, sin, rotated / 2, a.inverse);
                    }
                    if (in != out && rotated < a.e) {
                        std::memcpy(out + rotated, in + rotated, sizeof(T) * (a.e - rotated));
                    }
                }
            }
        }
    }
}

void rotary(const Rotary& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { rotary_of<decltype(t)>(a, begin, end); });
}

}  // namespace boost::cpu::CPU_CAPABILITY

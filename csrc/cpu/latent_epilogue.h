// Kernel 2: from the reduced latents to the input of the up-projections, and back.

#pragma once

#include <cmath>
#include <vector>

#include "activation.h"
#include "statistics.h"

namespace boost::cpu::CPU_CAPABILITY {

// The mean (0 for RMS) and 1/σ of a member of a token's latents.
template <typename W>
struct Moments {
    W mean, inverse;
};

template <typename W>
Moments<W> moments(const W* v, int64_t rank, LatentNorm norm, double eps) {
    using V = at::vec::Vectorized<W>;
    V total(0);
    W mean = 0;
    if (norm == LatentNorm::kLayer) {
        for_each_vector<W>(rank,
                           [&](int64_t j, int64_t count) { total = total + widen(v + j, count); });
        mean = sum(total) / static_cast<W>(rank);
    }
    V squares(0);
    for_each_vector<W>(rank, [&](int64_t j, int64_t count) {
        // The lanes beyond the row must not count as −mean.
        const V centred = V::set(V(0), widen(v + j, count) - V(mean), count);
        squares = at::vec::fmadd(centred, centred, squares);
    });
    const W variance = sum(squares) / static_cast<W>(rank);
    return {mean, 1 / std::sqrt(variance + static_cast<W>(eps))};
}

// 1/ρ of a token; 1 without statistics.
template <typename W>
inline W inverse_rho(const Statistics& statistics, int64_t token) {
    if (statistics.block.data == nullptr) return 1;
    const W s = whole_sum<W>(statistics, token);
    return 1 /
           std::sqrt(s / static_cast<W>(statistics.hidden_size) + static_cast<W>(statistics.eps));
}

template <typename T, typename H, Activation kActivation>
void latent_epilogue_of(const LatentEpilogue& a, int64_t begin, int64_t end) {
    using W = Wide<T>;
    std::vector<W> member(a.norm == LatentNorm::kNone ? 0 : a.width);
    for (int64_t i = begin; i < end; ++i) {
        const Vector<T> inverse(inverse_rho<W>(a.statistics, i));
        int64_t column = 0;
        for (int g = 0; g < a.groups; column += a.ranks[g++]) {
            const int64_t rank = a.ranks[g];
            const H* h = row<H>(a.h, i) + column;
            T* z = static_cast<T*>(a.z) + a.n * column + i * rank;
            T* v_out = a.v == nullptr ? nullptr : static_cast<T*>(a.v) + i * a.width + column;
            const T* gated = a.gated.data == nullptr ? nullptr : row<T>(a.gated, i) + column;
            const auto value = [&](int64_t j, int64_t count) {
                Vector<T> v = widen(h + j, count) * inverse;
                if (gated != nullptr) v = v + widen(gated + j, count);
                if (v_out != nullptr) {
                    v = rounded<T>(v);
                    narrow(v_out + j, v, count);
                }
                return v;
            };
            if (a.norm == LatentNorm::kNone) {
                for_each_vector<T>(rank, [&](int64_t j, int64_t count) {
                    narrow(z + j, activate<kActivation>(value(j, count)), count);
                });
                continue;
            }
            for_each_vector<T>(rank, [&](int64_t j, int64_t count) {
                narrow(member.data() + j, value(j, count), count);
            });
            const Moments<W> of = moments(member.data(), rank, a.norm, a.norm_eps);
            const T* gamma = static_cast<const T*>(a.weight) + column;
            const T* beta = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + column;
            for_each_vector<T>(rank, [&](int64_t j, int64_t count) {
                const Vector<T> normed =
                    (widen(member.data() + j, count) - Vector<T>(of.mean)) * Vector<T>(of.inverse);
                Vector<T> y = normed * widen(gamma + j, count);
                if (beta != nullptr) y = y + widen(beta + j, count);
                narrow(z + j, activate<kActivation>(y), count);
            });
        }
    }
}

template <typename T, typename H, Activation kActivation>
void latent_epilogue_backward_of(const LatentEpilogueBackward& a, int part, int64_t begin,
                                 int64_t end) {
    using W = Wide<T>;
    using V = Vector<T>;
    const bool normed = a.norm != LatentNorm::kNone;
    std::vector<W> member(normed ? a.width : 0), gradient(normed ? a.width : 0);
    W* dweight = a.dweight == nullptr ? nullptr : static_cast<W*>(a.dweight) + part * a.width;
    W* dbias = a.dbias == nullptr ? nullptr : static_cast<W*>(a.dbias) + part * a.width;
    for (int64_t i = begin; i < end; ++i) {
        const W inverse_of_token = inverse_rho<W>(a.statistics, i);
        const V inverse(inverse_of_token);
        V dot(0);
        int64_t column = 0;
        for (int g = 0; g < a.groups; column += a.ranks[g++]) {
            const int64_t rank = a.ranks[g];
            const T* dz = static_cast<const T*>(a.dz) + a.n * column + i * rank;
            const H* h = a.h.data == nullptr ? nullptr : row<H>(a.h, i) + column;
            const T* v_in = a.v.data == nullptr ? nullptr : row<T>(a.v, i) + column;
            const T* dv_in = a.dv_in.data == nullptr ? nullptr : row<T>(a.dv_in, i) + column;
            H* dh = static_cast<H*>(a.dh) + i * a.width + column;
            T* dv_out = a.dv == nullptr ? nullptr : static_cast<T*>(a.dv) + i * a.width + column;
            const auto value = [&](int64_t j, int64_t count) {
                return v_in != nullptr ? widen(v_in + j, count) : widen(h + j, count) * inverse;
            };
            const auto finish = [&](V dv, int64_t j, int64_t count) {
                if (dv_in != nullptr) dv = dv + widen(dv_in + j, count);
                if (dv_out != nullptr) narrow(dv_out + j, dv, count);
                narrow(dh + j, dv * inverse, count);
                if (a.ds != nullptr) dot = at::vec::fmadd(dv, widen(h + j, count), dot);
            };
            if (!normed) {
                for_each_vector<T>(rank, [&](int64_t j, int64_t count) {
                    V dv = widen(dz + j, count);
                    if constexpr (kActivation != Activation::kIdentity) {
                        dv = dv * activate_slope<kActivation>(value(j, count));
                    }
                    finish(dv, j, count);
                });
                continue;
            }
            for_each_vector<T>(rank, [&](int64_t j, int64_t count) {
                narrow(member.data() + j, value(j, count), count);
            });
            const Moments<W> of = moments(member.data(), rank, a.norm, a.norm_eps);
            const T* gamma = static_cast<const T*>(a.weight) + column;
            const T* beta = a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + column;
            V along(0), total(0);
            for_each_vector<T>(rank, [&](int64_t j, int64_t count) {
                const V x = (widen(member.data() + j, count) - V(of.mean)) * V(of.inverse);
                const V weight = widen(gamma + j, count);
                V y = x * weight;
                if (beta != nullptr) y = y + widen(beta + j, count);
                const V dy = widen(dz + j, count) * activate_slope<kActivation>(y);
                narrow(dweight + column + j, widen(dweight + column + j, count) + dy * x, count);
                if (dbias != nullptr) {
                    narrow(dbias + column + j, widen(dbias + column + j, count) + dy, count);
                }
                const V g = dy * weight;
                narrow(member.data() + j, x, count);
                narrow(gradient.data() + j, g, count);
                // Lanes beyond the row: g is zero there.
                along = at::vec::fmadd(g, x, along);
                total = total + g;
            });
            const V mean_along(sum(along) / static_cast<W>(rank));
            const V mean(a.norm == LatentNorm::kLayer ? sum(total) / static_cast<W>(rank) : W(0));
            for_each_vector<T>(rank, [&](int64_t j, int64_t count) {
                const V x = widen(member.data() + j, count), g = widen(gradient.data() + j, count);
                finish((g - mean - x * mean_along) * V(of.inverse), j, count);
            });
        }
        if (a.ds != nullptr) {
            // One factor after the other: their product may be beyond W where the result is not.
            static_cast<W*>(a.ds)[i] = sum(dot) * inverse_of_token * inverse_of_token *
                                       inverse_of_token /
                                       static_cast<W>(-2.0 * a.statistics.hidden_size);
        }
    }
}

// Calls f with the types of the latents' values and of the message that they come from.
template <typename F>
inline void with_message_type(DType dtype, DType h_dtype, F&& f) {
    with_type(dtype, [&](auto t) {
        using T = decltype(t);
        if (h_dtype == dtype) return f(t, t);
        f(t, Wide<T>{});
    });
}

void latent_epilogue(const LatentEpilogue& a, int64_t begin, int64_t end) {
    with_message_type(a.dtype, a.h_dtype, [&](auto t, auto h) {
        with_activation(a.activation, [&](auto activation) {
            latent_epilogue_of<decltype(t), decltype(h), decltype(activation)::value>(a, begin,
                                                                                      end);
        });
    });
}

void latent_epilogue_backward(const LatentEpilogueBackward& a, int part, int64_t begin,
                              int64_t end) {
    with_message_type(a.dtype, a.h_dtype, [&](auto t, auto h) {
        with_activation(a.activation, [&](auto activation) {
            latent_epilogue_backward_of<decltype(t), decltype(h), decltype(activation)::value>(
                a, part, begin, end);
        });
    });
}

}  // namespace boost::cpu::CPU_CAPABILITY

// γ folded into the down-projections' weights, and its gradients.

#pragma once

#include "lanes.h"

namespace boost::cpu::CPU_CAPABILITY {

// Where a row of the grouped weight lies: in which member, at which of its rows.
inline int member_of(const int64_t* rows, int64_t* i) {
    int g = 0;
    while (*i >= rows[g]) *i -= rows[g++];
    return g;
}

template <typename T>
void fold_gamma_of(const FoldGamma& a, int64_t begin, int64_t end) {
    const T* gamma = static_cast<const T*>(a.gamma);
    for (int64_t i = begin; i < end; ++i) {
        int64_t in_member = i;
        const int g = member_of(a.rows, &in_member);
        const T* weight = static_cast<const T*>(a.weights[g]) + in_member * a.k;
        T* folded = static_cast<T*>(a.folded) + i * a.k;
        for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
            narrow(folded + j, widen(weight + j, count) * widen(gamma + j, count), count);
        });
    }
}

void fold_gamma(const FoldGamma& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { fold_gamma_of<decltype(t)>(a, begin, end); });
}

template <typename T, typename M, typename D>
void fold_gamma_backward_of(const FoldGammaBackward& a, int part, int64_t begin, int64_t end) {
    const T* gamma = static_cast<const T*>(a.gamma);
    Wide<T>* dgamma = static_cast<Wide<T>*>(a.dgamma) + part * a.k;
    for (int64_t i = begin; i < end; ++i) {
        int64_t in_member = i;
        const int g = member_of(a.rows, &in_member);
        const M* m = static_cast<const M*>(a.m) + i * a.k;
        const T* weight = static_cast<const T*>(a.weights[g]) + in_member * a.k;
        D* dweight = static_cast<D*>(a.dweights[g]) + in_member * a.k;
        for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
            const Vector<T> mj = widen(m + j, count);
            Vector<T> da = mj * widen(gamma + j, count);
            if (a.accumulate) da = da + widen(dweight + j, count);
            narrow(dweight + j, da, count);
            narrow(dgamma + j,
                   at::vec::fmadd(mj, widen(weight + j, count), widen(dgamma + j, count)), count);
        });
    }
}

void fold_gamma_backward(const FoldGammaBackward& a, int part, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) {
        using T = decltype(t);
        using W = Wide<T>;
        const bool narrow_m = a.m_dtype == a.dtype, narrow_d = a.dweight_dtype == a.dtype;
        if (narrow_m && narrow_d) return fold_gamma_backward_of<T, T, T>(a, part, begin, end);
        if (narrow_m) return fold_gamma_backward_of<T, T, W>(a, part, begin, end);
        if (narrow_d) return fold_gamma_backward_of<T, W, T>(a, part, begin, end);
        fold_gamma_backward_of<T, W, W>(a, part, begin, end);
    });
}

}  // namespace boost::cpu::CPU_CAPABILITY

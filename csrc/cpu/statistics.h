// Kernel 1: the residual's sum, Σx² per token, and the statistics' slots of an all-reduce message.

#pragma once

#include <algorithm>

#include "lanes.h"

namespace boost::cpu::CPU_CAPABILITY {

// hi + mid + lo == s, each the bf16 rounding of what is left. No compiler option may reorder this:
// the file is compiled without fast-math.
inline void write_slots(float s, c10::BFloat16* slots, int64_t columns, int tp_rank) {
    std::fill_n(slots, columns, c10::BFloat16(0.0f));
    float left = s;
    for (int column = 3 * tp_rank; column < 3 * tp_rank + 3; ++column) {
        slots[column] = c10::BFloat16(left);
        left -= static_cast<float>(slots[column]);
    }
}

template <typename T>
void rms_stats_of(const RmsStats& a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        T* x = row<T>(a.x, i);
        Vector<T> sums[2] = {Vector<T>(0), Vector<T>(0)};
        int which = 0;
        const auto add = [&](const Vector<T>& v) {
            sums[which] = at::vec::fmadd(v, v, sums[which]);
            which ^= 1;
        };
        if (a.delta.data == nullptr) {
            for_each_vector<T>(a.k, [&](int64_t j, int64_t count) { add(widen(x + j, count)); });
        } else {
            const T* delta = row<T>(a.delta, i);
            for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
                const Vector<T> moved = rounded<T>(widen(x + j, count) + widen(delta + j, count));
                narrow(x + j, moved, count);
                add(moved);
            });
        }
        const Wide<T> s = sum(sums[0] + sums[1]);
        static_cast<Wide<T>*>(a.sum)[i] = s;
        if (a.slots.data == nullptr) continue;
        if (a.slots_dtype == DType::kBFloat16) {
            write_slots(static_cast<float>(s), row<c10::BFloat16>(a.slots, i), a.columns,
                        a.tp_rank);
        } else {
            *row<Wide<T>>(a.slots, i) = s;
        }
    }
}

void rms_stats(const RmsStats& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { rms_stats_of<decltype(t)>(a, begin, end); });
}

// S of one token: from its slots, put together exactly and added up in the order of the ranks, or
// as it is.
template <typename W>
inline W whole_sum(const Statistics& statistics, int64_t token) {
    if (statistics.columns == 1) return *row<W>(statistics.block, token);
    const c10::BFloat16* slots = row<c10::BFloat16>(statistics.block, token);
    float s = 0.0f;
    for (int64_t c = 0; c < statistics.columns; c += 3) {
        const float hi = slots[c], mid = slots[c + 1], lo = slots[c + 2];
        s += (hi + mid) + lo;
    }
    return s;
}

void read_statistics(const Statistics& statistics, float* s, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) s[i] = whole_sum<float>(statistics, i);
}

template <typename T>
void residual_gradient_of(const ResidualGradient& a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const T *dresidual = row<T>(a.dresidual, i), *x = row<T>(a.x, i);
        T* dx = row<T>(a.dx, i);
        const Vector<T> twice(2 * static_cast<const Wide<T>*>(a.ds)[i]);
        for_each_vector<T>(a.k, [&](int64_t j, int64_t count) {
            narrow(dx + j, at::vec::fmadd(widen(x + j, count), twice, widen(dresidual + j, count)),
                   count);
        });
    }
}

void residual_gradient(const ResidualGradient& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto t) { residual_gradient_of<decltype(t)>(a, begin, end); });
}

}  // namespace boost::cpu::CPU_CAPABILITY

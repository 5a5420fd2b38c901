// Loads and stores of one vector of wide elements (fp32, or fp64 for fp64), whatever the dtype in
// memory. Everything here depends on the instruction set that the file is compiled for.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "../common/kernels.h"

namespace boost::cpu::CPU_CAPABILITY {

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
using Vector = at::vec::Vectorized<Wide<T>>;

template <typename T>
constexpr int64_t kLanes = Vector<T>::size();

// `count` elements from memory; the lanes beyond them are zero.
template <typename T>
inline Vector<T> widen(const T* from, int64_t count = kLanes<T>) {
    if constexpr (std::is_same_v<T, Wide<T>>) {
        return count == kLanes<T> ? Vector<T>::loadu(from) : Vector<T>::loadu(from, count);
    } else {
        Vector<T> wide;
        alignas(64) T padded[kLanes<T>] = {};
        if (count < kLanes<T>) {
            for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
            from = padded;
        }
        if constexpr (std::is_same_v<T, c10::BFloat16>) {
            at::vec::load_fp32_from_bf16(from, wide);
        } else {
            at::vec::load_fp32_from_fp16(from, wide);
        }
        return wide;
    }
}

template <typename T>
inline void narrow(T* to, const Vector<T>& wide, int64_t count = kLanes<T>) {
    if constexpr (std::is_same_v<T, Wide<T>>) {
        wide.store(to, static_cast<int>(count));
    } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
        at::vec::convert_float_bfloat16(wide, wide).store(to, static_cast<int>(count));
    } else {
        at::vec::convert_float_half(wide, wide).store(to, static_cast<int>(count));
    }
}

// What `narrow` and `widen` make of the value: rounded to T.
template <typename T>
inline Vector<T> rounded(const Vector<T>& wide) {
    if constexpr (std::is_same_v<T, Wide<T>>) {
        return wide;
    } else {
        alignas(64) T memory[2 * kLanes<T>];
        narrow(memory, wide);
        return widen(memory);
    }
}

template <typename V>
inline auto sum(const V& v) {
    using Element = typename V::value_type;
    return at::vec::vec_reduce_all<Element>([](V a, V b) { return a + b; }, v);
}

// Calls f(i, count) for every vector of a row of `width` elements.
template <typename T, typename F>
inline void for_each_vector(int64_t width, F&& f) {
    int64_t i = 0;
    for (; i + kLanes<T> <= width; i += kLanes<T>) f(i, kLanes<T>);
    if (i < width) f(i, width - i);
}

template <typename T>
inline T* row(const Rows& rows, int64_t i) {
    return static_cast<T*>(rows.data) + i * rows.stride;
}

// Calls f with a value of the type that `dtype` names.
template <typename F>
inline void with_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::kFloat:
            return f(float{});
        case DType::kDouble:
            return f(double{});
        case DType::kBFloat16:
            return f(c10::BFloat16{});
        case DType::kHalf:
            return f(c10::Half{});
    }
}

}  // namespace boost::cpu::CPU_CAPABILITY

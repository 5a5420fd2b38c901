// φ and φ′ on vectors. SiLU is x·σ(x); GELU is the exact one, by erfc, which does not cancel where
// x is far below zero.

#pragma once

#include "lanes.h"

namespace boost::cpu::CPU_CAPABILITY {

template <typename V>
inline V sigmoid(const V& x) {
    return V(1) / (V(1) + x.neg().exp());
}

template <Activation activation, typename V>
inline V activate(const V& x) {
    if constexpr (activation == Activation::kSilu) return x / (V(1) + x.neg().exp());
    if constexpr (activation == Activation::kGelu) {
        return x * V(0.5) * (x * V(-0.70710678118654752440)).erfc();
    }
    return x;
}

template <Activation activation, typename V>
inline V activate_slope(const V& x) {
    if constexpr (activation == Activation::kSilu) {
        const V s = sigmoid(x);
        return s * (V(1) + x * (V(1) - s));
    }
    if constexpr (activation == Activation::kGelu) {
        const V cumulative = V(0.5) * (x * V(-0.70710678118654752440)).erfc();
        return cumulative + x * (x * x * V(-0.5)).exp() * V(0.39894228040143267794);
    }
    return V(1);
}

template <Activation activation>
struct ActivationConstant {
    static constexpr Activation value = activation;
};

// Calls f with the activation as a constant of its type.
template <typename F>
inline void with_activation(Activation activation, F&& f) {
    switch (activation) {
        case Activation::kIdentity:
            return f(ActivationConstant<Activation::kIdentity>{});
        case Activation::kSilu:
            return f(ActivationConstant<Activation::kSilu>{});
        case Activation::kGelu:
            return f(ActivationConstant<Activation::kGelu>{});
    }
}

}  // namespace boost::cpu::CPU_CAPABILITY

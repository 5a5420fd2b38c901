// Kernel 5, second half: rotary embedding of q, k and v with the change of their layout.

#include "common.cuh"
#include "kernels.h"

namespace boost::cuda {
namespace {

// A unit is what one thread turns at a time: two vectors that hold N pairs, or beyond the rotated
// elements one vector. With pairs (i, i + p/2) the two lie p/2 apart, with interleaved pairs side
// by side. All of a unit is read before it is written, so in and out may be the same memory.
template <typename T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads) rotary_kernel(const Rotary a, int heads) {
    using W = Wide<T>;
    const int64_t token = int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
    if (token >= a.s * a.b) return;
    const int64_t s = token / a.b, b = token % a.b;
    const int pairs = static_cast<int>(a.p / (2 * N));
    const int units = pairs + static_cast<int>((a.e - a.p) / N);
    const T* cos_row = static_cast<const T*>(a.cos) + s * a.p;
    const T* sin_row = static_cast<const T*>(a.sin) + s * a.p;

    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        const bool paired = unit < pairs;
        const int first = (!paired ? unit + pairs : kInterleaved ? 2 * unit : unit) * N;
        const int second = first + (kInterleaved ? 1 : pairs) * N;
        Pack<T, N> cosines[2], sines[2];
        if (paired) {
            cosines[0] = load_constant<N>(cos_row + first);
            cosines[1] = load_constant<N>(cos_row + second);
            sines[0] = load_constant<N>(sin_row + first);
            sines[1] = load_constant<N>(sin_row + second);
        }
        for (int index = threadIdx.y; index < heads; index += blockDim.y) {
            int tensor = 0;
            int64_t head = index;
            while (head >= a.in[tensor].heads) head -= a.in[tensor++].heads;
            const Heads &in = a.in[tensor], &out = a.out[tensor];
            const T* from = static_cast<const T*>(in.data) + s * in.stride_s + b * in.stride_b +
                            head * in.stride_h;
            T* to = static_cast<T*>(out.data) + s * out.stride_s + b * out.stride_b +
                    head * out.stride_h;
            Pack<T, N> values[2];
            values[0] = load<N>(from + first);
            if (paired) values[1] = load<N>(from + second);
            if (paired && a.rotated[tensor]) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    // Of the 2·N elements of both vectors, one after the other.
                    const int left = kInterleaved ? 2 * i : i;
                    const int right = kInterleaved ? 2 * i + 1 : i + N;
                    T& x = values[left / N].values[left % N];
                    T& y = values[right / N].values[right % N];
                    const W cos_x = widen(cosines[left / N].values[left % N]);
                    const W cos_y = widen(cosines[right / N].values[right % N]);
                    W sin_x = widen(sines[left / N].values[left % N]);
                    W sin_y = widen(sines[right / N].values[right % N]);
                    if (a.inverse) {
                        const W kept = sin_x;
                        sin_x = -sin_y;
                        sin_y = -kept;
                    }
                    const W turned = widen(x) * cos_x - widen(y) * sin_x;
                    y = narrow<T>(widen(y) * cos_y + widen(x) * sin_y);
                    x = narrow<T>(turned);
                }
            }
            store<N>(to + first, values[0]);
            if (paired) store<N>(to + second, values[1]);
        }
    }
}

template <typename T, int N>
bool heads_vectorize(const Rotary& a, const Heads& heads) {
    return vectorizes<T, N>(heads.data) && (a.s <= 1 || heads.stride_s % N == 0) &&
           (a.b <= 1 || heads.stride_b % N == 0) && (heads.heads <= 1 || heads.stride_h % N == 0);
}

template <typename T, int N>
void launch_rotary(const Rotary& a, cudaStream_t stream) {
    int heads = 0;
    for (int i = 0; i < a.tensors; ++i) heads += static_cast<int>(a.in[i].heads);
    if (heads == 0) return;
    constexpr int kThreads = 256;
    const int units = static_cast<int>(a.p / (2 * N) + (a.e - a.p) / N);
    const int along = std::min(units, kThreads);
    // As many heads at a time as fit, evenly, and several tokens if those are few.
    const int at_once = std::min(heads, kThreads / along);
    const int rounds = (heads + at_once - 1) / at_once;
    const int across = (heads + rounds - 1) / rounds;
    const int tokens = std::min(64, std::max(1, kThreads / (along * across)));
    const dim3 block(along, across, tokens);
    const auto kernel = a.interleaved ? rotary_kernel<T, N, true> : rotary_kernel<T, N, false>;
    launch("rotary", kernel, grid_for(a.s * a.b, tokens), block, 0, stream, a, heads);
}

}  // namespace

void rotary(const Rotary& a, cudaStream_t stream) {
    if (a.s == 0 || a.b == 0 || a.e == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        bool wide = a.e % N == 0 && a.p % (2 * N) == 0 && vectorizes<T, N>(a.cos) &&
                    vectorizes<T, N>(a.sin);
        for (int i = 0; i < a.tensors; ++i) {
            wide = wide && heads_vectorize<T, N>(a, a.in[i]) && heads_vectorize<T, N>(a, a.out[i]);
        }
        if (wide) {
            launch_rotary<T, N>(a, stream);
        } else {
            launch_rotary<T, 1>(a, stream);
        }
    });
}

}  // namespace boost::cuda

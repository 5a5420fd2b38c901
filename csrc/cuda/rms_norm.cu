// RMSNorm of whole tokens and its gradients, for the borders and the full-rank baseline.

#include "common.cuh"
#include "kernels.h"

namespace boost::cuda {
namespace {

// Vectors of a thread that stay in registers between the two looks at a row; longer rows read the
// rest again.
constexpr int kKept = 4;
constexpr int kKeptBackward = 2;

template <int N, typename T>
__device__ inline Wide<T> squares(const Pack<T, N>& pack) {
    Wide<T> values[N], sum = 0;
    widen(pack, values);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += values[i] * values[i];
    return sum;
}

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_kernel(const RmsNorm a) {
    using W = Wide<T>;
    __shared__ W scratch[kMaxWarps];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool live = row < a.n;
    const int vectors = live ? static_cast<int>(a.k / N) : 0;
    const T* x = at<const T>(a.x, row);
    T* y = static_cast<T*>(a.y) + row * a.k;
    const T* gamma = static_cast<const T*>(a.gamma);
    const int step = blockDim.x, beyond = threadIdx.x + kKept * step;

    Pack<T, N> kept[kKept];
    W sum = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int vector = threadIdx.x + i * step;
        if (vector < vectors) kept[i] = load<N>(x + int64_t{vector} * N);
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int vector = threadIdx.x + i * step;
        if (vector < vectors) sum += squares(kept[i]);
    }
    for (int vector = beyond; vector < vectors; vector += step) {
        sum += squares(load<N>(x + int64_t{vector} * N));
    }
    sum = row_sum(sum, scratch);
    const W rho = root(sum / W(a.k) + W(a.eps));
    const W inverse = W(1) / rho;
    if (live && threadIdx.x == 0) static_cast<W*>(a.rho)[row] = rho;

    const auto scale = [&](int vector, const Pack<T, N>& pack) {
        W values[N], factors[N];
        widen(pack, values);
        read<N>(gamma + int64_t{vector} * N, factors);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = factors[i] * (values[i] * inverse);
        write<N>(y + int64_t{vector} * N, values);
    };
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        const int vector = threadIdx.x + i * step;
        if (vector < vectors) scale(vector, kept[i]);
    }
    for (int vector = beyond; vector < vectors; vector += step) {
        scale(vector, load<N>(x + int64_t{vector} * N));
    }
}

// A block goes through the rows of its part, one at a time for each threadIdx.y.
template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads, 2)
    rms_norm_backward_kernel(const RmsNormBackward a, bool sums_shared) {
    using W = Wide<T>;
    __shared__ W scratch[kMaxWarps];
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int all_vectors = static_cast<int>(a.k / N);
    const T* gamma = static_cast<const T*>(a.gamma);
    const int step = blockDim.x, beyond = threadIdx.x + kKeptBackward * step;

    W* output = static_cast<W*>(a.dgamma);
    if (output != nullptr) output += blockIdx.x * a.k;
    ColumnSums<W, N> dgamma(output, sums_shared ? reinterpret_cast<W*>(shared_bytes) : nullptr,
                            static_cast<int>(a.k));
    for (int vector = threadIdx.x; vector < all_vectors; vector += step) dgamma.clear(vector);

    for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < a.n;
         first += int64_t{gridDim.x} * blockDim.y) {
        // A row beyond the last has no vectors, but takes part in the sums.
        const bool live = first + threadIdx.y < a.n;
        const int64_t row = live ? first + threadIdx.y : first;
        const int vectors = live ? all_vectors : 0;
        const T* dy_row = at<const T>(a.dy, row);
        const T* x_row = at<const T>(a.x, row);
        const W inverse = W(1) / static_cast<const W*>(a.rho)[row];
        Pack<T, N> kept_dy[kKeptBackward], kept_x[kKeptBackward];
        W dot = 0;

        const auto look = [&](int vector, const Pack<T, N>& dy_pack, const Pack<T, N>& x_pack) {
            W dy[N], x[N], factors[N], shares[N];
            widen(dy_pack, dy);
            widen(x_pack, x);
            read<N>(gamma + int64_t{vector} * N, factors);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                dot += dy[i] * factors[i] * x[i];
                shares[i] = dy[i] * (x[i] * inverse);
            }
            dgamma.add(vector, shares);
        };
#pragma unroll
        for (int i = 0; i < kKeptBackward; ++i) {
            const int vector = threadIdx.x + i * step;
            if (vector >= vectors) continue;
            kept_dy[i] = load<N>(dy_row + int64_t{vector} * N);
            kept_x[i] = load<N>(x_row + int64_t{vector} * N);
        }
#pragma unroll
        for (int i = 0; i < kKeptBackward; ++i) {
            const int vector = threadIdx.x + i * step;
            if (vector < vectors) look(vector, kept_dy[i], kept_x[i]);
        }
        for (int vector = beyond; vector < vectors; vector += step) {
            look(vector, load<N>(dy_row + int64_t{vector} * N),
                 load<N>(x_row + int64_t{vector} * N));
        }
        dot = row_sum(dot, scratch);
        const W shrink = dot * inverse * inverse / W(a.k);

        const auto finish = [&](int vector, const Pack<T, N>& dy_pack, const Pack<T, N>& x_pack) {
            W dy[N], x[N], factors[N], gradient[N] = {};
            widen(dy_pack, dy);
            widen(x_pack, x);
            read<N>(gamma + int64_t{vector} * N, factors);
            if (a.dresidual.data != nullptr) {
                read_mutable<N>(at<const T>(a.dresidual, row) + int64_t{vector} * N, gradient);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) {
                gradient[i] += (dy[i] * factors[i] - x[i] * shrink) * inverse;
            }
            write<N>(static_cast<T*>(a.dx) + row * a.k + int64_t{vector} * N, gradient);
        };
#pragma unroll
        for (int i = 0; i < kKeptBackward; ++i) {
            const int vector = threadIdx.x + i * step;
            if (vector < vectors) finish(vector, kept_dy[i], kept_x[i]);
        }
        for (int vector = beyond; vector < vectors; vector += step) {
            finish(vector, load<N>(dy_row + int64_t{vector} * N),
                   load<N>(x_row + int64_t{vector} * N));
        }
    }
    __syncthreads();
    if (threadIdx.y > 0) return;
    for (int vector = threadIdx.x; vector < all_vectors; vector += step) dgamma.finish(vector);
}

template <typename T, int N>
void launch_rms_norm(const RmsNorm& a, cudaStream_t stream) {
    const dim3 block = block_for(a.k / N, 2);
    launch("rms_norm", rms_norm_kernel<T, N>, grid_for(a.n, block.y), block, 0, stream, a);
}

template <typename T, int N>
void launch_rms_norm_backward(const RmsNormBackward& a, cudaStream_t stream) {
    const bool sums = a.dgamma != nullptr;
    const SumsShape shape = shape_for_sums(a.k / N, sums ? a.k * sizeof(Wide<T>) : 0);
    const unsigned blocks = sums ? static_cast<unsigned>(a.parts) : grid_for(a.n, shape.block.y);
    launch("rms_norm_backward", rms_norm_backward_kernel<T, N>, blocks, shape.block, shape.shared,
           stream, a, shape.shared > 0);
}

}  // namespace

// Two blocks on every multiprocessor, with some rows each.
int parts_for(int64_t rows) {
    constexpr int64_t kRows = 4;
    const int64_t most = 2 * int64_t{device_attribute(cudaDevAttrMultiProcessorCount)};
    return static_cast<int>(std::min((rows + kRows - 1) / kRows, most));
}

void rms_norm(const RmsNorm& a, cudaStream_t stream) {
    if (a.n == 0 || a.k == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        if (a.k % N == 0 && vectorizes<T, N>(a.x, a.n) && vectorizes<T, N>(a.y) &&
            vectorizes<T, N>(a.gamma)) {
            launch_rms_norm<T, N>(a, stream);
        } else {
            launch_rms_norm<T, 1>(a, stream);
        }
    });
}

void rms_norm_backward(const RmsNormBackward& a, cudaStream_t stream) {
    if (a.n == 0 || a.k == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        if (a.k % N == 0 && vectorizes<T, N>(a.dy, a.n) && vectorizes<T, N>(a.x, a.n) &&
            vectorizes<T, N>(a.dresidual, a.n) && vectorizes<T, N>(a.dx) &&
            vectorizes<T, N>(a.gamma) && vectorizes<Wide<T>, kVector<Wide<T>>>(a.dgamma)) {
            launch_rms_norm_backward<T, N>(a, stream);
        } else {
            launch_rms_norm_backward<T, 1>(a, stream);
        }
    });
}

}  // namespace boost::cuda

// Kernel 1: the residual's sum, Σ x² per token and the statistics' slots; and their gradient.

#include "common.cuh"
#include "kernels.h"

namespace boost::cuda {
namespace {

// Vectors of a thread that are read before any is written back, since x is changed in place and the
// compiler has to keep that order.
constexpr int kBatch = 4;

// What the slots before leave of S. The difference is exact, and the intrinsic keeps it so whatever
// the compiler's flags.
__device__ inline float left_of(float sum, __nv_bfloat16 part) {
    return __fsub_rn(sum, widen(part));
}

template <typename W>
__device__ void write_slots(const RmsStats& a, int64_t row, W sum) {
    if (a.slots_dtype != DType::kBFloat16) {
        if (threadIdx.x == 0) *at<W>(a.slots, row) = sum;
        return;
    }
    const float whole = static_cast<float>(sum);
    const __nv_bfloat16 hi = __float2bfloat16_rn(whole);
    const float after_hi = left_of(whole, hi);
    const __nv_bfloat16 mid = __float2bfloat16_rn(after_hi);
    const __nv_bfloat16 lo = __float2bfloat16_rn(left_of(after_hi, mid));
    auto* slots = at<__nv_bfloat16>(a.slots, row);
    const int first = 3 * a.tp_rank, columns = static_cast<int>(a.columns);
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        __nv_bfloat16 slot = __float2bfloat16_rn(0.0f);
        if (column == first) slot = hi;
        if (column == first + 1) slot = mid;
        if (column == first + 2) slot = lo;
        slots[column] = slot;
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads) rms_stats_kernel(const RmsStats a) {
    using W = Wide<T>;
    __shared__ W scratch[kMaxWarps];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool live = row < a.n;
    const int vectors = live ? static_cast<int>(a.k / N) : 0;
    T* x = at<T>(a.x, row);
    const T* delta = at<const T>(a.delta, row);
    const bool adds = a.delta.data != nullptr;
    const int step = blockDim.x;

    W sum = 0;
    for (int first = threadIdx.x; first < vectors; first += kBatch * step) {
        Pack<T, N> xs[kBatch], deltas[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int vector = first + i * step;
            if (vector >= vectors) continue;
            xs[i] = load<N>(static_cast<const T*>(x) + int64_t{vector} * N);
            if (adds) deltas[i] = load_constant<N>(delta + int64_t{vector} * N);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int vector = first + i * step;
            if (vector >= vectors) continue;
            W values[N];
            if (adds) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const W added = widen(xs[i].values[j]) + widen(deltas[i].values[j]);
                    xs[i].values[j] = narrow<T>(added);
                }
                store<N>(x + int64_t{vector} * N, xs[i]);
            }
            widen(xs[i], values);
#pragma unroll
            for (int j = 0; j < N; ++j) sum += values[j] * values[j];
        }
    }
    sum = row_sum(sum, scratch);
    if (!live) return;
    if (threadIdx.x == 0) static_cast<W*>(a.sum)[row] = sum;
    if (a.slots.data != nullptr) write_slots(a, row, sum);
}

// A warp for each row.
__global__ void __launch_bounds__(kMaxThreads)
    read_statistics_kernel(const Statistics statistics, float* sums, int64_t n) {
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= n) return;
    const float sum = statistic<float>(statistics, row);
    if (threadIdx.x == 0) sums[row] = sum;
}

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads) residual_gradient_kernel(const ResidualGradient a) {
    using W = Wide<T>;
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= a.n) return;
    const int64_t vectors = a.k / N, step = int64_t{gridDim.y} * blockDim.x;
    const W scale = W(2) * static_cast<const W*>(a.ds)[row];
    for (int64_t vector = int64_t{blockIdx.y} * blockDim.x + threadIdx.x; vector < vectors;
         vector += step) {
        W x[N], gradient[N];
        read<N>(at<const T>(a.x, row) + vector * N, x);
        read_mutable<N>(at<const T>(a.dresidual, row) + vector * N, gradient);
#pragma unroll
        for (int i = 0; i < N; ++i) gradient[i] += scale * x[i];
        write<N>(at<T>(a.dx, row) + vector * N, gradient);
    }
}

template <typename T, int N>
void launch_rms_stats(const RmsStats& a, cudaStream_t stream) {
    const dim3 block = block_for(a.k / N, kBatch);
    launch("rms_stats", rms_stats_kernel<T, N>, grid_for(a.n, block.y), block, 0, stream, a);
}

template <typename T, int N>
void launch_residual_gradient(const ResidualGradient& a, cudaStream_t stream) {
    constexpr int kPerThread = 2;
    const dim3 block = block_for(a.k / N, kPerThread, 256);
    launch("residual_gradient", residual_gradient_kernel<T, N>,
           grid_for_pieces(a.n, a.k / N, block, kPerThread), block, 0, stream, a);
}

}  // namespace

void rms_stats(const RmsStats& a, cudaStream_t stream) {
    if (a.n == 0 || a.k == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        if (a.k % N == 0 && vectorizes<T, N>(a.x, a.n) && vectorizes<T, N>(a.delta, a.n)) {
            launch_rms_stats<T, N>(a, stream);
        } else {
            launch_rms_stats<T, 1>(a, stream);
        }
    });
}

void read_statistics(const Statistics& statistics, float* sum, int64_t n, cudaStream_t stream) {
    if (n == 0) return;
    constexpr int kRows = 4;
    launch("read_statistics", read_statistics_kernel, grid_for(n, kRows), dim3(kWarp, kRows), 0,
           stream, statistics, sum, n);
}

void residual_gradient(const ResidualGradient& a, cudaStream_t stream) {
    if (a.n == 0 || a.k == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        if (a.k % N == 0 && vectorizes<T, N>(a.dresidual, a.n) && vectorizes<T, N>(a.x, a.n) &&
            vectorizes<T, N>(a.dx, a.n)) {
            launch_residual_gradient<T, N>(a, stream);
        } else {
            launch_residual_gradient<T, 1>(a, stream);
        }
    });
}

}  // namespace boost::cuda

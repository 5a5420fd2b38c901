// γ folded into grouped down-projections, and the gradients of both.

#include "common.cuh"
#include "kernels.h"

namespace boost::cuda {
namespace {

constexpr int kPerThread = 2;
constexpr int kBackwardThreads = 128;
// Rows that a thread of the backward reads before it uses them.
constexpr int kBatch = 4;

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    fold_gamma_kernel(const __grid_constant__ FoldGamma a, int64_t rows) {
    using W = Wide<T>;
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    int member = 0;
    int64_t inner = row;
    while (inner >= a.rows[member]) inner -= a.rows[member++];
    const T* weight = static_cast<const T*>(a.weights[member]) + inner * a.k;
    const T* gamma = static_cast<const T*>(a.gamma);
    T* folded = static_cast<T*>(a.folded) + row * a.k;
    const int64_t vectors = a.k / N, step = int64_t{gridDim.y} * blockDim.x;
    for (int64_t vector = int64_t{blockIdx.y} * blockDim.x + threadIdx.x; vector < vectors;
         vector += step) {
        W values[N], factors[N];
        read<N>(weight + vector * N, values);
        read<N>(gamma + vector * N, factors);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] *= factors[i];
        write<N>(folded + vector * N, values);
    }
}

// A thread goes down one vector of columns, through the rows of its part.
template <typename M, typename T, typename D, int N>
__global__ void __launch_bounds__(kBackwardThreads)
    fold_gamma_backward_kernel(const __grid_constant__ FoldGammaBackward a, int64_t rows) {
    using W = Wide<T>;
    const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
    if (column >= a.k) return;
    const int64_t each = (rows + a.parts - 1) / a.parts;
    const int64_t first = blockIdx.y * each, last = min(rows, first + each);

    W gamma[N], sums[N] = {};
    read<N>(static_cast<const T*>(a.gamma) + column, gamma);
    int64_t start = 0;
    for (int member = 0; member < a.groups; start += a.rows[member++]) {
        const T* weight = static_cast<const T*>(a.weights[member]) + column;
        D* dweight = static_cast<D*>(a.dweights[member]) + column;
        const M* m = static_cast<const M*>(a.m) + start * a.k + column;
        const int64_t end = min(last - start, a.rows[member]);
        for (int64_t row = first > start ? first - start : 0; row < end; row += kBatch) {
            Pack<M, N> ms[kBatch];
            Pack<T, N> weights[kBatch];
            Pack<D, N> before[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (row + i >= end) continue;
                const int64_t offset = (row + i) * a.k;
                ms[i] = load_constant<N>(m + offset);
                weights[i] = load_constant<N>(weight + offset);
                if (a.accumulate) before[i] = load<N>(static_cast<const D*>(dweight) + offset);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (row + i >= end) continue;
                W product[N], factors[N], gradient[N] = {};
                widen(ms[i], product);
                widen(weights[i], factors);
                if (a.accumulate) widen(before[i], gradient);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    sums[j] += product[j] * factors[j];
                    gradient[j] += product[j] * gamma[j];
                }
                write<N>(dweight + (row + i) * a.k, gradient);
            }
        }
    }
    write_chunks(static_cast<W*>(a.dgamma) + blockIdx.y * a.k + column, kChunkOf<W, N>, sums);
}

template <typename T, int N>
void launch_fold_gamma(const FoldGamma& a, int64_t rows, cudaStream_t stream) {
    const dim3 block = block_for(a.k / N, kPerThread, 256);
    launch("fold_gamma", fold_gamma_kernel<T, N>, grid_for_pieces(rows, a.k / N, block, kPerThread),
           block, 0, stream, a, rows);
}

template <typename M, typename T, typename D, int N>
void launch_fold_gamma_backward(const FoldGammaBackward& a, int64_t rows, cudaStream_t stream) {
    const unsigned threads = block_for(a.k / N, 1, kBackwardThreads).x;
    const dim3 grid(grid_for(a.k / N, threads), static_cast<unsigned>(a.parts));
    launch("fold_gamma_backward", fold_gamma_backward_kernel<M, T, D, N>, grid, threads, 0, stream,
           a, rows);
}

template <typename M, typename T, typename D>
void fold_gamma_backward_of(const FoldGammaBackward& a, int64_t rows, cudaStream_t stream) {
    constexpr int N = kVector<M, T, D>;
    bool wide = a.k % N == 0 && vectorizes<M, N>(a.m) && vectorizes<T, N>(a.gamma) &&
                vectorizes<Wide<T>, kVector<Wide<T>>>(a.dgamma);
    for (int i = 0; i < a.groups; ++i) {
        wide = wide && vectorizes<T, N>(a.weights[i]) && vectorizes<D, N>(a.dweights[i]);
    }
    if (wide) {
        launch_fold_gamma_backward<M, T, D, N>(a, rows, stream);
    } else {
        launch_fold_gamma_backward<M, T, D, 1>(a, rows, stream);
    }
}

template <typename Arguments>
int64_t all_rows(const Arguments& a) {
    int64_t rows = 0;
    for (int i = 0; i < a.groups; ++i) rows += a.rows[i];
    return rows;
}

}  // namespace

void fold_gamma(const FoldGamma& a, cudaStream_t stream) {
    const int64_t rows = all_rows(a);
    if (rows == 0 || a.k == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        bool wide = a.k % N == 0 && vectorizes<T, N>(a.gamma) && vectorizes<T, N>(a.folded);
        for (int i = 0; i < a.groups; ++i) wide = wide && vectorizes<T, N>(a.weights[i]);
        if (wide) {
            launch_fold_gamma<T, N>(a, rows, stream);
        } else {
            launch_fold_gamma<T, 1>(a, rows, stream);
        }
    });
}

void fold_gamma_backward(const FoldGammaBackward& a, cudaStream_t stream) {
    const int64_t rows = all_rows(a);
    if (rows == 0 || a.k == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        using W = Wide<T>;
        const DType wide = a.dtype == DType::kDouble ? DType::kDouble : DType::kFloat;
        const bool narrow_m = a.m_dtype == a.dtype, narrow_d = a.dweight_dtype == a.dtype;
        if ((!narrow_m && a.m_dtype != wide) || (!narrow_d && a.dweight_dtype != wide)) {
            throw std::invalid_argument(
                "fold_gamma_backward: m and dweights must be of the weights' dtype or its wide "
                "one");
        }
        if (narrow_m && narrow_d) return fold_gamma_backward_of<T, T, T>(a, rows, stream);
        if (narrow_m) return fold_gamma_backward_of<T, T, W>(a, rows, stream);
        if (narrow_d) return fold_gamma_backward_of<W, T, T>(a, rows, stream);
        fold_gamma_backward_of<W, T, W>(a, rows, stream);
    });
}

}  // namespace boost::cuda

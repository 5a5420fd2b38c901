// Kernel 5, first half: SiLU(gate)∘up or gate∘up, and its gradients.

#include "common.cuh"
#include "kernels.h"

namespace boost::cuda {
namespace {

constexpr int kPerThread = 2;

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads) gated_product_kernel(const GatedProduct a) {
    using W = Wide<T>;
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= a.n) return;
    const int64_t vectors = a.width / N, step = int64_t{gridDim.y} * blockDim.x;
    for (int64_t vector = int64_t{blockIdx.y} * blockDim.x + threadIdx.x; vector < vectors;
         vector += step) {
        W gate[N], up[N];
        read<N>(at<const T>(a.gate, row) + vector * N, gate);
        read<N>(at<const T>(a.up, row) + vector * N, up);
#pragma unroll
        for (int i = 0; i < N; ++i) up[i] *= a.swiglu ? silu(gate[i]) : gate[i];
        write<N>(static_cast<T*>(a.out) + row * a.width + vector * N, up);
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    gated_product_backward_kernel(const GatedProductBackward a) {
    using W = Wide<T>;
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (row >= a.n) return;
    const int64_t vectors = a.width / N, step = int64_t{gridDim.y} * blockDim.x;
    for (int64_t vector = int64_t{blockIdx.y} * blockDim.x + threadIdx.x; vector < vectors;
         vector += step) {
        W dout[N], gate[N], up[N];
        read<N>(at<const T>(a.dout, row) + vector * N, dout);
        read<N>(at<const T>(a.gate, row) + vector * N, gate);
        read<N>(at<const T>(a.up, row) + vector * N, up);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            W opened = gate[i], opening = W(1);
            if (a.swiglu) {
                const W share = sigmoid(gate[i]);
                opened = gate[i] * share;
                opening = silu_slope(gate[i], share);
            }
            up[i] *= dout[i] * opening;
            gate[i] = dout[i] * opened;
        }
        const int64_t offset = row * a.width + vector * N;
        write<N>(static_cast<T*>(a.dgate) + offset, up);
        write<N>(static_cast<T*>(a.dup) + offset, gate);
    }
}

template <typename Arguments>
void launch_rows(const char* name, void (*kernel)(Arguments), const Arguments& a, int vector,
                 cudaStream_t stream) {
    const int64_t vectors = a.width / vector;
    const dim3 block = block_for(vectors, kPerThread, 256);
    launch(name, kernel, grid_for_pieces(a.n, vectors, block, kPerThread), block, 0, stream, a);
}

}  // namespace

void gated_product(const GatedProduct& a, cudaStream_t stream) {
    if (a.n == 0 || a.width == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        if (a.width % N == 0 && vectorizes<T, N>(a.gate, a.n) && vectorizes<T, N>(a.up, a.n) &&
            vectorizes<T, N>(a.out)) {
            launch_rows("gated_product", gated_product_kernel<T, N>, a, N, stream);
        } else {
            launch_rows("gated_product", gated_product_kernel<T, 1>, a, 1, stream);
        }
    });
}

void gated_product_backward(const GatedProductBackward& a, cudaStream_t stream) {
    if (a.n == 0 || a.width == 0) return;
    dispatch(a.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int N = kVector<T>;
        if (a.width % N == 0 && vectorizes<T, N>(a.dout, a.n) && vectorizes<T, N>(a.gate, a.n) &&
            vectorizes<T, N>(a.up, a.n) && vectorizes<T, N>(a.dgate) && vectorizes<T, N>(a.dup)) {
            launch_rows("gated_product_backward", gated_product_backward_kernel<T, N>, a, N,
                        stream);
        } else {
            launch_rows("gated_product_backward", gated_product_backward_kernel<T, 1>, a, 1,
                        stream);
        }
    });
}

}  // namespace boost::cuda

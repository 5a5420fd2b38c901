// What the kernels share: conversions, vectors of 16 bytes, sums over rows and over columns,
// activations, ρ from its statistics, and on the host dispatch by dtype and launches.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../common/kernels.h"

namespace boost::cuda {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

// The dtype of arithmetic.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }

template <typename T>
__device__ inline T narrow(Wide<T> value) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(value);
    } else if constexpr (std::is_same_v<T, __half>) {
        return __float2half_rn(value);
    } else {
        return value;
    }
}

// N neighbours that move in one access. N is such that the widest dtype of a kernel fills 16 bytes:
// narrower ones then still cover whole sectors, which two accesses of half a sector each would not.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T values[N];
};

template <typename... Ts>
constexpr int kVector = 16 / static_cast<int>(std::max({sizeof(Ts)...}));

template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
    using type = unsigned short;
};
template <>
struct WordOf<4> {
    using type = unsigned int;
};
template <>
struct WordOf<8> {
    using type = uint2;
};
template <>
struct WordOf<16> {
    using type = uint4;
};
template <typename T, int N>
using Word = typename WordOf<sizeof(T) * N>::type;

template <int N, typename T>
__device__ inline Pack<T, N> load(const T* from) {
    const auto word = *reinterpret_cast<const Word<T, N>*>(from);
    Pack<T, N> pack;
    memcpy(&pack, &word, sizeof(word));
    return pack;
}

// Of memory that nothing writes during the kernel, so that loads may overtake stores.
template <int N, typename T>
__device__ inline Pack<T, N> load_constant(const T* from) {
    const auto word = __ldg(reinterpret_cast<const Word<T, N>*>(from));
    Pack<T, N> pack;
    memcpy(&pack, &word, sizeof(word));
    return pack;
}

// A word into global memory. Not by assignment: the compiler may take that apart into its elements,
// and does not always put it together again.
__device__ inline void store_word(unsigned short* to, unsigned short word) { *to = word; }
__device__ inline void store_word(unsigned int* to, unsigned int word) { *to = word; }
__device__ inline void store_word(uint2* to, uint2 word) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(word.x), "r"(word.y)
                 : "memory");
}
__device__ inline void store_word(uint4* to, uint4 word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
                 : "memory");
}

template <int N, typename T>
__device__ inline void store(T* to, const Pack<T, N>& pack) {
    Word<T, N> word;
    memcpy(&word, &pack, sizeof(word));
    store_word(reinterpret_cast<Word<T, N>*>(to), word);
}

template <int N, typename T>
__device__ inline void widen(const Pack<T, N>& pack, Wide<T> (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = widen(pack.values[i]);
}

template <int N, typename T>
__device__ inline void read(const T* from, Wide<T> (&values)[N]) {
    widen(load_constant<N>(from), values);
}

// For what the kernel may write in place.
template <int N, typename T>
__device__ inline void read_mutable(const T* from, Wide<T> (&values)[N]) {
    widen(load<N>(from), values);
}

template <int N, typename T>
__device__ inline void write(T* to, const Wide<T> (&values)[N]) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.values[i] = narrow<T>(values[i]);
    store<N>(to, pack);
}

// Of N wide values, which may be more than 16 bytes, what moves in one access.
template <typename W, int N>
constexpr int kChunkOf = N < kVector<W> ? N : kVector<W>;

// Into global or shared memory.
template <int N, typename W>
__device__ inline void write_chunks(W* to, int step, const W (&values)[N]) {
    constexpr int kChunk = kChunkOf<W, N>;
#pragma unroll
    for (int i = 0; i < N / kChunk; ++i) {
        Pack<W, kChunk> pack;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) pack.values[j] = values[i * kChunk + j];
        Word<W, kChunk> word;
        memcpy(&word, &pack, sizeof(word));
        *reinterpret_cast<Word<W, kChunk>*>(to + i * step) = word;
    }
}

template <typename T>
__device__ inline T* at(const Rows& rows, int64_t row) {
    return static_cast<T*>(rows.data) + row * rows.stride;
}

// The sum over the threads of a row, those of one threadIdx.y, in all of them. All threads of the
// block take part; `scratch` holds kMaxWarps. The order is fixed.
template <typename W>
__device__ inline W row_sum(W value, W* scratch) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, offset);
    }
    const int warps = blockDim.x / kWarp;
    if (warps == 1) return value;
    W* row = scratch + threadIdx.y * warps;
    if (threadIdx.x % kWarp == 0) row[threadIdx.x / kWarp] = value;
    __syncthreads();
    W sum = row[0];
    for (int i = 1; i < warps; ++i) sum += row[i];
    __syncthreads();
    return sum;
}

// Sums of columns over the rows that a block goes through. Those of one threadIdx.y have a copy of
// their own, in which a column belongs to one thread. The copies are in shared memory, in planes of
// 16 bytes a vector (no bank conflicts), or, if that is too small for a single one, in the output.
template <typename W, int N>
class ColumnSums {
   public:
    // `output` [width] may be null: then there is nothing to sum. `shared` holds blockDim.y copies,
    // or is null.
    __device__ ColumnSums(W* output, W* shared, int width)
        : output_(output),
          sums_(shared == nullptr ? output : shared + threadIdx.y * width),
          width_(width),
          planes_(shared != nullptr) {}

    __device__ void clear(int vector) {
        const W zeros[N] = {};
        if (output_ != nullptr) put(vector, zeros);
    }

    __device__ void add(int vector, const W (&values)[N]) {
        if (output_ == nullptr) return;
        W sums[N];
        get(sums_, vector, sums);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] += values[i];
        put(vector, sums);
    }

    // For the threads of threadIdx.y 0, after a barrier.
    __device__ void finish(int vector) {
        if (output_ == nullptr || output_ == sums_) return;
        W sums[N];
        get(sums_, vector, sums);
        for (int copy = 1; copy < static_cast<int>(blockDim.y); ++copy) {
            W others[N];
            get(sums_ + copy * width_, vector, others);
#pragma unroll
            for (int i = 0; i < N; ++i) sums[i] += others[i];
        }
        write_chunks(output_ + int64_t{vector} * N, kChunk, sums);
    }

   private:
    static constexpr int kChunk = kChunkOf<W, N>;

    // From one vector to the next, and from one chunk of a vector to its next.
    __device__ int vector_step() const { return N > kChunk && planes_ ? kChunk : N; }
    __device__ int chunk_step() const { return planes_ ? width_ / N * kChunk : kChunk; }

    __device__ void get(const W* from, int vector, W (&values)[N]) const {
        from += vector * vector_step();
#pragma unroll
        for (int i = 0; i < N; i += kChunk) {
            const Pack<W, kChunk> pack = load<kChunk>(from + i / kChunk * chunk_step());
#pragma unroll
            for (int j = 0; j < kChunk; ++j) values[i + j] = pack.values[j];
        }
    }

    __device__ void put(int vector, const W (&values)[N]) {
        write_chunks(sums_ + vector * vector_step(), chunk_step(), values);
    }

    W *output_, *sums_;
    int width_;
    bool planes_;
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }
// Φ, the normal distribution's: unlike (1 + erf(x/√2))/2 it keeps its relative precision where x is
// negative.
__device__ inline float normal(float x) { return normcdff(x); }
__device__ inline double normal(double x) { return normcdf(x); }

template <typename W>
__device__ inline W sigmoid(W x) {
    return W(1) / (W(1) + exponential(-x));
}

template <typename W>
__device__ inline W silu(W x) {
    return x * sigmoid(x);
}

template <typename W>
__device__ inline W activate(Activation activation, W x) {
    if (activation == Activation::kSilu) return silu(x);
    if (activation == Activation::kGelu) return x * normal(x);
    return x;
}

template <typename W>
__device__ inline W silu_slope(W x, W sigmoid) {
    return sigmoid * (W(1) + x * (W(1) - sigmoid));
}

template <typename W>
__device__ inline W slope(Activation activation, W x) {
    if (activation == Activation::kSilu) return silu_slope(x, sigmoid(x));
    if (activation == Activation::kGelu) {
        const W density = W(0.39894228040143267794) * exponential(W(-0.5) * x * x);
        return normal(x) + x * density;
    }
    return W(1);
}

// S of a row. All lanes of a warp ask for the same row: each decodes the slots of one rank, and
// they are added in the order of the ranks.
template <typename W>
__device__ inline W statistic(const Statistics& statistics, int64_t row) {
    if (statistics.columns == 1) return *at<const W>(statistics.block, row);
    const auto* slots = at<const __nv_bfloat16>(statistics.block, row);
    const int ranks = static_cast<int>(statistics.columns / 3);
    const int lane = threadIdx.x % kWarp;
    float sum = 0;
    for (int first = 0; first < ranks; first += kWarp) {
        float own = 0;
        if (first + lane < ranks) {
            const auto* slot = slots + 3 * (first + lane);
            own = (widen(slot[0]) + widen(slot[1])) + widen(slot[2]);
        }
        const int count = min(kWarp, ranks - first);
        for (int i = 0; i < count; ++i) sum += __shfl_sync(kAllLanes, own, i);
    }
    return sum;
}

template <typename W>
__device__ inline W rho_of(const Statistics& statistics, int64_t row) {
    if (statistics.block.data == nullptr) return W(1);
    return root(statistic<W>(statistics, row) / W(statistics.hidden_size) + W(statistics.eps));
}

// The host's side.

template <typename T>
struct Type {
    using type = T;
};

template <typename Function>
void dispatch(DType dtype, Function&& function) {
    switch (dtype) {
        case DType::kFloat:
            return function(Type<float>{});
        case DType::kDouble:
            return function(Type<double>{});
        case DType::kBFloat16:
            return function(Type<__nv_bfloat16>{});
        case DType::kHalf:
            return function(Type<__half>{});
    }
    throw std::invalid_argument("unknown dtype");
}

template <typename T, int N>
bool vectorizes(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % (N * sizeof(T)) == 0;
}

template <typename T, int N>
bool vectorizes(const Rows& rows, int64_t n) {
    return vectorizes<T, N>(rows.data) && (n <= 1 || rows.stride % N == 0);
}

// Threads for n rows of so many vectors: threadIdx.x runs along a row, in whole warps, threadIdx.y
// over the rows of a block. A thread has at least `per_thread` vectors unless that leaves warps
// without any, and more if the row is longer.
inline dim3 block_for(int64_t vectors, int64_t per_thread, int64_t max_threads = kMaxThreads) {
    per_thread = std::max(per_thread, (vectors + max_threads - 1) / max_threads);
    const int64_t needed = (vectors + per_thread - 1) / per_thread;
    const int64_t threads = std::max<int64_t>(1, (needed + kWarp - 1) / kWarp) * kWarp;
    constexpr int64_t kSmallBlock = 128;
    return dim3(static_cast<unsigned>(threads),
                static_cast<unsigned>(std::max<int64_t>(1, kSmallBlock / threads)));
}

inline unsigned grid_for(int64_t n, int64_t per_block) {
    const int64_t blocks = (n + per_block - 1) / per_block;
    if (blocks > INT32_MAX) throw std::invalid_argument("too many rows for one launch");
    return static_cast<unsigned>(blocks);
}

// For kernels that go through a row without a sum: long rows are cut into pieces, in grid.y.
inline dim3 grid_for_pieces(int64_t n, int64_t vectors, dim3 block, int64_t per_thread) {
    const int64_t piece = block.x * per_thread;
    return dim3(grid_for(n, block.y),
                static_cast<unsigned>(std::min<int64_t>((vectors + piece - 1) / piece, 65535)));
}

inline void check(const char* name, cudaError_t error) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    check("cudaGetDevice", cudaGetDevice(&device));
    check("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

// What a block has without being asked for specially, less the scratch of row_sum.
constexpr size_t kPlainShared = 47 * 1024;

// A launch of a kernel with ColumnSums: its threads, and shared memory or 0.
struct SumsShape {
    dim3 block;
    size_t shared;
};

// For rows of so many vectors and sums of so many bytes. A block that took more than 96 KB would be
// alone on its multiprocessor.
inline SumsShape shape_for_sums(int64_t vectors, size_t bytes) {
    const unsigned threads = block_for(vectors, 1).x;
    size_t most = kPlainShared;
    if (bytes * (kMaxThreads / threads) > most) {
        constexpr size_t kScratch = 1024;
        most = std::min<size_t>(
            96 * 1024, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kScratch);
    }
    unsigned rows = kMaxThreads / threads;
    while (rows > 1 && bytes * rows > most) --rows;
    return {dim3(threads, rows), bytes * rows <= most ? bytes * rows : 0};
}

template <typename... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            cudaStream_t stream, std::common_type_t<Parameters>... arguments) {
    if (shared > kPlainShared) {
        check(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared)));
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    check(name, cudaLaunchKernelEx(&config, kernel, arguments...));
    check(name, cudaGetLastError());
}

}  // namespace boost::cuda

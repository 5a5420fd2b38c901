// Kernel 2: from the all-reduced latents to the inputs of the up-projections: 1/ρ, the gated
// previous latent, the norm, φ and the split into members, in one pass; and its gradients.

#include "common.cuh"
#include "kernels.h"

namespace boost::cuda {
namespace {

// Vectors of a thread that stay in registers while the norm looks at a member more than once; of
// longer members the rest is read again.
constexpr int kKept = 2;
constexpr int kKeptBackward = 1;

template <typename Arguments>
__device__ inline int64_t start_of(const Arguments& a, int member) {
    int64_t start = 0;
    for (int i = 0; i < member; ++i) start += a.ranks[i];
    return start;
}

// What stays of a vector: v, and in the backward dz and then the gradient of the normed value.
template <typename W, int N>
struct Value {
    W v[N];
};
template <typename W, int N>
struct ValueAndGradient {
    W v[N], gradient[N];
};

// Calls f(vector, slot, is_kept) for the vectors of this thread. A slot that is kept still holds
// what the last call put there.
template <int kCount, typename Slot, typename Function>
__device__ inline void for_each_vector(int vectors, Slot (&kept)[kCount], const Function& f) {
    const int step = blockDim.x;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int vector = threadIdx.x + i * step;
        if (vector < vectors) f(vector, kept[i], true);
    }
    for (int vector = threadIdx.x + kCount * step; vector < vectors; vector += step) {
        Slot slot;
        f(vector, slot, false);
    }
}

// A norm's γ and β of some columns.
template <typename T, int N>
struct Affine {
    Wide<T> weight[N], bias[N];

    __device__ Affine(const void* weights, const void* biases, int64_t column) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            weight[i] = 1;
            bias[i] = 0;
        }
        if (weights != nullptr) read<N>(static_cast<const T*>(weights) + column, weight);
        if (biases != nullptr) read<N>(static_cast<const T*>(biases) + column, bias);
    }
};

template <typename W>
struct Moments {
    W mean = 0, inverse;  // 0 for RMS, and 1/σ
};

// Of a member, whose vectors `value(vector, slot)` reads; leaves v in the kept slots. The variance
// is that around the mean, in a second look, and not a difference of squares.
template <int N, int kCount, typename W, typename Slot, typename Read>
__device__ inline Moments<W> moments_of(int vectors, W rank, LatentNorm norm, W eps,
                                        Slot (&kept)[kCount], W* scratch, const Read& value) {
    Moments<W> moments;
    W sum = 0, squares = 0;
    for_each_vector(vectors, kept, [&](int vector, Slot& slot, bool) {
        value(vector, slot);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sum += slot.v[i];
            squares += slot.v[i] * slot.v[i];
        }
    });
    if (norm == LatentNorm::kLayer) {
        const W mean = row_sum(sum, scratch) / rank;
        squares = 0;
        for_each_vector(vectors, kept, [&](int vector, Slot& slot, bool is_kept) {
            if (!is_kept) value(vector, slot);
#pragma unroll
            for (int i = 0; i < N; ++i) squares += (slot.v[i] - mean) * (slot.v[i] - mean);
        });
        moments.mean = mean;
    }
    moments.inverse = W(1) / root(row_sum(squares, scratch) / rank + eps);
    return moments;
}

// One member of one row for each threadIdx.y and blockIdx.y.
template <typename H, typename T, int N, bool kNormed>
__global__ void __launch_bounds__(kMaxThreads, 2) latent_epilogue_kernel(const LatentEpilogue a) {
    using W = Wide<T>;
    __shared__ W scratch[kMaxWarps];
    const int member = blockIdx.y;
    const int64_t start = start_of(a, member), rank = a.ranks[member];
    const int64_t given_row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    // A row beyond the last has no vectors, but takes part in the sums.
    const bool live = given_row < a.n;
    const int64_t row = live ? given_row : a.n - 1;
    const int vectors = live ? static_cast<int>(rank / N) : 0;
    const W inverse = W(1) / rho_of<W>(a.statistics, row);
    const H* h = at<const H>(a.h, row) + start;
    const T* gated = at<const T>(a.gated, row) + start;
    T* v_row = static_cast<T*>(a.v) + row * a.width + start;
    T* z = static_cast<T*>(a.z) + a.n * start + row * rank;

    const auto value = [&](int vector, W(&v)[N]) {
        read<N>(h + int64_t{vector} * N, v);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= inverse;
        if (a.gated.data != nullptr) {
            W added[N];
            read<N>(gated + int64_t{vector} * N, added);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] += added[i];
        }
        if (a.v != nullptr) {
            write<N>(v_row + int64_t{vector} * N, v);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = widen(narrow<T>(v[i]));
        }
    };

    if constexpr (!kNormed) {
        for (int vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
            W v[N];
            value(vector, v);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = activate(a.activation, v[i]);
            write<N>(z + int64_t{vector} * N, v);
        }
    } else {
        using Slot = Value<W, N>;
        Slot kept[kKept];
        const auto fill = [&](int vector, Slot& slot) { value(vector, slot.v); };
        const Moments<W> moments =
            moments_of<N>(vectors, W(rank), a.norm, W(a.norm_eps), kept, scratch, fill);
        for_each_vector(vectors, kept, [&](int vector, Slot& slot, bool is_kept) {
            if (!is_kept) fill(vector, slot);
            const Affine<T, N> affine(a.weight, a.bias, start + int64_t{vector} * N);
            W result[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const W normed = (slot.v[i] - moments.mean) * moments.inverse;
                result[i] = activate(a.activation, normed * affine.weight[i] + affine.bias[i]);
            }
            write<N>(z + int64_t{vector} * N, result);
        });
    }
}

// A row in the backward, and the member of it that is being worked on.
template <typename H, typename T, int N>
struct BackwardRow {
    using W = Wide<T>;
    const LatentEpilogueBackward& a;
    const int64_t row;
    const W inverse;  // 1/ρ
    W dot = 0;        // of dv and h/ρ: this thread's share
    int start = 0;
    const T* dz = nullptr;

    __device__ BackwardRow(const LatentEpilogueBackward& arguments, int64_t row)
        : a(arguments), row(row), inverse(W(1) / rho_of<W>(arguments.statistics, row)) {}

    __device__ void enter(int member_start, int rank) {
        start = member_start;
        dz = static_cast<const T*>(a.dz) + a.n * start + row * rank;
    }

    __device__ int column(int vector) const { return start + vector * N; }

    __device__ void read_latent(int vector, W (&u)[N]) const {
        read<N>(at<const H>(a.h, row) + column(vector), u);
#pragma unroll
        for (int i = 0; i < N; ++i) u[i] *= inverse;
    }

    __device__ void read_value(int vector, W (&v)[N]) const {
        if (a.v.data == nullptr) return read_latent(vector, v);
        read<N>(at<const T>(a.v, row) + column(vector), v);
    }

    // From dv to what is written; v is that of read_value.
    __device__ void finish(int vector, const W (&v)[N], W (&dv)[N]) {
        if (a.dv_in.data != nullptr) {
            W incoming[N];
            read<N>(at<const T>(a.dv_in, row) + column(vector), incoming);
#pragma unroll
            for (int i = 0; i < N; ++i) dv[i] += incoming[i];
        }
        if (a.ds != nullptr && a.v.data == nullptr) {
#pragma unroll
            for (int i = 0; i < N; ++i) dot += dv[i] * v[i];
        } else if (a.ds != nullptr) {
            W u[N];
            read_latent(vector, u);
#pragma unroll
            for (int i = 0; i < N; ++i) dot += dv[i] * u[i];
        }
        const int64_t offset = row * a.width + column(vector);
        if (a.dv != nullptr) write<N>(static_cast<T*>(a.dv) + offset, dv);
#pragma unroll
        for (int i = 0; i < N; ++i) dv[i] *= inverse;
        write<N>(static_cast<H*>(a.dh) + offset, dv);
    }

    // From the sum of `dot`, which has one of the three 1/ρ in it.
    __device__ void write_ds(W sum) const {
        static_cast<W*>(a.ds)[row] = sum * inverse * inverse / W(-2 * a.statistics.hidden_size);
    }
};

// A row for each threadIdx.y, with all of its members, since ds is a sum over them.
template <typename H, typename T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    latent_backward_kernel(const LatentEpilogueBackward a) {
    using W = Wide<T>;
    __shared__ W scratch[kMaxWarps];
    const int64_t given_row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool live = given_row < a.n;
    BackwardRow<H, T, N> row(a, live ? given_row : a.n - 1);
    // Without φ, v is needed for ds only, as h/ρ.
    const bool needs_value =
        a.activation != Activation::kIdentity || (a.ds != nullptr && a.v.data == nullptr);
    int start = 0;
    for (int member = 0; member < a.groups; ++member) {
        const int rank = static_cast<int>(a.ranks[member]);
        const int vectors = live ? rank / N : 0;
        row.enter(start, rank);
        start += rank;
        for (int vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
            W v[N] = {}, dv[N];
            read<N>(row.dz + int64_t{vector} * N, dv);
            if (needs_value) row.read_value(vector, v);
#pragma unroll
            for (int i = 0; i < N; ++i) dv[i] *= slope(a.activation, v[i]);
            row.finish(vector, v, dv);
        }
    }
    if (a.ds == nullptr) return;
    const W sum = row_sum(row.dot, scratch);
    if (live && threadIdx.x == 0) row.write_ds(sum);
}

// With a norm: a block goes through the rows of its part, one at a time for each threadIdx.y, and
// through the members one after the other.
template <typename H, typename T, int N>
__global__ void __launch_bounds__(kMaxThreads, sizeof(T) == 2 ? 2 : 1)
    latent_norm_backward_kernel(const LatentEpilogueBackward a, bool sums_shared) {
    using W = Wide<T>;
    using Slot = ValueAndGradient<W, N>;
    __shared__ W scratch[kMaxWarps];
    extern __shared__ __align__(16) unsigned char shared_bytes[];

    W* dweight_shared = sums_shared ? reinterpret_cast<W*>(shared_bytes) : nullptr;
    W* dbias_shared =
        sums_shared ? dweight_shared + (a.dweight == nullptr ? 0 : blockDim.y * a.width) : nullptr;
    const auto part_of = [&](void* sums) {
        return sums == nullptr ? nullptr : static_cast<W*>(sums) + blockIdx.x * a.width;
    };
    ColumnSums<W, N> dweight(part_of(a.dweight), dweight_shared, static_cast<int>(a.width));
    ColumnSums<W, N> dbias(part_of(a.dbias), dbias_shared, static_cast<int>(a.width));
    const auto for_each_column = [&](const auto& f) {
        int start = 0;
        for (int member = 0; member < a.groups; ++member) {
            const int vectors = static_cast<int>(a.ranks[member] / N);
            for (int i = threadIdx.x; i < vectors; i += blockDim.x) f(start + i);
            start += vectors;
        }
    };
    for_each_column([&](int vector) {
        dweight.clear(vector);
        dbias.clear(vector);
    });

    for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < a.n;
         first += int64_t{gridDim.x} * blockDim.y) {
        const bool live = first + threadIdx.y < a.n;
        BackwardRow<H, T, N> row(a, live ? first + threadIdx.y : first);
        int start = 0;
        for (int member = 0; member < a.groups; ++member) {
            const int rank = static_cast<int>(a.ranks[member]);
            const int vectors = live ? rank / N : 0;
            const int first_vector = start / N;
            row.enter(start, rank);
            start += rank;

            Slot kept[kKeptBackward];
            // dz along with v, so that it is on its way while the moments are found.
            const auto fill = [&](int vector, Slot& slot) {
                row.read_value(vector, slot.v);
                read<N>(row.dz + int64_t{vector} * N, slot.gradient);
            };
            const Moments<W> moments =
                moments_of<N>(vectors, W(rank), a.norm, W(a.norm_eps), kept, scratch, fill);
            const auto normed = [&](W v) { return (v - moments.mean) * moments.inverse; };
            // From dz to the gradients of γ and β, and of the normed value into the slot.
            const auto differentiate = [&](int vector, Slot& slot, W(&dgamma)[N], W(&dbeta)[N]) {
                const Affine<T, N> affine(a.weight, a.bias, row.column(vector));
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const W x = normed(slot.v[i]);
                    dbeta[i] = slot.gradient[i] *
                               slope(a.activation, x * affine.weight[i] + affine.bias[i]);
                    dgamma[i] = dbeta[i] * x;
                    slot.gradient[i] = dbeta[i] * affine.weight[i];
                }
            };

            W along = 0, total = 0;
            for_each_vector(vectors, kept, [&](int vector, Slot& slot, bool is_kept) {
                W dgamma[N], dbeta[N];
                if (!is_kept) fill(vector, slot);
                differentiate(vector, slot, dgamma, dbeta);
                dweight.add(first_vector + vector, dgamma);
                dbias.add(first_vector + vector, dbeta);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    along += slot.gradient[i] * normed(slot.v[i]);
                    total += slot.gradient[i];
                }
            });
            along = row_sum(along, scratch) / W(rank);
            total = a.norm == LatentNorm::kLayer ? row_sum(total, scratch) / W(rank) : W(0);

            for_each_vector(vectors, kept, [&](int vector, Slot& slot, bool is_kept) {
                W dv[N];
                if (!is_kept) {
                    W dgamma[N], dbeta[N];
                    fill(vector, slot);
                    differentiate(vector, slot, dgamma, dbeta);
                }
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const W across = slot.gradient[i] - total - normed(slot.v[i]) * along;
                    dv[i] = across * moments.inverse;
                }
                row.finish(vector, slot.v, dv);
            });
        }
        if (a.ds == nullptr) continue;
        const W sum = row_sum(row.dot, scratch);
        if (live && threadIdx.x == 0) row.write_ds(sum);
    }
    __syncthreads();
    if (threadIdx.y > 0) return;
    for_each_column([&](int vector) {
        dweight.finish(vector);
        dbias.finish(vector);
    });
}

template <typename Arguments>
int64_t longest(const Arguments& a) {
    return *std::max_element(a.ranks, a.ranks + a.groups);
}

template <typename Arguments>
bool ranks_divide(const Arguments& a, int vector) {
    return std::all_of(a.ranks, a.ranks + a.groups,
                       [&](int64_t rank) { return rank % vector == 0; });
}

template <typename H, typename T, int N>
void launch_forward(const LatentEpilogue& a, cudaStream_t stream) {
    const bool normed = a.norm != LatentNorm::kNone;
    const dim3 block = block_for(longest(a) / N, normed ? 1 : 2);
    const dim3 grid(grid_for(a.n, block.y), static_cast<unsigned>(a.groups));
    const auto kernel =
        normed ? latent_epilogue_kernel<H, T, N, true> : latent_epilogue_kernel<H, T, N, false>;
    launch("latent_epilogue", kernel, grid, block, 0, stream, a);
}

template <typename H, typename T, int N>
void launch_backward(const LatentEpilogueBackward& a, cudaStream_t stream) {
    const dim3 block = block_for(longest(a) / N, 2);
    launch("latent_epilogue_backward", latent_backward_kernel<H, T, N>, grid_for(a.n, block.y),
           block, 0, stream, a);
}

template <typename H, typename T, int N>
void launch_norm_backward(const LatentEpilogueBackward& a, cudaStream_t stream) {
    const int sums = (a.dweight != nullptr) + (a.dbias != nullptr);
    const SumsShape shape = shape_for_sums(longest(a) / N, sums * a.width * sizeof(Wide<T>));
    const unsigned blocks =
        sums > 0 ? static_cast<unsigned>(a.parts) : grid_for(a.n, shape.block.y);
    launch("latent_epilogue_backward", latent_norm_backward_kernel<H, T, N>, blocks, shape.block,
           shape.shared, stream, a, shape.shared > 0);
}

template <typename H, typename T, int N>
bool backward_vectorizes(const LatentEpilogueBackward& a) {
    constexpr int kSums = kChunkOf<Wide<T>, N>;
    return ranks_divide(a, N) && vectorizes<T, N>(a.dz) && vectorizes<T, N>(a.dv_in, a.n) &&
           vectorizes<H, N>(a.h, a.n) && vectorizes<T, N>(a.v, a.n) && vectorizes<T, N>(a.weight) &&
           vectorizes<T, N>(a.bias) && vectorizes<H, N>(a.dh) && vectorizes<T, N>(a.dv) &&
           vectorizes<Wide<T>, kSums>(a.dweight) && vectorizes<Wide<T>, kSums>(a.dbias);
}

// Calls f with the dtypes of h and of z.
template <typename Function>
void dispatch_message(DType h_dtype, DType dtype, const char* name, Function&& f) {
    dispatch(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        if (h_dtype == dtype) return f(type, type);
        if constexpr (sizeof(T) == 2) {
            if (h_dtype == DType::kFloat) return f(Type<float>{}, type);
        }
        throw std::invalid_argument(std::string(name) +
                                    ": h must be of the dtype of the latents or its wide one");
    });
}

}  // namespace

void latent_epilogue(const LatentEpilogue& a, cudaStream_t stream) {
    if (a.n == 0 || a.width == 0) return;
    dispatch_message(a.h_dtype, a.dtype, "latent_epilogue", [&](auto h_type, auto type) {
        using H = typename decltype(h_type)::type;
        using T = typename decltype(type)::type;
        constexpr int N = kVector<H, T>;
        if (ranks_divide(a, N) && vectorizes<H, N>(a.h, a.n) && vectorizes<T, N>(a.gated, a.n) &&
            vectorizes<T, N>(a.weight) && vectorizes<T, N>(a.bias) && vectorizes<T, N>(a.z) &&
            vectorizes<T, N>(a.v)) {
            launch_forward<H, T, N>(a, stream);
        } else {
            launch_forward<H, T, 1>(a, stream);
        }
    });
}

void latent_epilogue_backward(const LatentEpilogueBackward& a, cudaStream_t stream) {
    if (a.n == 0 || a.width == 0) return;
    dispatch_message(a.h_dtype, a.dtype, "latent_epilogue_backward", [&](auto h_type, auto type) {
        using H = typename decltype(h_type)::type;
        using T = typename decltype(type)::type;
        // With a norm there is more to keep of a vector, and two blocks of shorter ones do better
        // than one that fills the registers.
        constexpr int N = kVector<H, T>, kNormed = kVector<H, T, Wide<T>>;
        if (a.norm == LatentNorm::kNone) {
            backward_vectorizes<H, T, N>(a) ? launch_backward<H, T, N>(a, stream)
                                            : launch_backward<H, T, 1>(a, stream);
        } else {
            backward_vectorizes<H, T, kNormed>(a) ? launch_norm_backward<H, T, kNormed>(a, stream)
                                                  : launch_norm_backward<H, T, 1>(a, stream);
        }
    });
}

}  // namespace boost::cuda

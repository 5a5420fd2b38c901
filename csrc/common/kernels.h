// What every kernel takes, on the CPU and on CUDA. Free of torch: raw pointers, strides in
// elements, sizes. The bindings check shapes and dtypes; the kernels trust them.
//
// Shapes: n tokens, k local width, w = Σ r_i width of grouped latents. A row is one token; rows may
// stand apart (their stride), the elements of a row are next to each other. Arithmetic is in fp32,
// and in fp64 for fp64 tensors; `Wide` below is that dtype.

#pragma once

#include <cstdint>

namespace boost {

enum class DType : int8_t { kFloat, kDouble, kBFloat16, kHalf };

enum class Activation : int8_t { kIdentity, kSilu, kGelu };  // gelu: exact, by erf

enum class LatentNorm : int8_t { kNone, kRms, kLayer };

// Projections that share a GEMM: at most q, k and v.
constexpr int kMaxGroups = 3;

// A matrix of rows; null where it is optional and not there.
struct Rows {
    void* data = nullptr;
    int64_t stride = 0;
};

// Kernel 1. S = Σ x² per token, of x + delta, which replaces x, if there is a delta; and S into the
// statistics' slots of an all-reduce message.
//
// Slots of bf16: [n, 3·T], all of which are written: columns 3·tp_rank and the next two hold hi,
// mid and lo, each the bf16 rounding (to nearest even) of what is left of S, so that hi + mid + lo
// == S; the others are zero. Slots of a Wide dtype: [n, 1], S itself.
struct RmsStats {
    Rows x;      // [n, k], dtype
    Rows delta;  // [n, k], dtype, or null
    void* sum;   // [n], Wide
    Rows slots;  // [n, columns], slots_dtype, or null
    int64_t n, k, columns;
    int tp_rank;
    DType dtype, slots_dtype;
};

// Its gradient: dx = dresidual + 2·ds∘x.
struct ResidualGradient {
    Rows dresidual, x, dx;  // [n, k], dtype
    const void* ds;         // [n], Wide
    int64_t n, k;
    DType dtype;
};

// Where ρ = sqrt(S/hidden_size + eps) comes from. columns 1: S itself, Wide. More, [n, 3·T] bf16:
// S = Σ over ranks of (hi + mid) + lo, in the order of the ranks. Null: ρ = 1.
struct Statistics {
    Rows block;
    int64_t columns;
    double hidden_size, eps;
};

// Kernel 2. z = φ(Norm(v)), v = h/ρ (+ gated), of grouped latents side by side, each with a norm of
// its own. z is split: member i is a contiguous [n, ranks[i]] that starts at element
// n·(ranks[0] + … + ranks[i−1]). With `gated`, v is written out too. v is rounded to the dtype of
// z before anything else is made of it if it is written; otherwise it stays Wide.
struct LatentEpilogue {
    Rows h;  // [n, w], h_dtype
    Statistics statistics;
    Rows gated;                 // [n, w], dtype, or null
    const void *weight, *bias;  // [w], dtype, or null: γ and β of the norm
    void* z;                    // n·w elements, dtype
    void* v;                    // [n, w], dtype, contiguous, or null
    int groups;
    int64_t ranks[kMaxGroups];
    int64_t n, width;
    double norm_eps;
    Activation activation;
    LatentNorm norm;
    DType h_dtype, dtype;  // alike, or h is Wide
};

// Its gradients, from that of z. dv = (gradient through φ and Norm) + dv_in; dh = dv/ρ;
// ds = −(dv·h)/(2·ρ³·d), since u = h/ρ and ∂u/∂S = −h/(2·ρ³·d). With `v` given, φ′ and the norm are
// computed from it, otherwise from h/ρ.
struct LatentEpilogueBackward {
    const void* dz;  // as z
    Rows dv_in;      // [n, w], dtype, or null: from other consumers of v
    Rows h;          // [n, w], h_dtype; not read with `v` and without statistics
    Rows v;          // [n, w], dtype, or null
    Statistics statistics;
    const void *weight, *bias;
    void* dh;               // [n, w], h_dtype, contiguous
    void* dv;               // [n, w], dtype, contiguous, or null
    void* ds;               // [n], Wide, or null without statistics
    void *dweight, *dbias;  // Wide, [parts, w] each: sums over parts of the tokens; or null
    int parts;
    int groups;
    int64_t ranks[kMaxGroups];
    int64_t n, width;
    double norm_eps;
    Activation activation;
    LatentNorm norm;
    DType h_dtype, dtype;
};

// γ∘A of grouped down-projections, one below the other: [Σ rows_i, k].
struct FoldGamma {
    const void* weights[kMaxGroups];  // [rows[i], k], contiguous
    const void* gamma;                // [k]
    void* folded;                     // [Σ rows_i, k]
    int groups;
    int64_t rows[kMaxGroups];
    int64_t k;
    DType dtype;
};

// Its gradients from M = dHᵀ·x: dA = M∘γ and dγ = Σ_rows M∘A. dA is written, or added where
// `accumulate` says so (main gradients, in fp32 while the weights may be narrower).
struct FoldGammaBackward {
    const void* m;                    // [Σ rows_i, k], m_dtype
    const void* weights[kMaxGroups];  // [rows[i], k], dtype
    const void* gamma;                // [k], dtype
    void* dweights[kMaxGroups];       // [rows[i], k], dweight_dtype
    void* dgamma;                     // Wide, [parts, k]: sums over parts of the rows
    int parts;
    int groups;
    int64_t rows[kMaxGroups];
    int64_t k;
    bool accumulate;
    DType m_dtype, dtype, dweight_dtype;
};

// Kernel 5. SiLU(gate)∘up, or gate∘up.
struct GatedProduct {
    Rows gate, up;  // [n, width], dtype
    void* out;      // [n, width]
    int64_t n, width;
    bool swiglu;
    DType dtype;
};

struct GatedProductBackward {
    Rows dout, gate, up;  // [n, width], dtype
    void *dgate, *dup;    // [n, width]
    int64_t n, width;
    bool swiglu;
    DType dtype;
};

// A tensor of heads [s, b, h, e]; the elements of a head are next to each other.
struct Heads {
    void* data = nullptr;
    int64_t heads = 0;
    int64_t stride_s = 0, stride_b = 0, stride_h = 0;
};

// Rotary embedding of some of q, k and v, and a change of layout, in one pass: out = R(in) for each
// of `tensors`, where in and out may be the same memory. Pairs are (i, i + p/2), or (2i, 2i + 1) if
// interleaved; what lies beyond the p rotated elements of a head passes through. `inverse` turns
// the other way, which is the gradient.
struct Rotary {
    Heads in[kMaxGroups], out[kMaxGroups];
    bool rotated[kMaxGroups];  // v is moved only
    int tensors;
    const void *cos, *sin;  // [s, p], dtype, contiguous
    int64_t s, b, e, p;
    bool interleaved, inverse;
    DType dtype;
};

// RMSNorm of whole tokens, for the borders and the full-rank baseline: y = γ∘x/ρ, and ρ.
struct RmsNorm {
    Rows x;             // [n, k], dtype
    const void* gamma;  // [k], dtype
    void* y;            // [n, k], dtype
    void* rho;          // [n], Wide
    int64_t n, k;
    double eps;
    DType dtype;
};

// Its gradients, with the residual's added: dx = dresidual + (dy∘γ − x·(dy∘γ·x)/(ρ²·k))/ρ, and
// dγ = Σ dy∘x/ρ.
struct RmsNormBackward {
    Rows dy, x, dresidual;  // [n, k], dtype; dresidual may be null
    const void *gamma, *rho;
    void* dx;      // [n, k], dtype
    void* dgamma;  // Wide, [parts, k]
    int parts;
    int64_t n, k;
    DType dtype;
};

}  // namespace boost

// The CPU kernels: each works on the tokens (or rows of weights) begin..end-1, so that the caller
// shares them out over threads. Compiled once for each instruction set; the caller takes the table
// of the best that the processor has.

#pragma once

#include "../common/kernels.h"

namespace boost::cpu {

struct Kernels {
    void (*rms_stats)(const RmsStats&, int64_t begin, int64_t end);
    void (*read_statistics)(const Statistics&, float* sum, int64_t begin, int64_t end);
    void (*residual_gradient)(const ResidualGradient&, int64_t begin, int64_t end);
    void (*latent_epilogue)(const LatentEpilogue&, int64_t begin, int64_t end);
    // `part` says which row of the partial sums the tokens are added to.
    void (*latent_epilogue_backward)(const LatentEpilogueBackward&, int part, int64_t begin,
                                     int64_t end);
    void (*fold_gamma)(const FoldGamma&, int64_t begin, int64_t end);
    void (*fold_gamma_backward)(const FoldGammaBackward&, int part, int64_t begin, int64_t end);
    void (*gated_product)(const GatedProduct&, int64_t begin, int64_t end);
    void (*gated_product_backward)(const GatedProductBackward&, int64_t begin, int64_t end);
    // On positions begin..end-1 of the sequence.
    void (*rotary)(const Rotary&, int64_t begin, int64_t end);
    void (*rms_norm)(const RmsNorm&, int64_t begin, int64_t end);
    void (*rms_norm_backward)(const RmsNormBackward&, int part, int64_t begin, int64_t end);
};

const Kernels& kernels_default();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace boost::cpu

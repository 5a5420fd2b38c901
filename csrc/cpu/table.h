// The table of the kernels as compiled for one instruction set; included by one source for each.

#include "fold_gamma.h"
#include "gated_product.h"
#include "kernels.h"
#include "latent_epilogue.h"
#include "rms_norm.h"
#include "rotary.h"
#include "statistics.h"

namespace boost::cpu::CPU_CAPABILITY {

constexpr Kernels kTable = {
    .rms_stats = rms_stats,
    .read_statistics = read_statistics,
    .residual_gradient = residual_gradient,
    .latent_epilogue = latent_epilogue,
    .latent_epilogue_backward = latent_epilogue_backward,
    .fold_gamma = fold_gamma,
    .fold_gamma_backward = fold_gamma_backward,
    .gated_product = gated_product,
    .gated_product_backward = gated_product_backward,
    .rotary = rotary,
    .rms_norm = rms_norm,
    .rms_norm_backward = rms_norm_backward,
};

}  // namespace boost::cpu::CPU_CAPABILITY

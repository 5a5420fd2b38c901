"""The ops for CUDA without nvcc: kernels 1, 2 and 5 and RMSNorm in Triton, the others as in the
reference. Their arithmetic is in fp32 (fp64 for fp64), and nothing depends on the order in which
programs run."""

from boost_layers.ops.reference import (
    LATENT_NORM_EPS,
    apply_gate,
    apply_gate_backward,
    down_projection,
    down_projection_accumulate,
    down_projection_dgrad,
    down_projection_wgrad,
    fold_gamma,
    fold_gamma_accumulate,
    fold_gamma_backward,
    message_dtype,
    split_members,
    statistics_columns,
    up_projection,
    up_projection_accumulate,
    up_projection_dgrad,
    up_projection_wgrad,
    wide,
)
from boost_layers.ops.triton_kernels.gated_product import gated_product, gated_product_backward
from boost_layers.ops.triton_kernels.latent import latent_epilogue, latent_epilogue_backward
from boost_layers.ops.triton_kernels.rms_norm import rms_norm, rms_norm_backward
from boost_layers.ops.triton_kernels.rotary import rotary_, rotary_backward
from boost_layers.ops.triton_kernels.statistics import (
    read_statistics,
    residual_add_rms_stats,
    residual_gradient,
    rms_stats,
)

__all__ = [
    "LATENT_NORM_EPS",
    "apply_gate",
    "apply_gate_backward",
    "down_projection",
    "down_projection_accumulate",
    "down_projection_dgrad",
    "down_projection_wgrad",
    "fold_gamma",
    "fold_gamma_accumulate",
    "fold_gamma_backward",
    "gated_product",
    "gated_product_backward",
    "latent_epilogue",
    "latent_epilogue_backward",
    "message_dtype",
    "read_statistics",
    "residual_add_rms_stats",
    "residual_gradient",
    "rms_norm",
    "rms_norm_backward",
    "rms_stats",
    "rotary_",
    "rotary_backward",
    "split_members",
    "statistics_columns",
    "up_projection",
    "up_projection_accumulate",
    "up_projection_dgrad",
    "up_projection_wgrad",
    "wide",
]

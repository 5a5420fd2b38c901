"""Every op in plain PyTorch: what the fast ones are compared with, and what runs without them.

Shapes: n tokens, k local width, w = Σ r_i width of grouped latents, r rank, T tensor-parallel
size, d the whole hidden size. Statistics are in fp32 whatever the input (fp64 for fp64 input).
"""

from boost_layers.ops.reference.gated_product import gated_product, gated_product_backward
from boost_layers.ops.reference.gates import apply_gate, apply_gate_backward
from boost_layers.ops.reference.latent import (
    LATENT_NORM_EPS,
    latent_epilogue,
    latent_epilogue_backward,
)
from boost_layers.ops.reference.projection import (
    down_projection,
    down_projection_accumulate,
    down_projection_dgrad,
    down_projection_wgrad,
    fold_gamma,
    fold_gamma_accumulate,
    fold_gamma_backward,
    split_members,
    up_projection,
    up_projection_accumulate,
    up_projection_dgrad,
    up_projection_wgrad,
)
from boost_layers.ops.reference.rms_norm import rms_norm, rms_norm_backward
from boost_layers.ops.reference.rotary import rotary_, rotary_backward
from boost_layers.ops.reference.statistics import (
    message_dtype,
    read_statistics,
    residual_add_rms_stats,
    residual_gradient,
    rms_stats,
    statistics_columns,
    wide,
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

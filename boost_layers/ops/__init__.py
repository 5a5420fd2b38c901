"""The seam between the layers and the arithmetic they do locally, between two collectives.

Layers call `boost_layers.ops.NAME`; each op has a reference of the same name and signature in plain
PyTorch in `boost_layers.ops.reference`, where it is documented. What serves a device is chosen
once, on import: csrc where it is built for that device, else Triton (CUDA), else the reference.
`python -m boost_layers.ops` prints it. No op communicates.
"""

from boost_layers.ops import reference
from boost_layers.ops.dispatch import choose, dispatched, in_use, use
from boost_layers.ops.reference import (
    LATENT_NORM_EPS,
    apply_gate,
    apply_gate_backward,
    message_dtype,
    split_members,
    statistics_columns,
)

down_projection = dispatched(reference.down_projection)
down_projection_accumulate = dispatched(reference.down_projection_accumulate)
down_projection_dgrad = dispatched(reference.down_projection_dgrad)
down_projection_wgrad = dispatched(reference.down_projection_wgrad)
fold_gamma = dispatched(reference.fold_gamma)
fold_gamma_accumulate = dispatched(reference.fold_gamma_accumulate)
fold_gamma_backward = dispatched(reference.fold_gamma_backward)
gated_product = dispatched(reference.gated_product)
gated_product_backward = dispatched(reference.gated_product_backward)
latent_epilogue = dispatched(reference.latent_epilogue)
latent_epilogue_backward = dispatched(reference.latent_epilogue_backward)
read_statistics = dispatched(reference.read_statistics)
residual_add_rms_stats = dispatched(reference.residual_add_rms_stats)
residual_gradient = dispatched(reference.residual_gradient)
rms_norm = dispatched(reference.rms_norm)
rms_norm_backward = dispatched(reference.rms_norm_backward)
rms_stats = dispatched(reference.rms_stats)
rotary_ = dispatched(reference.rotary_)
rotary_backward = dispatched(reference.rotary_backward)
up_projection = dispatched(reference.up_projection)
up_projection_accumulate = dispatched(reference.up_projection_accumulate)
up_projection_dgrad = dispatched(reference.up_projection_dgrad)
up_projection_wgrad = dispatched(reference.up_projection_wgrad)

choose()

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
    "in_use",
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
    "use",
]

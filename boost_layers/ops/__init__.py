"""The seam between the layers and the arithmetic they do locally, between two collectives.

Layers call `boost_layers.ops.NAME`; each op has a reference of the same name in plain PyTorch in
`boost_layers.ops.reference`. No op communicates.
"""

from boost_layers.ops.reference import (
    activate_latent,
    activate_latent_backward,
    apply_activation,
    apply_activation_backward,
    apply_gate,
    apply_gate_backward,
    divide_latent,
    fold_gamma,
    gated_product,
    gated_product_backward,
    message_dtype,
    normalise_latent,
    normalise_latent_backward,
    project_down,
    project_up,
    read_statistics,
    rms_norm,
    rms_norm_backward,
    rotate_half,
    rotate_half_backward,
    statistics_columns,
    sum_of_squares,
    write_statistics,
)

__all__ = [
    "activate_latent",
    "activate_latent_backward",
    "apply_activation",
    "apply_activation_backward",
    "apply_gate",
    "apply_gate_backward",
    "divide_latent",
    "fold_gamma",
    "gated_product",
    "gated_product_backward",
    "message_dtype",
    "normalise_latent",
    "normalise_latent_backward",
    "project_down",
    "project_up",
    "read_statistics",
    "rms_norm",
    "rms_norm_backward",
    "rotate_half",
    "rotate_half_backward",
    "statistics_columns",
    "sum_of_squares",
    "write_statistics",
]

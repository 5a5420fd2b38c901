"""What a model takes in a layout, by closed formulas: parameters, FLOPs, bytes of activations and
state, collectives. One module per quantity, all over the same sizes (`sizes.Model`,
`sizes.Layout`), each compared in the tests with what a built model really does.

Units are in the names: `…_flops` count operations, `…_bytes` bytes, `…_parameters` numbers.
"""

from megatron.boost.accounting.sizes import Layout, Model, Projection, validate_layout

__all__ = ["Layout", "Model", "Projection", "validate_layout"]

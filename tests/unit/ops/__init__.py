"""Every op as csrc has it, and as the reference has it, against the formula in its docstring.

The formulas (tests/support/op_cases.py and here) are dense and in fp64, their gradients from
autograd. fp32 must agree to 1e-6, fp64 to 1e-12; bf16 and fp16 must be within a unit in the last
place of what is exact for the given numbers. Where the plain reference rounds on the way, it says
so in its `rounding`, and only the reference gets it.
"""

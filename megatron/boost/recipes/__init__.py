"""The recipes of `examples/`, checked without a GPU: every command line is parsed and validated as
its run would, ranks of it are built on the meta device in a process group that does nothing, and
what they hold, keep and communicate is compared with the accounting.

`python -m megatron.boost.recipes` checks all of them.
"""

"""BOOST: low-rank models with bottleneck-aware tensor parallelism in Megatron's training loop."""

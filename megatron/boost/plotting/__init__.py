"""Loss curves of training runs: read from Megatron's logs or TensorBoard's event files, drawn as a
picture and as a page."""

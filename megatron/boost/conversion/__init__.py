"""Checkpoints to and from Hugging Face folders, one tensor at a time and without process groups."""

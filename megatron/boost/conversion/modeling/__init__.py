"""The files that an exported low-rank model carries with it; they import torch and transformers
only, and are copied as they are."""

"""A Hugging Face tokenizer small enough to train in a test."""

from pathlib import Path

from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from megatron.boost.corpus import train_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and the dog jumps over the quick brown fox " * 3
VOCABULARY_SIZE = 280


def save_small_tokenizer(
    folder: Path, *, begins_with: str | None = None, ends: bool = True
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 280 tokens and save it to `folder`.

    `begins_with` is a token that the tokenizer puts before every text, as LLaMA's does with BOS;
    `ends` says whether it has an end-of-sequence token.
    """
    tokenizer = train_tokenizer([TEXT], VOCABULARY_SIZE)
    if begins_with is not None:
        tokenizer.add_special_tokens({"bos_token": begins_with})
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begins_with} $A", special_tokens=[(begins_with, tokenizer.bos_token_id)]
        )
    if not ends:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return tokenizer

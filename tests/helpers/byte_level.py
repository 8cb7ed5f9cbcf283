"""A small byte-level BPE tokenizer, as GPT-2's are made."""

import functools
from typing import Any

from jaxrl_async.data.tokenizer import Tokenizer

TEXT = """
{"name": "Ada", "age": 36, "tags": ["red", "green", "blue"], "items": [1, 2.5, -3e4, true, false,
null], "address": {"street": "St. James's Square 12", "zip": "12345"}, "value": "yes"}
The quick brown fox jumps over the lazy dog. Answers are numbers, names and lists of values; "no",
"none" and "maybe" are strings. été, naïve, 東京, ключ, 😀.
"""
END = "<eos>"


@functools.cache
def byte_level_tokenizer(size: int = 400) -> Tokenizer:
    """A tokenizer of `size` tokens; 0 is its end token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend: Any = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=1,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END))

"""The policy's tokenizer for a sampler on another machine, which needs it for constraints."""

import json
import zlib
from functools import cached_property
from typing import Any

import numpy as np

from jaxrl_async.codec import Bytes
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError

LARGEST = 2**28
"""Maximum bytes of a tokenizer."""


def sent_tokenizer(tokenizer: Tokenizer) -> Bytes:
    """Return a tokenizer without its chat template, compressed."""
    backend = tokenizer.hf.backend_tokenizer.to_str()
    text = json.dumps({"backend": backend, "eos_ids": list(tokenizer.eos_ids)})
    return np.frombuffer(zlib.compress(text.encode(), 1), np.uint8)


class ReceivedTokenizer:
    """A tokenizer of sent_tokenizer, as data.tokenizer.Tokenizer; made at its first use. Raises
    DataError then."""

    def __init__(self, sent: Bytes) -> None:
        self._sent = sent

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer as Backend  # imports in seconds
        from transformers import PreTrainedTokenizerFast

        try:
            text = zlib.decompressobj().decompress(self._sent.tobytes(), LARGEST)
            content = json.loads(text)
            hf = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(content["backend"]))
            return Tokenizer(hf, eos_ids=tuple(int(i) for i in content["eos_ids"]))
        except Exception as error:
            raise DataError(f"the trainer's tokenizer cannot be read: {error}") from None

    def __getattr__(self, name: str) -> Any:
        """Return the tokenizer's attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

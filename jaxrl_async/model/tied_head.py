"""Check whether a directory's head and embedding are tied. If config.json disagrees with the files,
the files decide, as in transformers and vLLM.

    config.json   the files contain             loaded
    tied          a head that differs           both matrices (such as a merged LoRA of the head)
    tied          only the head                 the head, also as the embedding
    untied        no head                       the embedding, also as the head
"""

import dataclasses
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from jaxrl_async.data.gguf_file import gguf_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.model.stored_tensors import (
    EMBEDDING,
    HEAD,
    INDEX,
    SINGLE,
    StoredTensor,
    file_names,
    open_tensors,
)

log = logging.getLogger(__name__)

ROWS = 4096
"""Rows of the two matrices compared at a time."""


def tied_as_stored(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec of a directory, tied according to its files instead of config.json; unchanged
    if weights are missing. A difference is logged. Raises CheckpointError for files that cannot be
    opened, and for two models in one folder."""
    if spec.own is not None or gguf_of(folder) is not None or not _has_weights(folder):
        return spec
    with ExitStack() as files:
        tensors = open_tensors(folder, files, {})
        if EMBEDDING not in tensors or any(name.startswith("score.") for name in tensors):
            return spec
        if not spec.tied and HEAD not in tensors:
            log.warning(
                "%s: config.json says tie_word_embeddings=false, but the files contain no %s: the "
                "embedding is also used as the head",
                folder,
                HEAD,
            )
            return dataclasses.replace(spec, tied=True)
        if spec.tied and HEAD in tensors and _differs(tensors):
            log.warning(
                "%s: config.json says tie_word_embeddings=true, but the files contain a head that "
                "differs from the embedding: both are used (set it to false to silence this)",
                folder,
            )
            return dataclasses.replace(spec, tied=False)
    return spec


def _has_weights(folder: Path) -> bool:
    """Return whether a directory has all files of its weights; a plan does not need them."""
    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return False
    return all((folder / name).exists() for name in file_names(folder, SINGLE))


def _differs(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether the head differs from the embedding."""
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if head.stored.shape != embedding.stored.shape:
        return True
    a, b = (tensor.file.get_slice(tensor.name) for tensor in (head, embedding))
    count = head.stored.shape[0]
    bounds = (slice(first, min(first + ROWS, count)) for first in range(0, count, ROWS))
    return any(not np.array_equal(a[rows], b[rows]) for rows in bounds)

"""The policy: a decoder, its weights and its tokenizer."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_async.mesh import TRAINER_RULES, Rules, shardings
from jaxrl_async.model.hf import (
    load_generation,
    load_params,
    load_spec,
    save_generation,
    save_params,
)
from jaxrl_async.model.spec import ModelSpec, weight_table


class FolderTokenizer:
    """The tokenizer of a Hugging Face directory, as data.tokenizer.Tokenizer; loaded when it is
    first used. Raises DataError then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _loaded(self) -> Any:
        from jaxrl_async.data.tokenizer import load_tokenizer  # transformers: seconds, if wanted

        return load_tokenizer(self._folder)

    def __getattr__(self, name: str) -> Any:
        """Return the loaded tokenizer's attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loaded, name)


@dataclass(frozen=True, slots=True)
class Policy:
    """A decoder with weights. `params` is a pure dict of arrays in the tree of weight_table."""

    spec: ModelSpec
    params: Any
    tokenizer: Any = None  # a Tokenizer; None: none is saved
    generation: Mapping[str, Any] = field(default_factory=dict)  # its generation_config.json

    @staticmethod
    def from_pretrained(
        folder: str | Path,
        *,
        mesh: Mesh | None = None,
        rules: Rules = TRAINER_RULES,
        dtype: Any = jnp.float32,
        tokenizer: Any = None,
    ) -> "Policy":
        """Load a Hugging Face directory, each device reading its own part. Raises CheckpointError.

        tokenizer: None: the directory's own if it has one, read when it is first used.
        """
        folder = Path(folder)
        spec, generation = load_spec(folder), load_generation(folder)
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer = FolderTokenizer(folder)
        where = None if mesh is None else shardings(weight_table(spec), mesh, rules)
        return Policy(spec, load_params(folder, spec, where, dtype), tokenizer, generation)

    def with_params(self, params: Any) -> "Policy":
        """Return the policy with other weights."""
        return dataclasses.replace(self, params=params)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face directory that transformers (and from_pretrained) loads: weights,
        config.json and generation_config.json with the tokenizer's special tokens, and the
        tokenizer."""
        spec, folder = speaking(self.spec, self.tokenizer), Path(folder)
        save_params(folder, spec, self.params)
        if jax.process_index() != 0:
            return
        save_generation(folder, spec, self.generation)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def speaking(spec: ModelSpec, tokenizer: Any) -> ModelSpec:
    """Return the spec with all end tokens of the tokenizer, its bos and its pad; tokens that it
    does not name stay."""
    if tokenizer is None:
        return spec
    special = tokenizer.special_ids
    return dataclasses.replace(
        spec,
        eos_ids=tokenizer.eos_ids or spec.eos_ids,
        bos_id=special.get("bos", spec.bos_id),
        pad_id=special.get("pad", spec.pad_id),
    )

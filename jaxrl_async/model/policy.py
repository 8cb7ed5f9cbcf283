"""The policy: what it is, its weights, and how its text becomes tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_async.mesh import TRAINER_RULES, Rules, shardings
from jaxrl_async.model.hf import load_params, load_spec, save_params
from jaxrl_async.model.spec import ModelSpec, weight_table


@dataclass(frozen=True, slots=True)
class Policy:
    """A decoder with weights. `params` is a pure dict of arrays in the tree of weight_table."""

    spec: ModelSpec
    params: Any
    tokenizer: Any = None  # anything with save_pretrained(folder); null: none is written

    @staticmethod
    def from_pretrained(
        folder: str | Path,
        *,
        mesh: Mesh | None = None,
        rules: Rules = TRAINER_RULES,
        dtype: Any = jnp.float32,
        tokenizer: Any = None,
    ) -> "Policy":
        """Load a Hugging Face directory, each device reading its own part. Raises
        CheckpointError."""
        spec = load_spec(Path(folder))
        where = None if mesh is None else shardings(weight_table(spec), mesh, rules)
        return Policy(spec, load_params(folder, spec, where, dtype), tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face directory that transformers (and from_pretrained) loads."""
        save_params(folder, self.spec, self.params)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

"""Run Tunix's own sampler (`tunix.generate.sampler.Sampler`), a static batcher in JAX, fp32.

Batches of the concurrency, equal prompts, each run to its longest answer; compiled before the first
measured call by the warm-up of that shape. Greedy, its fastest mode: it samples by sorting. Its
llama3 model takes the Hugging Face weights.
"""

import json
from pathlib import Path
from typing import Any

from worker import Generate, serve, static_batches


class Ids:
    """A tokenizer whose text is the token ids as words."""

    def encode(self, text: str, **_: object) -> list[int]:
        """Convert '3 5 7' to [3, 5, 7]."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: object) -> str:
        """Convert [3, 5, 7] to '3 5 7'."""
        return " ".join(str(i) for i in ids)

    def bos_id(self) -> int:
        """Return None: prompts are complete."""
        return 0

    def eos_id(self) -> int:
        """Return an id beyond the vocabulary, so that no answer ends early."""
        return 10**6

    def pad_id(self) -> int:
        """Return any id: prompts have equal lengths and need no padding."""
        return 0


def llama3_of(folder: str) -> tuple[Any, Any, Any]:
    """Return Tunix's llama3 model with the folder's weights in float32, its configuration, and the
    mesh of one device that it is on."""
    import jax
    import jax.numpy as jnp
    from tunix.models.llama3 import model as model_lib
    from tunix.models.llama3 import params as params_lib

    hf = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    config = model_lib.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=10_000,
        norm_eps=hf["rms_norm_eps"],
        weight_tying=hf["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = params_lib.create_model_from_safe_tensors(folder, config, mesh, jnp.float32)
    return model, config, mesh


def adamw(learning_rate: float) -> Any:
    """Return the optimizer with the settings and the clipping of our trainer's defaults."""
    import optax

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.0),
    )


def load(folder: str) -> tuple[Generate, str]:
    """Make a sampler over the llama3 model in the folder."""
    import importlib.metadata

    import jax
    from tunix.generate import sampler as sampler_lib

    model, config, mesh = llama3_of(folder)
    cache = sampler_lib.CacheConfig(
        cache_size=160 + 8,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = sampler_lib.Sampler(model, Ids(), cache)

    def generate(prompts: list[list[int]], lengths: list[int], concurrency: int) -> int:
        computed = 0
        for batch, longest in static_batches(prompts, lengths, concurrency):
            with jax.set_mesh(mesh):
                sampler(
                    [" ".join(map(str, p)) for p in batch],
                    max_generation_steps=longest,
                    max_prompt_length=len(batch[0]),
                    eos_tokens=[10**6],
                    seed=0,
                )
            computed += longest * len(batch)
        return computed

    return generate, importlib.metadata.version("google-tunix")


if __name__ == "__main__":
    serve(load)

"""Gemma 3's vision tower: from images to token embeddings. Pure functions; frozen.

    pixels [n, 3, S, S] ──patches──> SigLIP's encoder ──pool, norm, project──> [n, tokens, width]

SigLIP: Zhai et al. 2023 (arXiv:2303.15343). Equivalent to transformers' SiglipVisionModel and
Gemma3MultiModalProjector, in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

ENCODER, PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
"""Prefixes of the names of the tower's tensors."""
IMAGES_AT_ONCE = 8
"""Maximum number of images per call of the compiled tower."""

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The sizes of a tower."""

    width: int
    layers: int
    heads: int
    mlp: int  # inner width
    image_size: int  # pixels of a side
    patch: int  # pixels of a side
    norm_eps: float
    tokens: int  # per image, after the projector
    text_width: int  # width of their embeddings

    @property
    def patches(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch


@dataclass(frozen=True)
class VisionTower:
    """A tower with its weights from a directory; it is not trained."""

    spec: VisionSpec
    tensors: Tensors  # by their names in files, ENCODER and PROJECTOR
    config: Mapping[str, Any]  # config.json without its text part
    files: Mapping[str, str]  # contents of the preprocessing files, by name

    def __repr__(self) -> str:
        """Describe the tower in one line, without its weights."""
        return f"VisionTower({self.spec.layers} layers, {self.spec.tokens} tokens an image)"

    @cached_property
    def _run(self) -> Any:
        """The compiled tower, with its weights on the default device."""
        weights = {name: jnp.asarray(w, jnp.float32) for name, w in self.tensors.items()}
        return partial(jax.jit(partial(image_embeddings, self.spec)), weights)

    def embeddings(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the embeddings [n, tokens, text_width] of images [n, 3, S, S], on the host. The
        tower runs on the default device."""
        parts = []
        for start in range(0, len(pixels), IMAGES_AT_ONCE):
            part = pixels[start : start + IMAGES_AT_ONCE]
            size = 1 << (len(part) - 1).bit_length()  # few shapes to compile for
            padded = np.zeros((size, *pixels.shape[1:]), np.float32)
            padded[: len(part)] = part
            parts.append(np.asarray(self._run(padded))[: len(part)])
        return np.concatenate(parts)


def image_embeddings(spec: VisionSpec, weights: Mapping[str, Array], pixels: Array) -> Array:
    """Return embeddings [n, tokens, text_width] of pixels [n, 3, S, S], unscaled, for the decoder.

    weights: by their names in files, float32.
    """
    encoder = _under(weights, ENCODER)
    x = _embedded_patches(spec, _under(encoder, "embeddings."), pixels)
    for i in range(spec.layers):
        x = _encoder_layer(spec, _under(encoder, f"encoder.layers.{i}."), x)
    x = _layer_norm(x, _under(encoder, "post_layernorm."), spec.norm_eps)
    return _projected(spec, _under(weights, PROJECTOR), x)


def _under(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the weights whose names have a prefix, without the prefix."""
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _embedded_patches(spec: VisionSpec, w: Mapping[str, Array], pixels: Array) -> Array:
    """Return [n, patches, width]: projected pixels of each patch plus its position embedding."""
    n, p, side = len(pixels), spec.patch, spec.patches
    used = pixels[:, :, : side * p, : side * p]
    rows = used.reshape(n, 3, side, p, side, p).transpose(0, 2, 4, 1, 3, 5)
    kernel = w["patch_embedding.weight"].reshape(spec.width, -1)
    x = rows.reshape(n, side * side, -1) @ kernel.T + w["patch_embedding.bias"]
    return x + w["position_embedding.weight"]


def _encoder_layer(spec: VisionSpec, w: Mapping[str, Array], x: Array) -> Array:
    """Return x [n, patches, width] after bidirectional attention and an MLP."""
    n, t, d = x.shape
    y = _layer_norm(x, _under(w, "layer_norm1."), spec.norm_eps)
    q, k, v = (
        _linear(y, _under(w, f"self_attn.{name}_proj.")).reshape(n, t, spec.heads, -1)
        for name in "qkv"
    )
    scores = jnp.einsum("nqhk,nshk->nhqs", q, k) * q.shape[-1] ** -0.5
    mixed = jnp.einsum("nhqs,nshk->nqhk", jax.nn.softmax(scores, axis=-1), v)
    x = x + _linear(mixed.reshape(n, t, d), _under(w, "self_attn.out_proj."))
    y = _layer_norm(x, _under(w, "layer_norm2."), spec.norm_eps)
    inner = jax.nn.gelu(_linear(y, _under(w, "mlp.fc1.")), approximate=True)
    return x + _linear(inner, _under(w, "mlp.fc2."))


def _projected(spec: VisionSpec, w: Mapping[str, Array], x: Array) -> Array:
    """Return [n, tokens, text_width]: means over squares of patches, normed and projected."""
    n, side = len(x), round(spec.tokens**0.5)
    square = spec.patches // side
    grid = x.reshape(n, spec.patches, spec.patches, spec.width)[:, : side * square, : side * square]
    pooled = grid.reshape(n, side, square, side, square, spec.width).mean((2, 4))
    pooled = pooled.reshape(n, side * side, spec.width)
    size = jax.lax.rsqrt(jnp.mean(pooled**2, axis=-1, keepdims=True) + spec.norm_eps)
    return pooled * size * (1 + w["mm_soft_emb_norm.weight"]) @ w["mm_input_projection_weight"]


def _linear(x: Array, w: Mapping[str, Array]) -> Array:
    return x @ w["weight"].T + w["bias"]


def _layer_norm(x: Array, w: Mapping[str, Array], eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * w["weight"] + w["bias"]

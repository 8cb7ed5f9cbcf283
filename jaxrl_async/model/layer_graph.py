"""The layer class of a decoder's stack, split once into a graph definition and a dict of arrays."""

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from flax import nnx

from jaxrl_async.later import Later
from jaxrl_async.model.delta_layer import DeltaLayer, GatedLayer
from jaxrl_async.model.families.parts import LINEAR_STACK
from jaxrl_async.model.layers import Layer
from jaxrl_async.model.own_code import class_of
from jaxrl_async.model.spec import ModelSpec

if TYPE_CHECKING:
    from jaxrl_async.model import latent
else:
    latent = Later("jaxrl_async.model.latent")


@lru_cache(maxsize=16)
def layer_graph(
    spec: ModelSpec,
    *,
    stack: str = "layers",
    fused: bool = False,
    mixed: bool = False,
    eight_bits: bool = False,
    scales: str = "",
    adapted: tuple[str, ...] = (),
    chosen: bool = False,
    masked: bool = False,
    cached: bool = False,
) -> Any:
    """Return the layer's graph definition, made once; `nnx.merge(layer_graph(spec), weights)` is a
    Layer. cached: its keys and values have the form of the cache. For the rest, see Layer."""
    layer = partial(
        _layer_of(spec, stack, cached=cached), spec, stack=stack, fused=fused, mixed=mixed,
        eight_bits=eight_bits, scales=scales, adapted=adapted, chosen=chosen, masked=masked,
    )  # fmt: skip
    graph, _ = nnx.split(nnx.eval_shape(layer))
    return graph


def _layer_of(spec: ModelSpec, stack: str, *, cached: bool) -> Any:
    """Return the class of the layers in a decoder's stack."""
    if spec.own is not None:
        return class_of(spec.own)
    if stack == LINEAR_STACK:
        return DeltaLayer
    if spec.latent is None:
        return GatedLayer if spec.attention_gated else Layer
    return latent.AbsorbedLayer if cached else latent.LatentLayer

"""Functions that prefills and decode steps share. Pure."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jaxrl_async.later import Later
from jaxrl_async.mesh import SAMPLER_RULES
from jaxrl_async.model import decoder
from jaxrl_async.model.adapter_stack import layers_with_stack
from jaxrl_async.model.attention import ragged_paged_reference
from jaxrl_async.model.kernels import ragged_paged
from jaxrl_async.model.moe import experts_on, id_dtype, recording, route
from jaxrl_async.model.spec import ROWS_USED
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import EngineWeights
from jaxrl_async.sampler.device.sampling import AnyArray, Kernel
from jaxrl_async.sampler.device.sampling_kernel import sample_by_kernel

if TYPE_CHECKING:
    from jaxrl_async.model import gpu_pages, latent_pages
else:
    gpu_pages = Later("jaxrl_async.model.gpu_pages")
    latent_pages = Later("jaxrl_async.model.latent_pages")


def ragged_kernel(spec: EngineSpec) -> Callable[..., Array]:
    """Return the attention function on the pages for EngineSpec.ragged, with the arguments of
    kernels.ragged_paged."""
    if spec.on_gpu:
        return partial(gpu_pages.attend_pages, mesh=spec.mesh)
    if spec.on_tpu and spec.model.latent:
        return partial(
            latent_pages.attend_latent_pages, rank=spec.model.latent.rank, mesh=spec.mesh
        )
    return partial(ragged_paged, mesh=spec.mesh) if spec.on_tpu else ragged_paged_reference


def token_kernel(spec: EngineSpec) -> Kernel | None:
    """Return the kernel that samples tokens on the engine's devices; None: XLA's programs do it."""
    return partial(sample_by_kernel, mesh=spec.mesh) if spec.samples_by_kernel else None


def forward(
    spec: EngineSpec,
    weights: EngineWeights,
    token_ids: AnyArray,
    positions: AnyArray,
    attend: decoder.Attend,
    chosen: list[Array],
    *,
    adapter_slots: AnyArray | None,
    **more: Any,
) -> Array:
    """Run tokens through the decoder (decoder.flat_forward, with `more` of its arguments) in the
    spec's number types, with each token's adapter. With keeps_routes, append the experts' ids to
    `chosen`."""
    return decoder.flat_forward(
        spec.model,
        weights.params,
        layers_with_stack(spec.room, weights.layers, weights.stack, adapter_slots),
        token_ids,
        positions,
        attend,
        dtype=spec.dtype,
        mixed=spec.mixed,
        eight_bits=spec.eight_bits,
        experts=experts_on(spec.mesh, SAMPLER_RULES),
        choose=recording(chosen) if spec.keeps_routes else route,
        **more,
    )


def with_used_rows(spec: EngineSpec, weights: EngineWeights, used: Array) -> EngineWeights:
    """Return weights for tokens with a mask of the real ones [n] bool: our CPU products skip the
    others."""
    if not spec.cpu_products:
        return weights
    layers = [{**layer, ROWS_USED: used} for layer in weights.layers]
    return weights._replace(params={**weights.params, ROWS_USED: used}, layers=layers)


def stacked_routes(spec: EngineSpec, chosen: list[Array]) -> Array | None:
    """Stack layers of [n, k] to [n, layers, k] in the smallest integer type, 0 for layers without
    experts; None without keeps_routes."""
    if not spec.keeps_routes:
        return None
    ids = dict(zip(spec.model.routed_layers, chosen, strict=True))
    none = jnp.zeros_like(chosen[0])
    whole = [ids.get(layer, none) for layer in range(spec.model.layers)]
    return jnp.stack(whole, axis=1).astype(id_dtype(spec.model.experts))

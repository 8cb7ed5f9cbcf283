"""Mixture of experts: routing each token to experts, their weights, and computing them.

n tokens, k experts of each, E experts, D model width, F an expert's inner width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import TRAINER_RULES, Rules, spec_for
from jaxrl_async.model.spec import EXPERT_AXES, SCALE, ModelSpec

Experts = Callable[[Array, Array, Array, dict[str, Array]], Array]
"""(x [n, D], ids [n, k], their weights [n, k], matrices by name) -> [n, D]."""

Choose = Callable[[Array, int], tuple[Array, Array]]
"""(router's logits [n, E], k) -> ids [n, k], their weights [n, k]: `route`, or a wrapper of it."""


def route(logits: Array, k: int, forced_ids: Array | None = None) -> tuple[Array, Array]:
    """Return the k experts of each token and their weights: ids [..., k] int32, weights [..., k]
    float32.

    logits [..., experts]; weights g_i = exp(l_i) / sum_{j chosen} exp(l_j), which carry the
    gradient. forced_ids [..., k] of any integers replace the choice of the k largest logits, not
    the weights; for a token with a -1 among its ids the logits choose. Small numerical differences
    between sampler and trainer change the choice when logits are close, and the token's log-prob
    with it: forced_ids replay the sampler's choice (R3, "Stabilizing MoE Reinforcement Learning by
    Aligning Training and Inference Routers", arXiv:2510.11370, sec. 3).
    """
    logits = logits.astype(jnp.float32)
    ids = _largest(logits, k)
    if forced_ids is not None:
        known = jnp.all(forced_ids >= 0, axis=-1, keepdims=True)
        ids = jnp.where(known, forced_ids.astype(jnp.int32), ids)
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    return ids, jax.nn.softmax(chosen, axis=-1)


def _largest(logits: Array, k: int) -> Array:
    return jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1].astype(jnp.int32)


def noting(chosen: list[Array]) -> Choose:
    """Return `route` that also appends the ids that it chooses to `chosen`, layer by layer."""

    def choose(logits: Array, k: int) -> tuple[Array, Array]:
        ids, share = route(logits, k)
        chosen.append(ids)
        return ids, share

    return choose


def replaying(forced_ids: Array | None) -> tuple[Choose, list[Array]]:
    """Return `route` with forced_ids [n, k], and a list that it fills with whether the router would
    have chosen other experts for each token, [n] bool.

    forced_ids None: `route` itself; the list stays empty.
    """
    changed: list[Array] = []

    def choose(logits: Array, k: int) -> tuple[Array, Array]:
        ids, share = route(logits, k, forced_ids)
        free = _largest(logits.astype(jnp.float32), k)
        changed.append(jnp.any(jnp.sort(free, axis=-1) != jnp.sort(ids, axis=-1), axis=-1))
        return ids, share

    return (route if forced_ids is None else choose), changed


def id_dtype(experts: int) -> Any:
    """Return the NumPy type of stored and sent ids: 1 byte up to 128 experts, else 2; -1 means
    unknown."""
    return np.int8 if experts <= 128 else np.int16


# ---- the experts


def run_experts(
    x: Array, ids: Array, share: Array, matrices: dict[str, Array], *, first: Any = 0
) -> Array:
    """Return sum_i share_i down_i (silu(gate_i x) * up_i x) over each token's experts: [n, D].

    Args:
        x: [n, D].
        ids: [n, k] experts of each token.
        share: [n, k] their weights.
        matrices: gate and up [E, D, F], down [E, F, D], and the scales of 8-bit ones.
        first: id of the first expert in `matrices`; ids outside first .. first + E contribute 0.

    Tokens are sorted by expert, so that each expert's matrices multiply all of its tokens at once.
    """
    k, E = ids.shape[1], matrices["gate"].shape[0]
    local_ids = jnp.reshape(ids - first, -1)
    local_ids = jnp.where((local_ids >= 0) & (local_ids < E), local_ids, E)
    order = jnp.argsort(local_ids, stable=True)
    sizes = jnp.bincount(local_ids, length=E + 1)[:E].astype(jnp.int32)
    expert = local_ids[order]

    def times(rows: Array, name: str) -> Array:
        out = jax.lax.ragged_dot(
            rows, matrices[name].astype(rows.dtype), sizes, preferred_element_type=jnp.float32
        )
        if name + SCALE in matrices:
            out = out * matrices[name + SCALE][jnp.minimum(expert, E - 1)]
        return out.astype(rows.dtype)

    rows = x[order // k]
    out = times(jax.nn.silu(times(rows, "gate")) * times(rows, "up"), "down")
    weighed = out * share.reshape(-1)[order][:, None].astype(out.dtype)
    weighed = jnp.where((expert < E)[:, None], weighed, 0)
    return jnp.zeros_like(x).at[order // k].add(weighed)


def experts_on(mesh: Mesh | None, rules: Rules = TRAINER_RULES) -> Experts:
    """Return run_experts for tokens and experts that the rules divide over a mesh.

    If tokens are divided over `expert` too, each device gathers the tokens of its group, runs its
    own experts on them, and scatters the sums: no token is dropped, however uneven the choice, at
    the price of memory for all of them. Inner widths are divided over `tensor`.
    """
    if mesh is None or mesh.size == 1:
        return run_experts
    in_use = {**rules, "embed": None}  # whole, as Layout.gathered makes it

    def divided(x: Array, ids: Array, share: Array, matrices: dict[str, Array]) -> Array:
        tokens = spec_for(x.shape, ("tokens", None), mesh, rules)
        specs = {
            name: spec_for(matrix.shape, _axes_of(name), mesh, in_use)
            for name, matrix in matrices.items()
        }
        summed = {axis for spec in specs.values() for axis in spec if axis}
        token_axes = tokens[0] if isinstance(tokens[0], tuple) else (tokens[0],)
        gathers = "expert" in summed and "expert" in token_axes

        def local(x: Array, ids: Array, share: Array, matrices: dict[str, Array]) -> Array:
            first: Any = 0
            if "expert" in summed:
                first = jax.lax.axis_index("expert") * matrices["gate"].shape[0]
            if gathers:
                x, ids, share = (
                    jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, ids, share)
                )
            out = run_experts(x, ids, share, matrices, first=first)
            if gathers:
                out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
            rest = tuple(sorted(summed - {"expert"} if gathers else summed))
            return jax.lax.psum(out, rest) if rest else out

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(tokens, tokens, tokens, specs),
            out_specs=tokens,
            check_vma=False,
        )
        return run(x, ids, share, matrices)

    return divided


def _axes_of(name: str) -> tuple[str, ...]:
    axes = EXPERT_AXES[name.removesuffix(SCALE)]
    return (axes[0], axes[2]) if name.endswith(SCALE) else axes


def check_experts(spec: ModelSpec, mesh: Mesh, where: str) -> None:
    """Raise ConfigError if the axis expert of a mesh (`where`: mesh.trainer or mesh.sampler) cannot
    divide the model's experts."""
    ways = mesh.shape["expert"]
    if ways > 1 and (not spec.experts or spec.experts % ways):
        has = f"{spec.experts} in each layer" if spec.experts else "none: it is dense"
        raise ConfigError(
            f"{where}.expert ({ways}) must divide the model's experts, and it has {has}. Set it to "
            f"1 or a divisor, and give the devices to {where}.data, fsdp or tensor."
        )

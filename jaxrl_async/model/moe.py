"""Mixture of experts: routing of tokens to experts, their weights, and their computation.

n tokens, k experts per token, E experts, D model width, F inner width of an expert.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.mesh import TRAINER_RULES, Rules, divided, spec_for, trainer_rules
from jaxrl_async.model.dropout import dropped, per_device
from jaxrl_async.model.families.parts import (
    CLAMP_LIMIT,
    CLAMP_SLOPE,
    USUAL_ROUTER,
    Activation,
    ExpertRouter,
)
from jaxrl_async.model.quantize import PACKED, quantized_product, scales_among
from jaxrl_async.model.spec import (
    BIAS,
    EXPERT_AXES,
    LORA_A,
    LORA_B,
    LORA_DROP,
    LORA_OWN,
    SCALE,
    ModelSpec,
)

if TYPE_CHECKING:
    from jaxrl_async.model import grouped
else:
    grouped = Later("jaxrl_async.model.grouped")

Experts = Callable[[Array, Array, Array, dict[str, Array], Activation], Array]
"""(x [n, D], ids [n, k], their weights [n, k], matrices by name, activation) -> [n, D]."""


class Choose(Protocol):
    """`route` without forced ids, or a wrapper of it."""

    def __call__(
        self,
        logits: Array,
        k: int,
        *,
        router: ExpertRouter = USUAL_ROUTER,
        correction: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return ids [n, k] and their weights [n, k] for logits [n, E]."""


def route(
    logits: Array,
    k: int,
    forced_ids: Array | None = None,
    *,
    router: ExpertRouter = USUAL_ROUTER,
    correction: Array | None = None,
) -> tuple[Array, Array]:
    """Return the k experts of each token and their weights: ids [..., k] int32, weights [..., k]
    float32.

    The weights (see ExpertRouter) carry the gradient: with the usual router
    g_i = exp(l_i) / sum_{j chosen} exp(l_j). forced_ids replace the choice, not the weights; for a
    token with a -1 among its ids the router chooses. If logits are close, small numerical
    differences between sampler and trainer change the choice, and with it the token's log-prob.
    forced_ids replay the sampler's choice (R3, "Stabilizing MoE Reinforcement Learning by Aligning
    Training and Inference Routers", arXiv:2510.11370, sec. 3).

    Args:
        logits: [..., experts].
        k: experts per token.
        forced_ids: [..., k] of any integer type, or None.
        router: how experts are chosen and weighed.
        correction: [experts], added to the odds for the choice of experts.
    """
    logits = logits.astype(jnp.float32)
    ids = free_choice(logits, k, router, correction)
    if forced_ids is not None:
        known = jnp.all(forced_ids >= 0, axis=-1, keepdims=True)
        ids = jnp.where(known, forced_ids.astype(jnp.int32), ids)
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    if router.odds == "sigmoid":
        share = jax.nn.sigmoid(chosen)
        if router.sums_to_one:
            share = share / (jnp.sum(share, axis=-1, keepdims=True) + 1e-20)
    elif router.sums_to_one:
        share = jax.nn.softmax(chosen, axis=-1)
    else:
        share = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return ids, share if router.scale == 1 else share * router.scale


def free_choice(logits: Array, k: int, router: ExpertRouter, correction: Array | None) -> Array:
    """Return the ids [..., k] of the router's own choice, given float32 logits."""
    odds = jax.lax.stop_gradient(logits)
    if router.odds == "sigmoid":
        odds = jax.nn.sigmoid(odds)
    elif correction is not None or router.groups > 1:
        odds = jax.nn.softmax(odds, axis=-1)
    if correction is not None:
        odds = odds + jax.lax.stop_gradient(correction).astype(jnp.float32)
    if router.groups > 1:
        odds = _in_best_groups(odds, router)
    return jax.lax.top_k(odds, k)[1].astype(jnp.int32)


def _in_best_groups(odds: Array, router: ExpertRouter) -> Array:
    """Return odds with minus infinity outside of a token's chosen groups."""
    grouped = odds.reshape(*odds.shape[:-1], router.groups, -1)
    best = jax.lax.top_k(grouped, min(router.best_of_group, grouped.shape[-1]))[0].sum(axis=-1)
    chosen = jax.lax.top_k(best, router.groups_per_token)[1]
    inside = jnp.any(jnp.arange(router.groups)[:, None] == chosen[..., None, :], axis=-1)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(odds.shape)


def recording(chosen: list[Array]) -> Choose:
    """Return `route` that also appends the chosen ids to `chosen`, layer by layer."""

    def choose(
        logits: Array,
        k: int,
        *,
        router: ExpertRouter = USUAL_ROUTER,
        correction: Array | None = None,
    ) -> tuple[Array, Array]:
        ids, share = route(logits, k, router=router, correction=correction)
        chosen.append(ids)
        return ids, share

    return choose


def replaying(forced_ids: Array | None) -> tuple[Choose, list[Array]]:
    """Return `route` with forced_ids [n, k], and a list to which it appends, per layer, whether the
    router would have chosen other experts for each token, [n] bool.

    forced_ids None: `route` itself; the list stays empty.
    """
    changed: list[Array] = []

    def choose(
        logits: Array,
        k: int,
        *,
        router: ExpertRouter = USUAL_ROUTER,
        correction: Array | None = None,
    ) -> tuple[Array, Array]:
        ids, share = route(logits, k, forced_ids, router=router, correction=correction)
        free = free_choice(logits.astype(jnp.float32), k, router, correction)
        changed.append(jnp.any(jnp.sort(free, axis=-1) != jnp.sort(ids, axis=-1), axis=-1))
        return ids, share

    return (route if forced_ids is None else choose), changed


def counting(choose: Choose, real: Array, *, learns: bool) -> tuple[Choose, list[ExpertLoad]]:
    """Return `choose` and a list to which it appends each call's load: [E], [E] and [].

    Args:
        choose: routes the tokens.
        real: [n] bool, tokens other than padding.
        learns: whether the odds carry a gradient.
    """
    loads: list[ExpertLoad] = []

    def counted(
        logits: Array,
        k: int,
        *,
        router: ExpertRouter = USUAL_ROUTER,
        correction: Array | None = None,
    ) -> tuple[Array, Array]:
        ids, share = choose(logits, k, router=router, correction=correction)
        odds = all_odds(logits if learns else jax.lax.stop_gradient(logits), router)
        sent = (ids[..., None] == jnp.arange(logits.shape[-1])) & real[:, None, None]
        loads.append(
            ExpertLoad(
                jnp.sum(sent, axis=(0, 1), dtype=jnp.int32),
                jnp.sum(jnp.where(real[:, None], odds, 0.0), axis=0),
                jnp.sum(real, dtype=jnp.int32),
            )
        )
        return ids, share

    return counted, loads


def all_odds(logits: Array, router: ExpertRouter) -> Array:
    """Return the probabilities of all experts, [..., experts] float32, with sum 1: a sigmoid
    router's are divided by their sum (DeepSeek-V3, arXiv:2412.19437, eq. 19)."""
    logits = logits.astype(jnp.float32)
    if router.odds == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    odds = jax.nn.sigmoid(logits)
    return odds / (jnp.sum(odds, axis=-1, keepdims=True) + 1e-20)


def load_by_layer(runs: list[list[ExpertLoad]]) -> ExpertLoad | None:
    """Join the loads of runs of layers to one load of all layers, in order; None: no experts.

    Each run has one load per layer with experts in an iteration of its loop, [iterations, ...].
    """
    loads = [jax.tree.map(lambda *a: jnp.stack(a, axis=1), *run) for run in runs if run]
    if not loads:
        return None
    chosen, odds, tokens = jax.tree.map(lambda *a: jnp.concatenate(a), *map(_in_order, loads))
    return ExpertLoad(chosen, odds, tokens[0])


def _in_order(load: ExpertLoad) -> ExpertLoad:
    """Return [iterations, layers per iteration, ...] as [layers, ...]."""
    return ExpertLoad(*(a.reshape(-1, *a.shape[2:]) for a in load))


def id_dtype(experts: int) -> Any:
    """Return the NumPy type of stored and sent ids: 1 byte up to 128 experts, else 2; -1 is
    unknown."""
    return np.int8 if experts <= 128 else np.int16


# ---- the experts


def run_experts(
    x: Array,
    ids: Array,
    share: Array,
    matrices: dict[str, Array],
    activation: Activation = "silu",
    *,
    first: Any = 0,
) -> Array:
    """Return sum_i share_i down_i (silu(gate_i x) * up_i x) over each token's experts, with
    optional biases: [n, D].

    Args:
        x: [n, D].
        ids: [n, k] experts of each token.
        share: [n, k] their weights.
        matrices: gate and up [E, D, F], down [E, F, D], scales of quantised matrices, adapters with
            the columns that each token uses (adapter_stack.py), and biases [E, F] and [E, D].
        activation: replaces silu, see activations.gated.
        first: id of the first expert in `matrices`; ids outside first .. first + E contribute 0.

    Tokens are sorted by expert, so each expert's matrices multiply all of its tokens together.
    """
    k, E = ids.shape[1], matrices["gate"].shape[0]
    local_ids = jnp.reshape(ids - first, -1)
    local_ids = jnp.where((local_ids >= 0) & (local_ids < E), local_ids, E)
    order = jnp.argsort(local_ids, stable=True)
    sizes = jnp.bincount(local_ids, length=E + 1)[:E].astype(jnp.int32)
    expert, own = local_ids[order], matrices.get(LORA_OWN)

    scales = scales_among(matrices)

    def summed(rows: Array, weights: Array) -> Array:
        """Multiply each row by its expert's matrix; float32."""
        return grouped.grouped_product(rows, weights.astype(rows.dtype), sizes, jnp.float32)

    def dots(rows: Array, name: str) -> Array:
        return grouped.grouped_product(rows, matrices[name].astype(rows.dtype), sizes, rows.dtype)

    def times(rows: Array, name: str) -> Array:
        if scales:
            scale = matrices[name + scales]
            scale = scale[jnp.minimum(expert, E - 1)] if scales == SCALE else scale
            out = quantized_product(rows, matrices[name], scale, scales, summed)
        else:
            out = dots(rows, name)
        if name + LORA_A in matrices:
            seen = dropped(rows, matrices[LORA_DROP], name) if LORA_DROP in matrices else rows
            low = dots(seen, name + LORA_A)
            low = low if own is None else jnp.where(own[order // k], low, 0)
            return out.astype(rows.dtype) + dots(low, name + LORA_B)
        return out.astype(rows.dtype)

    def with_bias(rows: Array, name: str) -> Array:
        out = times(rows, name)
        if name + BIAS not in matrices:
            return out
        return out + matrices[name + BIAS][jnp.minimum(expert, E - 1)].astype(out.dtype)

    rows = x[order // k]
    inner = gated(activation, with_bias(rows, "gate"), with_bias(rows, "up"))
    out = with_bias(inner, "down")
    weighed = out * share.reshape(-1)[order][:, None].astype(out.dtype)
    weighed = jnp.where((expert < E)[:, None], weighed, 0)
    return jnp.zeros_like(x).at[order // k].add(weighed)


def experts_on(mesh: Mesh | None, rules: Rules = TRAINER_RULES) -> Experts:
    """Return run_experts for tokens and experts that the rules divide over a mesh.

    If tokens are also divided over `expert`, each device gathers the tokens of its group, runs its
    own experts on them, and scatters the sums. No token is dropped, even with uneven routing, at
    the price of memory for all tokens. Inner widths are divided over `tensor`.
    """
    if mesh is None or mesh.size == 1:
        return run_experts

    def sharded(
        x: Array,
        ids: Array,
        share: Array,
        matrices: dict[str, Array],
        activation: Activation = "silu",
    ) -> Array:
        here = trainer_rules() if rules is TRAINER_RULES else rules
        in_use = {**here, "embed": None}  # gathered by Layout.gathered
        tokens = spec_for(x.shape, ("tokens", None), mesh, here)
        specs = {
            name: spec_for(matrix.shape, _axes_of(name), mesh, in_use)
            for name, matrix in matrices.items()
            if name != LORA_OWN
        }
        summed = {axis for spec in specs.values() for axis in spec if axis}
        specs |= {LORA_OWN: tokens} if LORA_OWN in matrices else {}
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
                if LORA_OWN in matrices:
                    own = jax.lax.all_gather(matrices[LORA_OWN], "expert", axis=0, tiled=True)
                    matrices = {**matrices, LORA_OWN: own}
            if LORA_DROP in matrices:
                parts = {axis for axis in (*token_axes, "expert") if axis in mesh.axis_names}
                matrices = {**matrices, LORA_DROP: per_device(matrices[LORA_DROP], sorted(parts))}
            if "down" + BIAS in matrices:
                matrices = _with_one_bias(matrices, sorted(summed - {"expert"}))
            out = run_experts(x, ids, share, matrices, activation, first=first)
            if gathers:
                out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
            rest = tuple(sorted(summed - {"expert"} if gathers else summed))
            return jax.lax.psum(out, rest) if rest else out

        run = divided(local, mesh, (tokens, tokens, tokens, specs), tokens)
        out: Array = run(x, ids, share, matrices)
        return out

    return sharded


def _with_one_bias(matrices: dict[str, Array], axes: list[str]) -> dict[str, Array]:
    """Return the matrices with down's bias only on the first device along these axes, since the
    devices' outputs are summed."""
    bias = matrices["down" + BIAS]
    for axis in axes:
        bias = jnp.where(jax.lax.axis_index(axis) == 0, bias, 0)
    return {**matrices, "down" + BIAS: bias}


def _axes_of(name: str) -> tuple[str | None, ...]:
    if name == LORA_DROP:
        return (None,)
    expert, inputs, outputs = EXPERT_AXES[name.partition("_")[0]]
    kinds = {
        **dict.fromkeys(PACKED.values(), (expert, inputs, outputs)),
        SCALE: (expert, outputs),
        BIAS: (expert, outputs),
        LORA_A: (expert, inputs, "rank"),
        LORA_B: (expert, "rank", outputs),
    }
    return next(
        (axes for end, axes in kinds.items() if name.endswith(end)), (expert, inputs, outputs)
    )


def check_experts(spec: ModelSpec, mesh: Mesh, where: str) -> None:
    """Raise ConfigError if the axis `expert` of a mesh (`where`: mesh.trainer or mesh.sampler) does
    not divide the model's experts."""
    ways = mesh.shape["expert"]
    if ways > 1 and (not spec.experts or spec.experts % ways):
        has = f"{spec.experts} in each layer" if spec.experts else "none: it is dense"
        raise ConfigError(
            f"{where}.expert ({ways}) must divide the model's number of experts, but it has {has}. "
            f"Set it to 1 or a divisor, and use the devices for {where}.data, fsdp or tensor."
        )


# ---- the gated activations of an MLP and of experts


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated(kind: Activation, gate: Array, up: Array) -> Array:
    """Return activation(gate) * up. clamped_silu (gpt-oss) clamps both and uses up + 1."""
    if kind == "clamped_silu":
        gate = jnp.minimum(gate, CLAMP_LIMIT)
        up = jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT)
        return gate * jax.nn.sigmoid(CLAMP_SLOPE * gate) * (up + 1)
    return ACTIVATIONS[kind](gate) * up

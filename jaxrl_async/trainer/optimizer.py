"""The optimizer, from configuration: global-norm clipping, AdamW, Muon or a user's own, a schedule,
and rounding."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike
from pydantic import Field

from jaxrl_async.algorithms.registry import Above0, NoFacts, Registry, Whole
from jaxrl_async.config import schema
from jaxrl_async.config.userfile import is_own
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.lora import RANK
from jaxrl_async.model.spec import Params, Weight, contracted

Below1 = Annotated[float, Field(ge=0, lt=1)]
Sides = tuple[tuple[int, ...], tuple[int, ...]]
SMALL_WEIGHTS = {
    "embed": Weight(shape=(6, 4), axes=("vocab", "embed"), init="normal", fan_in=4),
    "up": Weight(shape=(2, 4, 3), axes=("layers", "embed", "mlp"), init="normal", fan_in=4),
    "norm": Weight(shape=(4,), axes=("embed",), init="ones"),
}
"""Weights on which a user's optimizer is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerInputs:
    """What an optimizer is made from.

    Trees have the structure of the trained weights: all weights, an adapter's, or a critic's.
    """

    weights: Any  # tree of Weight: shapes, and the meaning of their dimensions
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float

    @property
    def learning_rate(self) -> optax.Schedule:
        """1 at every step: the caller multiplies an update by the learning rate of its step. A
        schedule, not a number, since its count is in every checkpoint."""
        return optax.constant_schedule(1.0)

    @property
    def decayed(self) -> Any:
        """A tree of bool: True where weight decay applies."""
        return decayed(self.weights)


def decayed(weights: object) -> Any:
    """Return a tree of bool: True where weight decay applies to the declared weight."""
    return _by_weight(lambda weight: weight.is_decayed, weights)


OptimizerFn = Callable[..., optax.GradientTransformation]  # (OptimizerInputs, **settings)
optimizer: Registry[OptimizerFn, NoFacts] = Registry("optimizer", "trainer.optimizer", NoFacts)


@optimizer
def adamw(x: OptimizerInputs) -> optax.GradientTransformation:
    """AdamW with trainer.beta1, beta2 and epsilon (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return _adamw(x, mask=x.decayed)


@optimizer
def muon(
    x: OptimizerInputs, *, beta: Below1 = 0.95, steps: Whole = 5, rms: Above0 = 0.2
) -> optax.GradientTransformation:
    """Muon for hidden matrices, AdamW for the embedding, the head, norms and biases.

    The Nesterov momentum of a matrix [in, out] is made nearly orthogonal by Newton-Schulz steps
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon), and times rms sqrt(max(in, out)), so
    that its root mean square is about AdamW's and a learning rate for AdamW fits (Liu et al. 2025,
    arXiv:2502.16982, eq. 4). Layers, experts and an adapter's A and B are separate matrices.
    """
    from optax import contrib

    def numbers(weight: Weight) -> Any:
        sides = _sides(weight)
        return contrib.MuonDimensionNumbers(*sides) if sides else optax.MaskedNode()

    def size(weight: Weight) -> Any:
        sides = _sides(weight)
        if sides is None:
            return optax.MaskedNode()
        return rms * math.sqrt(max(math.prod(weight.shape[i] for i in side) for side in sides))

    def decay(of_matrices: bool) -> Any:
        others = optax.MaskedNode()
        return _by_weight(
            lambda w: w.is_decayed if (_sides(w) is not None) == of_matrices else others, x.weights
        )

    sizes, of_each = _by_weight(size, x.weights), _by_weight(numbers, x.weights)
    orthogonal = contrib.scale_by_muon(
        ns_steps=steps, beta=beta, eps=x.epsilon, weight_dimension_numbers=lambda _: of_each
    )
    hidden = optax.chain(
        orthogonal,
        optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, sizes)),
        optax.add_decayed_weights(x.weight_decay, decay(True)),
        optax.scale_by_learning_rate(x.learning_rate),
    )
    names = _by_weight(lambda w: "muon" if _sides(w) else "adamw", x.weights)
    return optax.partition({"muon": hidden, "adamw": _adamw(x, mask=decay(False))}, names)


def _adamw(x: OptimizerInputs, *, mask: object) -> optax.GradientTransformation:
    return optax.adamw(
        x.learning_rate,
        b1=x.beta1,
        b2=x.beta2,
        eps=x.epsilon,
        weight_decay=x.weight_decay,
        mask=mask,
    )


def _sides(weight: Weight) -> Sides | None:
    """Return a hidden matrix's dimensions that its product sums over, and the others; None: the
    weight is no hidden matrix."""
    shape, stacked = weight.shape, weight.stacked
    if len(shape) - stacked < 2 or "vocab" in weight.axes:
        return None
    if RANK in weight.axes:
        rank = weight.axes.index(RANK)
        inputs = range(stacked, rank) or range(stacked, stacked + 1)
    elif weight.init == "normal":
        inputs = contracted(weight)
    else:
        return None
    outputs = range(inputs.stop, len(shape))
    return (tuple(inputs), tuple(outputs)) if outputs else None


def _by_weight(function: Callable[[Weight], object], weights: object) -> Any:
    return jax.tree.map(function, weights, is_leaf=lambda w: isinstance(w, Weight))


def make_schedule(
    section: schema.TrainerSection, *, learning_rate: float, total_steps: int
) -> optax.Schedule:
    """Return the learning rate at update 0, 1, ...: a linear warm-up to the peak, then the decay.

    Update n of the warm-up (from 1) has n / warmup_steps of the peak: no update has rate 0. Linear
    and cosine decay would reach 0 one update after the last. total_steps: the configured number of
    updates; the index of an update is fractional if fewer are made.
    """
    warmup, decay_steps = section.warmup_steps, max(total_steps - section.warmup_steps, 1)

    def schedule(step: Any) -> Array:
        rise = jnp.minimum((step + 1) / max(warmup, 1), 1.0)
        progress = jnp.clip((step - warmup) / decay_steps, 0.0, 1.0)
        return jnp.asarray(learning_rate * rise * _decay(section.schedule, progress))

    return schedule


def _decay(name: str, progress: Array) -> Array:
    if name == "linear":
        return 1.0 - progress
    if name == "cosine":
        return (1.0 + jnp.cos(jnp.pi * progress)) / 2
    return jnp.ones_like(progress)


def make_optimizer(
    section: schema.TrainerSection, *, weights: object
) -> optax.GradientTransformation:
    """Chain clip_by_global_norm and trainer.optimizer at a learning rate of 1.

    The caller multiplies by the learning rate, which need not depend on the number of updates.
    weights: tree of Weight like the parameters.
    """
    chosen = optimizer.resolve(section.optimizer)(
        OptimizerInputs(
            weights=weights,
            weight_decay=section.weight_decay,
            beta1=section.beta1,
            beta2=section.beta2,
            epsilon=section.epsilon,
        )
    )
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), chosen)


def check_optimizer(section: schema.TrainerSection) -> None:
    """Try the optimizer on three small weights. Raise ConfigError if it is unknown, rejects its
    arguments, or, as a user's own, fails or makes no step downhill."""
    optimizer.resolve(section.optimizer)
    if not is_own(name := schema.name_of(section.optimizer)):
        return
    where = f"trainer.optimizer = {name!r}"
    try:
        made = make_optimizer(section, weights=SMALL_WEIGHTS)
        params = _by_weight(lambda w: jnp.ones(w.shape, jnp.float32), SMALL_WEIGHTS)
        grads = _by_weight(
            lambda w: jnp.linspace(-1, 1, math.prod(w.shape)).reshape(w.shape), SMALL_WEIGHTS
        )
        updates, _ = jax.jit(made.update)(grads, made.init(params), params)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} fails on a matrix, a norm and an embedding: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. It is called as optimizer(inputs), inputs being "
            "a trainer.optimizer.OptimizerInputs, and returns an optax.GradientTransformation."
        ) from error
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise ConfigError(f"{where} must return an update in the shape of each weight.")
    pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True)
    downhill = sum(float(jnp.vdot(u, g)) for u, g in pairs)
    if not downhill < 0:
        raise ConfigError(
            f"{where}: its first update is not downhill (its product with the gradient is "
            f"{downhill:g}, which must be below 0). Pass inputs.learning_rate to an optax "
            "optimizer, or end your chain with optax.scale(-1)."
        )


def needs_masters(section: schema.TrainerSection, param_dtype: DTypeLike) -> bool:
    """Return whether the optimizer moves float32 copies of the weights."""
    return jnp.dtype(param_dtype) != jnp.float32 and section.rounding == "masters"


def optimizer_bytes(section: schema.TrainerSection, param_dtype: DTypeLike) -> int:
    """Return the optimizer's bytes per weight: two moments, as AdamW's (Muon has one for a hidden
    matrix), and a master if kept."""
    return 12 if needs_masters(section, param_dtype) else 8


def stochastically_rounded(key: Array, values: Array, dtype: DTypeLike) -> Array:
    """Round float32 stochastically to a neighbour in bfloat16; the expected value is exact.

    Gupta et al. 2015 (arXiv:1502.02551), sec. 3. Random bits are added below bfloat16's last bit,
    and then cut off. Non-finite values are unchanged.
    """
    assert jnp.dtype(dtype) == jnp.bfloat16, "float32 has exactly 16 bits more"
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    moved = bits + jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type(moved & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(values), cut, values).astype(dtype)


def rounded_tree(key: Array, tree: object, dtype: DTypeLike) -> Any:
    """Round all leaves by `stochastically_rounded`, each with different random bits."""
    leaves, structure = jax.tree.flatten(tree)
    keys = [jax.random.fold_in(key, index) for index in range(len(leaves))]
    rounded = [stochastically_rounded(k, x, dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, rounded)


def state_shardings(
    optimizer: optax.GradientTransformation,
    params: Params,
    param_shardings: object,
    replicated: Any,
) -> Any:
    """Return the shardings of an optimizer's state: arrays like weights as these, others
    replicated.

    An array is like a weight if its path ends with the weight's and its shape is the same
    (optax.tree_map_params fails on a state of part of the weights, such as Muon's).
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    like = {
        (path, leaf.shape): sharding
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(param_shardings), strict=True)
    }

    def of(path: tuple[object, ...], leaf: Any) -> Any:
        ends = (path[start:] for start in range(len(path) + 1))
        return next(
            (like[end, leaf.shape] for end in ends if (end, leaf.shape) in like), replicated
        )

    return jax.tree_util.tree_map_with_path(of, jax.eval_shape(optimizer.init, params))

"""The ModelSpec of a user's own decoder, from a configuration or from a directory that a run saved.
It is checked before use."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.errors import CheckpointError, ConfigError, JaxrlError
from jaxrl_async.mesh import TRAINER_RULES
from jaxrl_async.model.decoder import layer_graph
from jaxrl_async.model.families.parts import LayerKind, Rope
from jaxrl_async.model.layers import all_angles, initial
from jaxrl_async.model.own_code import OWN_TYPE, OwnCode, check_trusted, class_of, load_code
from jaxrl_async.model.own_layer import OwnLayer
from jaxrl_async.model.quantize import scales_among
from jaxrl_async.model.spec import (
    LORA_A,
    LORA_B,
    SCALE,
    ModelSpec,
    Params,
    Weight,
    is_stack,
    weight_table,
)

log = logging.getLogger(__name__)

OWN_FAMILY = "own"
"""ModelSpec.family of a user's own decoder."""
TOKENS = 6
"""Number of tokens on which a layer is checked."""
TRIED_WEIGHTS = 2**24
"""Maximum number of weights of a layer that is checked with numbers, not only with shapes."""
SIZES = ("vocab", "layers", "width", "heads", "kv_heads", "head_dim", "mlp", "max_positions")
FIELDS = ("spec", "fused", "mixed", "scales", "adapted", "chosen", "stack")
"""Attributes of a layer that are not weights."""
REQUIRED = ("weights", "qkv", "finish")


def own_spec(named: str, architecture: ArchitectureSection, vocab_size: int) -> ModelSpec:
    """Return the decoder with layers FILE.py:CLASS and a configuration's sizes. Raises
    ConfigError."""
    a, code = architecture, load_code(named)
    _check_class(code)
    kind = LayerKind(rope=Rope(theta=a.rope_theta), window=a.window or 0)
    spec = ModelSpec(
        family=OWN_FAMILY,
        vocab=vocab_size,
        layers=a.layers,
        width=a.width,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        mlp=a.mlp,
        tied=a.tied,
        pattern=(kind,),
        own=code,
    )
    pattern = _called(code, "pattern", lambda: class_of(code).pattern(spec))
    kinds = isinstance(pattern, tuple) and all(isinstance(kind, LayerKind) for kind in pattern)
    if not pattern or not kinds or any(kind.stack != "layers" for kind in pattern):
        raise _wrong(
            code,
            f"pattern returned {str(pattern)[:80]}",
            "Return a tuple of LayerKind(window=..., rope=...), all of the stack `layers`.",
        )
    spec = dataclasses.replace(spec, pattern=pattern)
    check_own(spec)
    return spec


def read_own(config: Mapping[str, object], where: str) -> ModelSpec:
    """Return the decoder of a config.json, if its code is trusted (named by the user). Raises
    CheckpointError, ConfigError."""
    fields = config.get("spec")
    try:
        assert isinstance(fields, dict) and isinstance(fields["own"], dict)
        spec = ModelSpec.from_fields(fields)
        own = spec.own
        texts = own is not None and all(type(t) is str for t in dataclasses.astuple(own))
        assert texts and spec.pattern and all(type(getattr(spec, n)) is int for n in SIZES)
        assert all(0 < getattr(spec, n) < 2**31 for n in SIZES)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: `spec` was not written by this version ({type(error).__name__}: {error})."
            " Copy the directory again."
        ) from None
    assert own is not None
    check_trusted(own, where)
    spec = dataclasses.replace(
        spec, own=dataclasses.replace(own, file=str(Path(where).parent / Path(own.file).name))
    )
    check_own(spec)
    return spec


def written_own(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a user's own decoder."""
    assert spec.own is not None
    fields = dataclasses.asdict(spec)
    fields["own"]["file"] = Path(spec.own.file).name
    return {
        "architectures": [spec.own.name],
        "model_type": OWN_TYPE,
        "vocab_size": spec.vocab,
        "spec": fields,
        **spec.token_ids(),
    }


def check_own(spec: ModelSpec) -> None:
    """Trace a layer of a user's own decoder, and the functions around it. Raises ConfigError for an
    invalid weight or result; does nothing for other decoders."""
    if spec.own is None:
        return
    _check_class(spec.own)
    _check_table(spec, spec.own, "weights")
    _check_table(spec, spec.own, "outer_weights")
    for kind, dtype in itertools.product(dict.fromkeys(spec.pattern), (jnp.float32, jnp.bfloat16)):
        _check_layer(spec, spec.own, kind, dtype)
    _check_around(spec, spec.own)


def check_numbers(spec: ModelSpec) -> None:
    """Compute one layer of a user's own decoder and its gradient from random weights. Raises
    ConfigError for NaN; does nothing for layers above TRIED_WEIGHTS."""
    assert spec.own is not None, "of a user's own decoder"
    table = _layer_weights(spec)
    if sum(math.prod(w.shape) for w in table.values()) > TRIED_WEIGHTS:
        log.info("a layer of %s is too large to be tried for NaN before the run", spec.own.name)
        return
    keys = jax.random.split(jax.random.key(0), len(table) + 1)
    weights = {
        n: initial(w, k, jnp.float32) for (n, w), k in zip(table.items(), keys, strict=False)
    }
    x = jax.random.normal(keys[-1], (TOKENS, spec.width))
    kind = spec.pattern[0]

    def total(weights: Params, x: Array) -> Any:
        out = _layer_step(spec, kind, weights, x)[3]
        return out.sum(), out

    (_, out), slopes = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(weights, x)
    if not bool(jnp.isfinite(out).all()):
        raise _wrong(
            spec.own,
            "qkv and finish give NaN or infinite numbers for random weights and states",
            "Look for divisions by 0, and for roots and logarithms of negative numbers.",
        )
    bad = [name for name, slope in slopes[0].items() if not bool(jnp.isfinite(slope).all())]
    if not bool(jnp.isfinite(slopes[1]).all()):
        bad.append("the hidden states")
    if bad:
        raise _wrong(
            spec.own,
            f"the gradient of {bad[0]} is NaN or infinite",
            "Look for roots at 0 and for jnp.where around a result that is not finite: choose the "
            "input instead.",
        )


def check_own_base(spec: ModelSpec, base: Params) -> None:
    """Trace a layer of a user's own decoder with matrices in 8 or 4 bits. Raises ConfigError if it
    cannot use quantised matrices.

    base: shapes of all weights (frozen_base.base_shapes).
    """
    assert spec.own is not None, "of a user's own decoder"
    stack = base["layers"]
    graph = layer_graph(spec, scales=scales_among(stack))
    weights = {n: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for n, x in stack.items()}
    for kind in dict.fromkeys(spec.pattern):
        _trace_layer(spec, spec.own, kind, graph, weights, jnp.float32)


def _wrong(code: OwnCode, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{code.name} of {code.file}: {what}. {remedy}")


def _called(code: OwnCode, method: str, ask: Callable[[], object]) -> Any:
    """Return the result of a user's method. Raises ConfigError if it fails."""
    try:
        return ask()
    except JaxrlError:
        raise
    except Exception as error:
        raise _wrong(
            code,
            f"{method} fails: {type(error).__name__}: {str(error)[:400]}",
            "It is traced for shapes before the run; correct the method.",
        ) from error


def _check_class(code: OwnCode) -> None:
    cls = class_of(code)
    if not issubclass(cls, OwnLayer):
        raise _wrong(
            code, "is not an OwnLayer", "Derive it from jaxrl_async.model.own_layer.OwnLayer."
        )
    missing = [name for name in REQUIRED if getattr(cls, name) is getattr(OwnLayer, name)]
    if missing:
        raise _wrong(code, f"lacks {', '.join(missing)}", f"Define {', '.join(REQUIRED)}.")


def _check_table(spec: ModelSpec, code: OwnCode, method: str) -> None:
    """Check the weights that a class declares."""
    cls = class_of(code)
    table = _called(code, method, lambda: getattr(cls, method)(spec))
    if not isinstance(table, dict) or not all(isinstance(w, Weight) for w in table.values()):
        raise _wrong(code, f"{method} returned {type(table).__name__}", "Return {name: Weight}.")
    for name, weight in table.items():
        if problem := _problem(cls, method, name, weight):
            raise _wrong(code, f"{method}: {name!r} {problem[0]}", problem[1])


def _problem(cls: object, method: str, name: object, weight: Weight) -> tuple[str, str] | None:
    """Return the problem of a weight and its remedy; None: the weight is valid."""
    outer = method == "outer_weights"
    taken = ("embed", "final_norm", "lm_head", "head") if outer else ("qkv_proj", "gate_up")
    reserved = not outer and (hasattr(cls, str(name)) or str(name) in FIELDS)
    ends = (SCALE, LORA_A, LORA_B)
    if not isinstance(name, str) or not name.isidentifier():
        return "is not a valid name", "Use letters, digits and underscores."
    if name in taken or reserved or name.endswith(ends) or (outer and is_stack(name)):
        return "is a reserved name", "Choose another name."
    if len(weight.shape) != len(weight.axes):
        return (
            f"has {len(weight.shape)} dimensions {list(weight.shape)} and {len(weight.axes)} axes "
            f"{list(weight.axes)}",
            "Name an axis for each dimension; '' for a dimension that no mesh divides.",
        )
    if not weight.shape or not all(type(n) is int and n > 0 for n in weight.shape):
        return f"has the shape {list(weight.shape)}", "Give sizes above 0."
    free = {"", *TRAINER_RULES} - {"layers", "expert", "batch", "length", "tokens", "looked_up"}
    if unknown := [axis for axis in weight.axes if axis not in free]:
        return f"has an axis {unknown[0]!r}", f"Known: {', '.join(sorted(free - {''}))}, or ''."
    if weight.init not in ("normal", "ones", "zeros"):
        return f"has init {weight.init!r}", "Use normal, ones or zeros."
    sums = list(itertools.accumulate(weight.shape, lambda a, b: a * b))
    if weight.init == "normal" and not outer and weight.fan_in not in sums[:-1]:
        return (
            f"is a matrix {list(weight.shape)} with fan_in {weight.fan_in}",
            f"Its first dimensions are summed over: fan_in is one of {sums[:-1]}; see weight().",
        )
    return None


def _layer_weights(spec: ModelSpec) -> dict[str, Weight]:
    """Return the weights of one layer."""
    table = weight_table(spec)["layers"]
    return {n: dataclasses.replace(w, shape=w.shape[1:], axes=w.axes[1:]) for n, w in table.items()}


def _layer_step(spec: ModelSpec, kind: LayerKind, weights: Params, x: Array) -> tuple[Any, ...]:
    """Return q, k, v of a layer, and the hidden states after it; attention just sums the values."""
    layer = nnx.merge(layer_graph(spec), weights)
    angles = all_angles(spec, jnp.arange(x.shape[0]))[kind.rope]
    q, k, v = layer.qkv(x, angles)
    attended = jnp.repeat(jnp.cumsum(v, axis=0), spec.heads // spec.kv_heads, axis=1)
    attended = attended + 0 * (q.sum() + k.sum())
    return q, k, v, layer.finish(x, attended.astype(x.dtype))


def _check_layer(spec: ModelSpec, code: OwnCode, kind: LayerKind, dtype: DTypeLike) -> None:
    """Trace qkv and finish, and compare the shapes and types of their results."""
    n, d, k = TOKENS, spec.width, spec.head_dim
    weights = {
        name: jax.ShapeDtypeStruct(w.shape, dtype) for name, w in _layer_weights(spec).items()
    }
    found, after = _trace_layer(spec, code, kind, layer_graph(spec), weights, dtype)
    wanted = [(n, heads, k) for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    _compare(code, "qkv", found, wanted, dtype)
    _compare(code, "finish", (after,), [(n, d)], dtype)


def _trace_layer(
    spec: ModelSpec,
    code: OwnCode,
    kind: LayerKind,
    graph: object,
    weights: Params,
    dtype: DTypeLike,
) -> tuple[Any, Any]:
    """Return the shapes of the results of qkv and finish.

    Args:
        spec: spec of the decoder.
        code: its class.
        kind: kind of the layer.
        graph: result of decoder.layer_graph.
        weights: shapes of one layer's weights.
        dtype: type of the hidden states.
    """
    x = jax.ShapeDtypeStruct((TOKENS, spec.width), dtype)
    attended = jax.ShapeDtypeStruct((TOKENS, spec.heads, spec.head_dim), dtype)

    def qkv(weights: Params, x: Array) -> Any:
        angles = all_angles(spec, jnp.arange(TOKENS))[kind.rope]
        return nnx.merge(graph, weights).qkv(x, angles)

    def finish(weights: Params, x: Array, attended: Array) -> Any:
        return nnx.merge(graph, weights).finish(x, attended)

    found = _called(code, "qkv", lambda: jax.eval_shape(qkv, weights, x))
    after = _called(code, "finish", lambda: jax.eval_shape(finish, weights, x, attended))
    return found, after


def _check_around(spec: ModelSpec, code: OwnCode) -> None:
    """Trace embed and final."""
    cls, d = class_of(code), spec.width
    rest = {
        name: jax.ShapeDtypeStruct(w.shape, jnp.float32)
        for name, w in weight_table(spec).items()
        if not is_stack(name)
    }
    ids = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    x = jax.ShapeDtypeStruct((TOKENS, d), jnp.float32)
    first = _called(
        code, "embed", lambda: jax.eval_shape(lambda p, i: cls.embed(spec, p, i, i), rest, ids)
    )
    _compare(code, "embed", (first,), [(TOKENS, d)], None)
    last = _called(
        code, "final", lambda: jax.eval_shape(lambda p, x: cls.final(spec, p, x), rest, x)
    )
    _compare(code, "final", (last,), [(TOKENS, d)], None)


def _compare(
    code: OwnCode,
    method: str,
    found: object,
    wanted: Sequence[tuple[int, ...]],
    dtype: DTypeLike | None,
) -> None:
    """Raise ConfigError unless a method's results have these shapes and this type (None: any)."""
    shown = [
        (tuple(f.shape), jnp.dtype(f.dtype).name) if hasattr(f, "shape") else (type(f).__name__,)
        for f in (found if isinstance(found, tuple) else (found,))
    ]
    right = len(shown) == len(wanted) and all(
        s[0] == w and (dtype is None or s[1] == jnp.dtype(dtype).name)
        for s, w in zip(shown, wanted, strict=True)
    )
    if not right:
        number = "" if dtype is None else f" in {jnp.dtype(dtype).name}, x's type"
        raise _wrong(
            code,
            f"{method} returned {', '.join(' '.join(map(str, s)) for s in shown)} for {TOKENS} "
            f"tokens",
            f"It must return {', '.join(map(str, wanted))}{number}.",
        )

"""What the platform chooses, against the reference: attention, experts and whole decoders.

The truth is float32 at full precision. What bfloat16 costs in any case is measured with the
reference's own code in bfloat16: a kernel is right if it is not much worse than that.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from proof.shared import DECODERS, WORSE, Compiled, Work, small_spec

from jaxrl_async.config import schema

LEAST = 0.02
"""Error of a kernel that is always accepted, as a share of the largest number: five roundings."""


def parity(work: Work) -> None:
    """Compare attention alone, and the experts' products."""
    compiled = Compiled()
    attention(work)
    experts(work)
    work.report("compiled", compiled.facts)


def decoders(work: Work) -> None:
    """Compare whole decoders."""
    compiled = Compiled()
    for name, shape in DECODERS.items():
        decoder(work, name, shape)
    work.report("compiled", compiled.facts)


# ---- attention


def attention(work: Work) -> None:
    """Compare outputs and gradients of the chosen attention in bfloat16, of packed rows."""
    import jax
    import jax.numpy as jnp

    from jaxrl_async.model.attention import reference
    from jaxrl_async.model.kernels import Scoring

    rows, length, heads, kv_heads = (1, 96, 4, 2) if work.tiny else (2, 1024, 8, 2)
    cuts = [0.0, 0.05, 0.4, 0.45, 0.9, 1.0]  # segments of uneven lengths, and padding
    segments = np.zeros((rows, length), np.int32)
    for index, (a, b) in enumerate(pairwise(cuts[:-1])):
        segments[:, int(a * length) : int(b * length)] = index + 1
    for width in (64, 256) if work.tiny else (128, 64, 256):
        keys = jax.random.split(jax.random.key(width), 3)
        q, k, v = (
            jax.random.normal(key, (rows, length, n, width), jnp.bfloat16)
            for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
        )
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        chosen = _chosen(width, others=width == 128)
        for window in (0, length // 8):
            scoring = Scoring(window=window)
            plain = jax.jit(partial(_outputs, reference, scoring))
            with jax.default_matmul_precision("highest"):
                true = plain(*wide, segments)
            usual = _errors(plain(q, k, v, segments), true)
            for name, function in chosen.items():
                program = jax.jit(partial(_outputs, function, scoring))
                compiled = program.lower(q, k, v, segments).compile()
                errors = _errors(compiled(q, k, v, segments), true)
                ok = all(e <= max(LEAST, WORSE * u) for e, u in zip(errors, usual, strict=True))
                work.report(
                    f"attention {name}, heads of {width}"
                    + (f", window {window}" if window else ""),
                    {
                        "kernels": kernels_in(compiled.as_text()),
                        "out": errors[0],
                        "gradients": max(errors[1:]),
                        "reference_in_bfloat16": max(usual),
                        "ok": ok,
                    },
                )


def _chosen(width: int, *, others: bool) -> dict[str, Any]:
    """Return the platform's attention for heads of this width, in bfloat16, and any other kernel
    that runs here, if asked for."""
    import jax.numpy as jnp

    from jaxrl_async.errors import ConfigError
    from jaxrl_async.model import attention

    names = [n for n in attention.SEQUENCE_ATTENTION if n != "reference"] if others else []
    found = {}
    for name in ("auto", *names):
        with suppress(ConfigError):  # it does not run on this platform
            found[name] = attention.sequence_attention(name, dtype=jnp.bfloat16, head_dim=width)
    return found


def _outputs(function: Any, scoring: Any, q: Any, k: Any, v: Any, segments: Any) -> Any:
    """Return the output and the gradients of q, k and v, where tokens are not padding."""
    import jax
    import jax.numpy as jnp

    real = (segments > 0)[..., None, None]

    def total(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out = function(q, k, v, segments, scoring) * real
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    gradients, out = jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    return (out, *gradients)


def _errors(got: Any, true: Any) -> list[float]:
    """Return the largest difference of each array, as a share of the largest true number."""
    errors = []
    for a, b in zip(got, true, strict=True):
        wide = np.asarray(b, np.float32)
        errors.append(float(np.abs(np.asarray(a, np.float32) - wide).max() / np.abs(wide).max()))
    return errors


def kernels_in(program: str | None) -> list[str]:
    """Return which functions other than XLA's own a compiled program calls."""
    found = sorted(set(re.findall(r'custom_call_target="([^"]+)"', program or "")))
    return found or ["none but XLA's"]


# ---- experts


def experts(work: Work) -> None:
    """Compare grouped products and their gradients with one product after another in float32."""
    import jax
    import jax.numpy as jnp

    from jaxrl_async.model.grouped import grouped_product

    n, count, inner, outer = (64, 4, 32, 48) if work.tiny else (4096, 32, 512, 768)
    keys = jax.random.split(jax.random.key(5), 3)
    rows = jax.random.normal(keys[0], (n, inner), jnp.bfloat16)
    matrices = jax.random.normal(keys[1], (count, inner, outer), jnp.bfloat16)
    cotangent = jax.random.normal(keys[2], (n, outer), jnp.bfloat16)
    shares = np.random.default_rng(0).dirichlet([0.3] * (count - 1))
    sizes = np.append(np.floor(shares * (n - 5)), 0).astype(np.int32)  # one has none, some rows too

    def products(rows: Any, matrices: Any) -> Any:
        out, back = jax.vjp(lambda x, w: grouped_product(x, w, sizes, jnp.bfloat16), rows, matrices)
        return (out, *back(cotangent))

    compiled = jax.jit(products).lower(rows, matrices).compile()
    got = compiled(rows, matrices)
    x, w, c = (np.asarray(a, np.float32) for a in (rows, matrices, cotangent))
    true = [np.zeros((n, outer), np.float32), np.zeros_like(x), np.zeros_like(w)]
    begin = 0
    for expert, size in enumerate(sizes.tolist()):
        part = slice(begin, begin + size)
        true[0][part] = x[part] @ w[expert]
        true[1][part] = c[part] @ w[expert].T
        true[2][expert] = x[part].T @ c[part]
        begin += size
    errors = _errors(got, true)
    work.report(
        "experts' products",
        {
            "kernels": kernels_in(compiled.as_text()),
            "out": errors[0],
            "gradients": max(errors[1:]),
            "ok": max(errors) <= LEAST,
        },
    )


# ---- whole decoders


def decoder(work: Work, name: str, shape: Mapping[str, Any]) -> None:
    """Compare log-probs and gradients of a decoder in packed rows with the CPU's in float32.

    A mixture's tokens go to given experts: its routers would choose others where numbers differ."""
    import jax
    import jax.numpy as jnp

    from jaxrl_async.model.decoder import TokenRows, init_params

    length, rows = (64, 2) if work.tiny else (256, 2)
    spec = small_spec(work, shape)
    rng = np.random.default_rng(0)
    segments = np.repeat([1, 2, 3, 0], [length // 4, length // 2, length // 8, length // 8])
    positions = np.concatenate([np.arange(n) for n in (length // 4, length // 2, length // 4)])
    columns = {
        "token_ids": rng.integers(0, spec.vocab, (rows, length)).astype(np.int32),
        "positions": np.tile(positions, (rows, 1)).astype(np.int32),
        "segment_ids": np.tile(segments, (rows, 1)).astype(np.int32),
    }
    if spec.experts:
        chances = rng.random((rows, length, spec.layers, spec.experts))
        chosen = np.argsort(chances)[..., : spec.experts_per_token]
        columns["expert_ids"] = chosen.astype(np.int32)
    weighting = rng.standard_normal((rows, length)).astype(np.float32)
    cpu, here = jax.devices("cpu")[0], jax.devices()[0]
    with jax.default_device(cpu):
        params = jax.jit(lambda key: init_params(spec, key, jnp.float32))(jax.random.key(0))
        tokens = TokenRows.of(jax.tree.map(jnp.asarray, columns))
    ways = {
        "true": (cpu, jnp.float32, "reference"),
        "chosen": (here, jnp.bfloat16, "auto"),
        "reference": (here, jnp.bfloat16, "reference"),
    }
    found = {}
    for way, (device, dtype, attention) in ways.items():
        inputs = jax.device_put((params, tokens, weighting), device)
        program = jax.jit(partial(_grads, spec, device, dtype, attention)).lower(*inputs).compile()
        if way == "chosen":
            kernels = kernels_in(program.as_text())
        found[way] = jax.tree.map(lambda x: np.asarray(x, np.float32), program(*inputs))
    gaps = {way: _distance(found[way], found["true"]) for way in ("chosen", "reference")}
    ok = all(
        mine <= max(LEAST, WORSE * usual)
        for mine, usual in zip(gaps["chosen"], gaps["reference"], strict=True)
    )
    work.report(
        f"decoder: {name}",
        {
            "kernels": kernels,
            "logprobs": gaps["chosen"][0],
            "gradients": gaps["chosen"][1],
            "logprobs_of_reference": gaps["reference"][0],
            "gradients_of_reference": gaps["reference"][1],
            "ok": ok,
        },
    )


def _grads(
    spec: Any, device: Any, dtype: Any, attention: str, params: Any, tokens: Any, weighting: Any
) -> Any:
    """Return the log-probs of all tokens, and the gradient of their weighted sum."""
    import jax
    import jax.numpy as jnp

    from jaxrl_async.mesh import make_mesh
    from jaxrl_async.model.logprobs import token_logprobs
    from jaxrl_async.trainer.learning_settings import LearningSettings

    settings = LearningSettings(
        mesh=make_mesh(schema.AxesSection(), [device]),
        row_length=tokens.token_ids.shape[1],
        dtype=dtype,
        attention=attention,
    ).decoder(spec)

    def total(params: Any) -> tuple[Any, Any]:
        logprobs = token_logprobs(spec, params, tokens, settings).logprobs
        return jnp.sum(logprobs * weighting), logprobs

    gradient, logprobs = jax.grad(total, has_aux=True)(params)
    return logprobs, gradient


def _distance(got: Any, true: Any) -> tuple[float, float]:
    """Return the largest difference of log-probs, nats, and the gradients' difference as a share
    of their length."""
    import jax

    def length(trees: list[NDArray[np.float32]]) -> float:
        return float(np.sqrt(sum(float(np.sum(np.square(x))) for x in trees)))

    leaves, wanted = jax.tree.leaves(got[1]), jax.tree.leaves(true[1])
    apart = length([a - b for a, b in zip(leaves, wanted, strict=True)])
    return float(np.abs(got[0] - true[0]).max()), apart / length(wanted)

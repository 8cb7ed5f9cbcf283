"""Time the products of rows whose adapters differ, in the three forms that they can take.

    masked      x A of all adapters at once, each row's others set to 0, times B of all
    gathered    each row's own A and B, copied for it
    segmented   rows sorted by adapter, jax.lax.ragged_dot

All matrices of two of a model's layers are multiplied, 8 adapters, row i with adapter i mod 8.
Then whole answers: `sampler` of a base without adapter slots, `sampler_one` with one adapter in its
weights, `sampler_mixed` with 8 that requests name in turn.

`base` is the products without adapters, `over_base` the median over that of `base` in the same run;
runs of the forms take turns.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    columns,
    make_params,
    options,
    parser,
    random_prompts,
    report,
    spread,
)
from jax import Array

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.model.adapter_stack import AdapterRoom
from jaxrl_async.model.decoder import init_table
from jaxrl_async.model.lora import adapter_table, joined, lora_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Request

ADAPTERS, LAYERS = 8, 2
Adapter = tuple[Array, Array]
"""A [D, adapters * rank] and B [adapters * rank, E] of one matrix."""
Change = Callable[[Array, Adapter, Array], Array]
"""Rows [n, D], an adapter and each row's adapter [n] to what is added to their products [n, E]."""


def none(x: Array, adapter: Adapter, owners: Array) -> Array:
    """Add nothing."""
    return jnp.zeros((), x.dtype)


def masked(x: Array, adapter: Adapter, owners: Array) -> Array:
    """Multiply with all adapters, and keep each row's own."""
    a, b = adapter
    own = owners[:, None] == jnp.arange(a.shape[1]) // (a.shape[1] // ADAPTERS)
    return jnp.where(own, x @ a, 0) @ b


def gathered(x: Array, adapter: Adapter, owners: Array) -> Array:
    """Copy each row's own matrices."""
    a, b = adapter
    each_a = jnp.moveaxis(a.reshape(a.shape[0], ADAPTERS, -1), 1, 0)[owners]
    each_b = b.reshape(ADAPTERS, -1, b.shape[1])[owners]
    return jnp.einsum("nr,nre->ne", jnp.einsum("nd,ndr->nr", x, each_a), each_b)


def segmented(x: Array, adapter: Adapter, owners: Array) -> Array:
    """Sort the rows by adapter."""
    a, b = adapter
    order = jnp.argsort(owners, stable=True)
    sizes = jnp.bincount(owners, length=ADAPTERS).astype(jnp.int32)
    of_each = jnp.moveaxis(a.reshape(a.shape[0], ADAPTERS, -1), 1, 0)
    low = jax.lax.ragged_dot(x[order], of_each, sizes)
    out = jax.lax.ragged_dot(low, b.reshape(ADAPTERS, -1, b.shape[1]), sizes)
    return jnp.zeros_like(out).at[order].set(out)


FORMS: dict[str, Change] = {
    "base": none,
    "masked": masked,
    "gathered": gathered,
    "segmented": segmented,
}


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    rows = [
        row
        for model in args.models
        for rank in args.ranks
        for count in args.rows
        for row in rows_of(model, rank, count, args)
    ]
    for model in args.models:
        for rank in args.ranks:
            rows += sampler_rows(model, rank, args.rows[-1], args)
    report("adapters", rows, args)


def rows_of(model: str, rank: int, count: int, args: argparse.Namespace) -> list[Row]:
    """Time all forms at one number of rows, in turns."""
    spec, taken_s = MODELS[model], {form: list[float]() for form in FORMS}
    weights, adapters = make_layers(spec, rank)
    programs = {form: jax.jit(all_products, static_argnums=3) for form in FORMS}
    owners = jnp.arange(count, dtype=jnp.int32) % ADAPTERS
    x = jax.random.normal(jax.random.key(1), (count, spec.width))
    for turn in range(args.repeats + 1):
        for form, change in FORMS.items():
            start = time.perf_counter()
            for _ in range(args.calls):
                x_out = programs[form]((x, owners), weights, adapters, change)
            jax.block_until_ready(x_out)
            if turn:  # the first compiles
                taken_s[form].append((time.perf_counter() - start) / args.calls)
    return _compared(model, rank, count, taken_s, "base")


def sampler_rows(model: str, rank: int, count: int, args: argparse.Namespace) -> list[Row]:
    """Time samplers that answer as many requests as they have slots, in turns."""
    spec = MODELS[model]
    base, lora = make_params(spec), lora_of(spec, LoraSection(rank=rank))
    assert lora is not None
    adapter = init_table(adapter_table(spec, lora), jax.random.key(0), jnp.float32)
    section = schema.SamplerSection(
        slots=count, reserve=0.0, max_length=PROMPT_TOKENS + args.answer, prefix_cache=False,
        max_new_tokens=args.answer,
    )  # fmt: skip
    room = SamplerSettings(adapters=AdapterRoom(places=ADAPTERS, rank=rank))
    samplers = {
        "sampler": Sampler((spec, base), section=section),
        "sampler_one": Sampler((spec, joined(lora, base, adapter)), section=section),
        "sampler_mixed": Sampler((spec, base), section=section, settings=room),
    }
    for i in range(ADAPTERS):
        samplers["sampler_mixed"].adapters.load(f"a{i}", (lora, adapter))
    prompts = random_prompts(spec.vocab, count)
    taken_s = {form: list[float]() for form in samplers}
    for turn in range(args.repeats + 1):
        for form, sampler in samplers.items():
            names = [f"a{i % ADAPTERS}" if form == "sampler_mixed" else "" for i in range(count)]
            requests = [
                Request(
                    request_id=f"{turn}/{i}", token_ids=prompt, max_new_tokens=args.answer,
                    forced_length=args.answer, adapter=name,
                )
                for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
            ]  # fmt: skip
            start = time.perf_counter()
            sampler.generate(requests)
            if turn:  # the first compiles
                taken_s[form].append(time.perf_counter() - start)
    for sampler in samplers.values():
        sampler.close()
    return _compared(model, rank, count, taken_s, "sampler")


def _compared(
    model: str, rank: int, count: int, taken_s: dict[str, list[float]], first: str
) -> list[Row]:
    """Return a row for each form, with its time over that of the first."""
    base = spread(taken_s[first]).median
    return [
        {
            "model": model,
            "rank": rank,
            "rows": count,
            "form": form,
            "over_base": spread(taken).median / base,
            **columns(spread(taken), "us", 1e6),
        }
        for form, taken in taken_s.items()
    ]


def make_layers(spec: ModelSpec, rank: int) -> tuple[list[Any], list[Any]]:
    """Make every layer's matrices and their adapters."""
    D, F, H = spec.width, spec.mlp, spec.heads * spec.head_dim
    N = spec.kv_heads * spec.head_dim
    shapes = {"q": (D, H), "k": (D, N), "v": (D, N), "o": (H, D)}
    shapes |= {"gate": (D, F), "up": (D, F), "down": (F, D)}
    keys = iter(jax.random.split(jax.random.key(0), LAYERS * len(shapes) * 3))
    layers, adapters = [], []
    for _ in range(LAYERS):
        layers.append({n: jax.random.normal(next(keys), s) for n, s in shapes.items()})
        adapters.append(
            {
                n: (
                    jax.random.normal(next(keys), (s[0], ADAPTERS * rank)),
                    jax.random.normal(next(keys), (ADAPTERS * rank, s[1])),
                )
                for n, s in shapes.items()
            }
        )
    return layers, adapters


def all_products(
    rows: tuple[Array, Array], layers: list[Any], adapters: list[Any], change: Change
) -> Array:
    """Multiply rows with all matrices of the layers; the sums are passed to the next layer."""
    x, owners = rows

    for weights, adapter in zip(layers, adapters, strict=True):

        def times(x: Array, name: str, weights: Any = weights, adapter: Any = adapter) -> Array:
            return x @ weights[name] + change(x, adapter[name], owners)

        x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        attended = times(x, "q") + jnp.tile(times(x, "k") + times(x, "v"), _repeats(weights))
        x = times(attended, "o")
        x = times(times(x, "gate") * times(x, "up"), "down")
    return x


def _repeats(weights: Any) -> tuple[int, int]:
    return 1, weights["q"].shape[1] // weights["k"].shape[1]


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--ranks", nargs="+", type=int, default=[8, 32])
    words.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32, 64])
    words.add_argument("--calls", type=int, default=20, help="calls of each measured run")
    words.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    args = options(words)
    if args.quick:
        args.ranks, args.rows, args.calls, args.answer = [8], [8], 1, 4
    return args


if __name__ == "__main__":
    main()

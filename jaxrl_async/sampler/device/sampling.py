"""Sample one token per slot, with its log-prob under the sampled distribution.

Shapes: S slots, V vocabulary. Randomness is one uniform number per slot, keyed by identity (request
and position), never by slot, neighbours or time.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.types import Request

AnyArray = Any
"""An array of a program: traced, on the device, or in NumPy before or after."""

Kernel = Callable[..., tuple[Array, Array, Array]]
"""sampling_kernel.sample_by_kernel, on a mesh."""
MASKED = -jnp.inf
BLOCK = 128
"""Maximum tokens of a block of `invert_cdf`: the columns of a TPU register."""
LOWEST = -(2**31)
"""A rank below all numbers'."""


class Controls(NamedTuple):
    """Sampling parameters of each slot."""

    temperature: AnyArray  # [S] float32; 0 is greedy
    top_k: AnyArray  # [S] int32; 0 is all
    top_p: AnyArray  # [S] float32
    min_p: AnyArray  # [S] float32


class Mix(NamedTuple):
    """The kinds of sampling that the requests of a block ask for. Static: a block computes nothing
    else."""

    truncated: bool = False  # a request uses top-k, top-p or min-p
    greedy: bool = False  # a request has temperature 0
    extras: bool = False  # a request wants its sampling masks
    shaped: bool = False  # a request has Request.shaping
    penalized: bool = False  # a request's shaping has penalties
    top: int = 0  # likeliest tokens that a request wants at most, one of NAMED_SIZES
    ids: int = 0  # token ids that a request names at most, one of NAMED_SIZES

    @property
    def names(self) -> bool:
        """Whether log-probs of named tokens are requested."""
        return bool(self.top or self.ids)


NAMED_SIZES = (0, 8, 32, 128)
"""The numbers of likeliest tokens, and of named ids, that programs are compiled for."""


def named_size(count: int) -> int:
    """Return the number for which a program is compiled that returns `count` or more."""
    return next(size for size in NAMED_SIZES if size >= count)


def mix_of(requests: Iterable[Request]) -> Mix:
    """Return the kinds of sampling that these requests ask for."""
    requests = list(requests)
    sampling = [r.sampling for r in requests]
    shaping = [r.shaping for r in requests if r.shaping is not None]
    return Mix(
        truncated=any(s.truncates for s in sampling),
        greedy=any(s.temperature == 0 for s in sampling),
        extras=any(r.needs_extras for r in requests),
        shaped=bool(shaping),
        penalized=any(s.penalizes for s in shaping),
        top=named_size(max((r.logprobs.top for r in requests if r.logprobs), default=0)),
        ids=named_size(max((len(r.logprobs.ids) for r in requests if r.logprobs), default=0)),
    )


def union_of(mixes: Iterable[Mix]) -> Mix:
    """Return the union of several mixes."""
    return Mix(*(max(values) for values in zip(Mix(), *mixes, strict=True)))


class Named(NamedTuple):
    """Log-probs of the K likeliest tokens and of I named ids, of distributions [...]."""

    top_ids: AnyArray  # [..., K] int32, the lowest id of equal ones first
    top_logprobs: AnyArray  # [..., K] float32, descending
    id_logprobs: AnyArray  # [..., I] float32


class TokenExtras(NamedTuple):
    """The values that some requests want for each token of a step's slots [S], or of a block's rows
    and steps [R, block]; None: no request wants them. A further value is one more field here, in
    `no_extras` and in `_with_extras`; blocks carry all of them."""

    full_logprobs: AnyArray | None = None  # [...] float32, under the model's own distribution
    kept: AnyArray | None = None  # [..., V / 32] uint32, a bit for each possible token
    named: Named | None = None


def no_extras(shape: tuple[int, ...], vocab: int, mix: Mix) -> TokenExtras | None:
    """Return zeros, for tokens [shape] that are not sampled yet; None: the mix asks for none."""
    if not (mix.extras or mix.names):
        return None
    found = TokenExtras()
    if mix.extras:
        words = -(-vocab // 32)
        kept = jnp.zeros((*shape, words), jnp.uint32)
        found = found._replace(full_logprobs=jnp.zeros(shape, jnp.float32), kept=kept)
    if mix.names:
        found = found._replace(named=no_names(shape, vocab, mix.top, mix.ids))
    return found


def no_names(shape: tuple[int, ...], vocab: int, top: int, ids: int) -> Named:
    """Return zeros, for distributions [shape] that are not known yet."""
    k = min(top, vocab)
    return Named(
        jnp.zeros((*shape, k), jnp.int32),
        jnp.zeros((*shape, k), jnp.float32),
        jnp.zeros((*shape, ids), jnp.float32),
    )


class SampledTokens(NamedTuple):
    """One step's tokens, with their log-probs and the requested extras."""

    tokens: Array  # [S] int32
    logprobs: Array  # [S] float32, under the sampled distribution
    extras: TokenExtras | None = None


def sample(
    logits: Array,
    controls: Controls,
    keys: Array,
    positions: Array,
    mix: Mix,
    kernel: Kernel | None = None,
    ids: Array | None = None,
    full: Array | None = None,
) -> SampledTokens:
    """Sample a token for each slot by inverting the cumulative distribution at the slot's number;
    a greedy slot takes the first of the likeliest tokens.

    XLA's programs read the logits for the maximum of each block of BLOCK tokens, for the blocks'
    sums, and the token's block once more; the log-prob and the likeliest token result from the
    same reads. The TPU's kernel reads them once, truncation included. Their sums round differently,
    so each machine uses only one of them.

    Args:
        logits: [S, V] float32.
        controls: the slots' sampling parameters.
        keys: [S, 2] uint32 key data.
        positions: [S] int32, position of the new token in its sequence.
        mix: the kinds of sampling of the slots.
        kernel: sampling_kernel.sample_by_kernel where devices support it; None: XLA's programs.
        ids: [S, I] token ids that the slots name; None: mix.ids is 0.
        full: the model's own logits, if `logits` were changed; None: `logits`.
    """
    full = logits if full is None else full
    u = uniforms(keys, positions)
    if kernel is not None:
        numbers = [controls.temperature, controls.top_p, jnp.log(controls.min_p), u]
        tokens, logprobs, least = kernel(
            logits, jnp.stack(numbers, axis=1), controls.top_k[:, None], truncated=mix.truncated
        )
        new = SampledTokens(tokens, logprobs)
        kept = (logits >= least[:, None]) & (logits > MASKED)
        return _with_extras(new, logits, full, kept, controls, mix, ids)
    greedy = controls.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, controls.temperature)[:, None]
    if mix.truncated:
        kept = likely(scaled, controls) | greedy[:, None]
        scaled = jnp.where(kept, scaled, MASKED)
    picks = greedy if mix.greedy else None
    tokens, logprobs = invert_cdf(scaled, u, picks)
    new = SampledTokens(tokens, logprobs)
    return _with_extras(new, logits, full, scaled > MASKED, controls, mix, ids)


def _with_extras(
    new: SampledTokens,
    logits: Array,
    full: Array,
    kept: Array,
    controls: Controls,
    mix: Mix,
    ids: Array | None,
) -> SampledTokens:
    """Return sampled tokens with the extras that the mix asks for. full: the model's logits."""
    if not (mix.extras or mix.names):
        return new
    extras = TokenExtras()
    if mix.extras:
        logprobs = _at(jax.nn.log_softmax(full, axis=-1), new.tokens)
        extras = extras._replace(full_logprobs=logprobs, kept=packed_bits(kept))
    if mix.names:
        tempered = jnp.where(controls.temperature == 0, 1.0, controls.temperature)
        scaled = jnp.where(kept, logits / tempered[:, None], MASKED)
        extras = extras._replace(named=named_logprobs(scaled, ids, mix.top))
    return new._replace(extras=extras)


# ---- log-probs of named tokens


def named_logprobs(logits: Array, ids: Array | None, top: int) -> Named:
    """Return the log-probs of the `top` likeliest tokens and of ids [S, I] under softmax(logits)
    [S, V]; ids: None: of no ids."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    top_ids, found = likeliest(logits, min(top, logits.shape[-1]))
    if ids is None:
        ids = jnp.zeros((len(logits), 0), jnp.int32)
    id_logits = jnp.take_along_axis(logits, ids, axis=-1)
    return Named(top_ids, found - largest - total, id_logits - largest - total)


def likeliest(logits: Array, k: int) -> tuple[Array, Array]:
    """Return the ids of the k largest logits, [S, V] -> [S, k] int32, and these logits, descending,
    the lowest id of equal ones first.

    They are in the k blocks of BLOCK tokens with the largest maxima: any other block has k blocks
    before it, each with a token that comes before all tokens of this block.
    """
    S, V = logits.shape
    if k == 0 or 2 * k * BLOCK >= V:
        values, ids = jax.lax.top_k(logits, k)
        return ids.astype(jnp.int32), values
    blocks = jnp.pad(logits, ((0, 0), (0, -V % BLOCK)), constant_values=MASKED)
    blocks = blocks.reshape(S, -1, BLOCK)
    numbers = jnp.sort(jax.lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)
    inner = jnp.take_along_axis(blocks, numbers[:, :, None], axis=1)
    values, indices = jax.lax.top_k(inner.reshape(S, -1), k)
    ids = jnp.take_along_axis(numbers, indices // BLOCK, axis=-1) * BLOCK + indices % BLOCK
    return ids.astype(jnp.int32), values


def packed_bits(mask: Array) -> Array:
    """Pack [S, V] bool into [S, ceil(V / 32)] uint32: bit i of word w is token 32 w + i."""
    S, V = mask.shape
    words = jnp.pad(mask, ((0, 0), (0, -V % 32))).reshape(S, -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


# ---- one token


def invert_cdf(logits: Array, u: Array, greedy: Array | None = None) -> tuple[Array, Array]:
    """Return the token whose interval of the cumulative distribution holds u, and its log-prob:
    [S, V], [S] -> [S] int32, [S] float32. Never a token of probability 0.

    Two levels, blocks and then the tokens of one, keep float32's error as small as in short sums.
    greedy [S] bool: rows that take the likeliest token, the first of equals; None: no row.
    """
    S, V = logits.shape
    width = min(BLOCK, V)
    blocks = jnp.pad(logits, ((0, 0), (0, -V % width)), constant_values=MASKED)
    blocks = blocks.reshape(S, -1, width)
    largest = jnp.max(blocks, axis=-1)
    top = jnp.max(largest, axis=-1)
    sums = jnp.sum(jnp.exp(blocks - top[:, None, None]), axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    total, first = ends[:, -1], jnp.argmax(largest, axis=-1)
    target = u * total
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=-1), ends.shape[1] - 1)
    block = jnp.where(_at(sums, block) > 0, block, first)  # rounding at an edge
    before = jnp.where(block > 0, _at(ends, jnp.maximum(block - 1, 0)), 0.0)
    if greedy is not None:
        block = jnp.where(greedy, first, block)
    inner = jax.lax.platform_dependent(blocks, block, tpu=_masked_block, default=_gathered_block)
    odds = jnp.exp(inner - top[:, None])
    passed = jnp.cumsum(odds, axis=-1) <= (target - before)[:, None]
    within = jnp.minimum(jnp.sum(passed, axis=-1), width - 1)
    likeliest = jnp.argmax(inner, axis=-1)
    within = jnp.where(_at(odds, within) > 0, within, likeliest)
    if greedy is not None:
        within = jnp.where(greedy, likeliest, within)
    logprobs = _at(inner, within) - top - jnp.log(total)
    return (block * width + within).astype(jnp.int32), logprobs


def _at(values: Array, indices: Array) -> Array:
    """Return values [S, n] at indices [S]."""
    return jnp.take_along_axis(values, indices[:, None], axis=-1)[:, 0]


def _gathered_block(blocks: Array, block: Array) -> Array:
    """Return of [S, B, width] each row's block, [S, width]."""
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _masked_block(blocks: Array, block: Array) -> Array:
    """Compute _gathered_block by reading all blocks: a TPU gathers row by row, and each row costs
    as much as reading thousands of tokens."""
    mine = jnp.arange(blocks.shape[1]) == block[:, None]
    return jnp.max(jnp.where(mine[:, :, None], blocks, MASKED), axis=1)


def uniforms(keys: Array, positions: Array) -> Array:
    """Return [S] float32 in [0, 1): one number for each (key, position)."""

    def one(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key), position)
        return jax.random.uniform(folded)

    return jax.vmap(one)(keys, positions)


# ---- truncation


def likely(logits: Array, controls: Controls) -> Array:
    """Return [S, V] bool: the tokens that top-k, then top-p, then min-p keep of temperature-scaled
    logits. Equal tokens are kept or refused together; impossible tokens (MASKED) are refused even
    if fewer than k are possible.

    top-k keeps a token if fewer than k are likelier. top-p keeps it if the likelier tokens of
    top-k have less than that share of top-k's probability, so it keeps the likeliest up to and
    including the token that reaches the share (Holtzman et al. 2020, arXiv:1904.09751). min-p keeps
    tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082).

    Nothing is sorted: the lowest kept logit is found by bisection over 32-bit numbers (least_kept),
    exactly except for the rounding of sums of probabilities.
    """
    V = logits.shape[-1]
    ranks = ranks_of(logits)
    top, best = (jnp.max(x, axis=-1, keepdims=True) for x in (logits, ranks))
    lowest = jnp.full(best.shape, LOWEST)
    k = controls.top_k[:, None]
    floor = least_kept(
        lambda over: jnp.sum(over, axis=-1, keepdims=True, dtype=jnp.int32),
        ranks, jnp.where((k > 0) & (k < V), lowest, best), best, k,
    )  # fmt: skip
    floor = jnp.where((k > 0) & (k < V), floor, lowest)
    odds = jnp.where(ranks >= floor, jnp.exp(logits - top), 0.0)
    share = controls.top_p[:, None]
    nucleus = least_kept(
        lambda over: jnp.sum(jnp.where(over, odds, 0.0), axis=-1, keepdims=True),
        ranks, jnp.where(share < 1, floor, best), best,
        share * jnp.sum(odds, axis=-1, keepdims=True),
    )  # fmt: skip
    floor = jnp.where(share < 1, nucleus, floor)  # a few tokens' rounded sum may reach 1
    likely_enough = logits >= top + jnp.log(controls.min_p)[:, None]
    return (ranks >= floor) & likely_enough & (logits > MASKED)


def ranks_of(numbers: Array) -> Array:
    """Return int32 in the order of these float32; both zeros are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def least_kept(
    measure: Callable[[Array], Array], ranks: Array, low: Array, high: Array, limit: Array
) -> Array:
    """Return the smallest r in low..high [S, 1] with measure(ranks > r) < limit, by 32
    measurements, or without any if low equals high everywhere.

    Args:
        measure: total weight [S, 1] of tokens [S, V] bool; it does not fall with more tokens.
        ranks: [S, V] int32.
        low: lower bound of r.
        high: upper bound of r, for which the condition holds.
        limit: [S, 1].
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their sum may have 33 bits
        holds = measure(ranks > middle) < limit
        return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

    def search(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        return jax.lax.fori_loop(0, 32, halve, bounds)

    return jax.lax.cond(jnp.any(low < high), search, lambda bounds: bounds, (low, high))[1]

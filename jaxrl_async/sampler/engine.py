"""The device side of the sampler, in JetStream's words: prefill, insert, generate, slots. Pure
programs.

Shapes: S slots, B prompts of a prefill, T their bucket length, n inserted requests, M most new
tokens,
V vocabulary, E stop tokens a request can have. A token's version is that of the weights that made
its logits: the first token after a swap still carries the old one.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.mesh import SAMPLER_RULES, spec_for
from jaxrl_async.model import decoder
from jaxrl_async.model.cache import KVCache, init_cache
from jaxrl_async.model.cache import insert as insert_rows
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampling import Controls, sample

MAX_STOP_TOKENS = 8
"""Stop tokens that one request can have."""


AnyArray = Any
"""An array on the device, or on its way there or back as NumPy."""


class Prefix(NamedTuple):
    """Prefilled prompts, ready to be inserted into slots; opaque to callers."""

    kv: KVCache
    logits: Array  # [B, V] float32, after each prompt's last token
    lengths: Array  # [B] int32
    version: Array  # [] int32


class Slot(NamedTuple):
    """What a request asks of its slot; arrays over slots or inserted requests."""

    controls: Controls
    keys: AnyArray  # [S, 2] uint32
    stop_ids: AnyArray  # [S, E] int32; -1 matches nothing
    max_new: AnyArray  # [S] int32
    ignores_stop: AnyArray  # [S] bool


class DecodeState(NamedTuple):
    """Everything on the device between two blocks. Donated to each program; opaque to callers."""

    cache: KVCache
    logits: Array  # [S, V] float32: the next token's
    logits_version: Array  # [S] int32
    lengths: Array  # [S] int32, tokens in the cache
    drawn: Array  # [S] int32, tokens drawn
    active: Array  # [S] bool
    tokens: Array  # [S, M] int32
    logprobs: Array  # [S, M] float32
    versions: Array  # [S, M] int32
    slot: Slot


class Status(NamedTuple):
    """The few bytes per slot that the host reads after a block."""

    active: Array  # [S] bool
    drawn: Array  # [S] int32
    steps: Array  # [] int32, decode steps made
    used: Array  # [] int32, slot-steps that drew a token


class Output(NamedTuple):
    """Drawn tokens of some slots, [n, M] each."""

    tokens: AnyArray
    logprobs: AnyArray
    versions: AnyArray
    drawn: AnyArray  # [n]


class Engine:
    """Compiled programs for one model, slot count and mesh. Holds no state but the programs."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        slots: int,
        max_length: int,
        max_new_tokens: int,
        mesh: Mesh | None = None,
        dtype: Any = jnp.float32,
    ) -> None:
        self.spec, self.slots, self.max_length, self.max_new = (
            spec,
            slots,
            max_length,
            max_new_tokens,
        )
        self.mesh, self.dtype = mesh, dtype
        self._prefill = jax.jit(self._prefill_program)
        self._insert = jax.jit(self._insert_program, donate_argnums=(1,))
        self._generate = jax.jit(
            self._generate_program, donate_argnums=(1,), static_argnames=("live", "plain")
        )
        self._free = jax.jit(
            lambda state, slots: state._replace(
                active=state.active.at[slots].set(False, mode="drop")
            ),
            donate_argnums=(0,),
        )
        self._take = jax.jit(self._take_program)

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots (JetStream's name)."""
        return self.slots

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; a weight swap must not change it."""
        programs = (self._prefill, self._insert, self._generate, self._free, self._take)
        return sum(p._cache_size() for p in programs)  # type: ignore[attr-defined]

    def init_decode_state(self) -> DecodeState:
        """All slots empty, placed on the mesh."""
        S, M, V = self.slots, self.max_new, self.spec.vocab
        empty = jax.jit(
            lambda: DecodeState(
                cache=init_cache(self.spec, S, self.max_length, self.dtype),
                logits=jnp.zeros((S, V), jnp.float32),
                logits_version=jnp.zeros(S, jnp.int32),
                lengths=jnp.zeros(S, jnp.int32),
                drawn=jnp.zeros(S, jnp.int32),
                active=jnp.zeros(S, bool),
                tokens=jnp.zeros((S, M), jnp.int32),
                logprobs=jnp.zeros((S, M), jnp.float32),
                versions=jnp.zeros((S, M), jnp.int32),
                slot=Slot(
                    Controls(jnp.ones(S), jnp.zeros(S, jnp.int32), jnp.ones(S), jnp.zeros(S)),
                    jnp.zeros((S, 2), jnp.uint32),
                    jnp.full((S, MAX_STOP_TOKENS), -1, jnp.int32),
                    jnp.ones(S, jnp.int32),
                    jnp.zeros(S, bool),
                ),
            )
        )
        state = empty()
        return state if self.mesh is None else jax.device_put(state, self._state_shardings(state))

    def _state_shardings(self, state: DecodeState) -> Any:
        """Caches over kv heads and slots as SAMPLER_RULES say; everything else on every device."""
        assert self.mesh is not None
        mesh = self.mesh
        whole = NamedSharding(mesh, PartitionSpec())
        axes = ("batch", "kv_heads", None, "head_dim")

        def of_cache(x: Array) -> NamedSharding:
            return NamedSharding(mesh, spec_for(x.shape, axes, mesh, SAMPLER_RULES))

        rest = jax.tree.map(lambda _: whole, state)
        return rest._replace(cache=jax.tree.map(of_cache, state.cache))

    def prefill(
        self, params: Any, token_ids: np.ndarray, lengths: np.ndarray, version: int
    ) -> Prefix:
        """Prompts [B, T] of lengths [B] (>= 1) to KV and next-token logits; one compile per (B,
        T)."""
        return self._prefill(
            params, token_ids.astype(np.int32), lengths.astype(np.int32), np.int32(version)
        )

    def prefill_multisampling(
        self, params: Any, token_ids: np.ndarray, lengths: np.ndarray, version: int
    ) -> Prefix:
        """The same as prefill: one prefix may be inserted into any number of slots."""
        return self.prefill(params, token_ids, lengths, version)

    def insert(
        self, prefix: Prefix, state: DecodeState, *, row: int, slot: int, ask: Slot
    ) -> DecodeState:
        """Start decoding one row of a prefix in one slot; `ask` has a leading axis of 1."""
        return self.bulk_insert(
            prefix, state, rows=np.array([row]), slots=np.array([slot]), ask=ask
        )

    def bulk_insert(
        self, prefix: Prefix, state: DecodeState, *, rows: np.ndarray, slots: np.ndarray, ask: Slot
    ) -> DecodeState:
        """Start decoding rows [n] of a prefix in slots [n]; a slot number >= slots is padding."""
        return self._insert(prefix, state, rows.astype(np.int32), slots.astype(np.int32), ask)

    def generate(
        self, params: Any, state: DecodeState, *, version: int, steps: int, live: int, plain: bool
    ) -> tuple[DecodeState, Status]:
        """Up to `steps` decode steps in one dispatch; ends early when no slot is active.

        version: of `params`. live: only this many cache positions are read; must exceed every
        active length + steps, or be max_length. plain: no active slot truncates its distribution.
        """
        return self._generate(
            params, state, np.int32(version), np.int32(steps), live=live, plain=plain
        )

    def free_resource(self, state: DecodeState, slots: np.ndarray) -> DecodeState:
        """Stop decoding in slots [n]; a slot number >= slots is padding."""
        return self._free(state, slots.astype(np.int32))

    def take(self, state: DecodeState, slots: np.ndarray) -> Output:
        """What slots [n] have drawn."""
        return self._take(state, slots.astype(np.int32))

    # ---- programs

    def _prefill_program(
        self, params: Any, token_ids: Array, lengths: Array, version: Array
    ) -> Prefix:
        logits, kv = decoder.prefill(self.spec, params, token_ids, lengths, dtype=self.dtype)
        return Prefix(kv, logits, lengths, version)

    def _insert_program(
        self, prefix: Prefix, state: DecodeState, rows: Array, slots: Array, ask: Slot
    ) -> DecodeState:
        def put(into: Array, values: Any) -> Array:
            return into.at[slots].set(values, mode="drop")

        return state._replace(
            cache=insert_rows(state.cache, prefix.kv, rows, slots),
            logits=put(state.logits, prefix.logits[rows]),
            logits_version=put(state.logits_version, prefix.version),
            lengths=put(state.lengths, prefix.lengths[rows]),
            drawn=put(state.drawn, 0),
            active=put(state.active, True),
            slot=jax.tree.map(put, state.slot, ask),
        )

    def _generate_program(
        self,
        params: Any,
        state: DecodeState,
        version: Array,
        steps: Array,
        *,
        live: int,
        plain: bool,
    ) -> tuple[DecodeState, Status]:
        def go_on(carry: tuple[Array, Array, DecodeState]) -> Array:
            return (carry[0] < steps) & jnp.any(carry[2].active)

        def one_step(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
            step, used, state = carry
            return (
                step + 1,
                used + jnp.sum(state.active),
                self._step(params, state, version, live, plain),
            )

        zero = jnp.int32(0)
        step, used, state = jax.lax.while_loop(go_on, one_step, (zero, zero, state))
        return state, Status(state.active, state.drawn, step, used)

    def _step(
        self, params: Any, state: DecodeState, version: Array, live: int, plain: bool
    ) -> DecodeState:
        """Draw from the logits at hand, record, and make the next logits."""
        slot, active = state.slot, state.active
        tokens, logprobs = sample(
            state.logits, slot.controls, slot.keys, state.lengths, plain=plain
        )
        rows = jnp.arange(self.slots)
        at = jnp.where(active, state.drawn, self.max_new)  # out of range: dropped

        def record(into: Array, values: Array) -> Array:
            return into.at[rows, at].set(values, mode="drop", unique_indices=True)

        drawn = state.drawn + active
        stopped = jnp.any(tokens[:, None] == slot.stop_ids, axis=-1) & ~slot.ignores_stop
        ends = stopped | (drawn >= slot.max_new)
        where = jnp.minimum(state.lengths, self.max_length - 1)
        logits, cache = decoder.decode_step(
            self.spec, params, state.cache, tokens, where, dtype=self.dtype, live=live
        )
        return state._replace(
            cache=cache,
            logits=jnp.where(active[:, None], logits, state.logits),
            logits_version=jnp.where(active, version, state.logits_version),
            lengths=state.lengths + active,
            drawn=drawn,
            active=active & ~ends,
            tokens=record(state.tokens, tokens),
            logprobs=record(state.logprobs, logprobs),
            versions=record(state.versions, state.logits_version),
        )

    def _take_program(self, state: DecodeState, slots: Array) -> Output:
        return Output(
            state.tokens[slots], state.logprobs[slots], state.versions[slots], state.drawn[slots]
        )


@partial(jax.jit, static_argnums=0)
def request_keys(seed: int, ids: Array) -> Array:
    """[n, 2] uint32 key data of requests with ids [n, 2] int32 (group, member)."""

    def one(pair: Array) -> Array:
        key = jax.random.key(seed)
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, pair[0]), pair[1]))

    return jax.vmap(one)(ids)


def pad_stop_ids(stop_ids: Sequence[int]) -> list[int]:
    """Exactly MAX_STOP_TOKENS ids, filled with -1."""
    return [*stop_ids, *[-1] * (MAX_STOP_TOKENS - len(stop_ids))]

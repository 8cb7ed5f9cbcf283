"""Our engine as a subclass of JetStream's Engine, for users of jetstream (extra [jetstream]).

The core neither imports nor installs the archived package; only this module uses it. The classes
here do not depend on it: `make_engine` binds them to JetStream's base classes when it is called.
The contract is google-jetstream 0.2.2: prefill returns the prefix only, and every token results
from `generate`.
"""

import importlib
import sys
import types
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_async.errors import ConfigError, MissingExtraError
from jaxrl_async.model.kv_layout import KvLayout, layout_of
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import Params, check_positions
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.prefill import slot_params_of
from jaxrl_async.sampler.batch.sequence import LiveRequest
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import (
    DecodeArgs,
    DecodeState,
    EngineWeights,
    InsertArgs,
    PrefillArgs,
    Prefix,
)
from jaxrl_async.sampler.device.sampling import AnyArray, mix_of
from jaxrl_async.types import IntArray, Request, SamplingParams

PAGE_TOKENS = 32
"""Tokens per page. JetStream has no pages: each slot keeps a fixed set, and reuses the pages that a
window no longer needs."""
STAND_IN = {"seqio": (), "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary")}
"""The two seqio classes in jetstream's annotations; seqio itself would install TensorFlow."""


@lru_cache(maxsize=1)
def engine_api() -> Any:
    """Import jetstream.engine.engine_api. Raises MissingExtraError if it is missing or has a
    different contract."""
    try:
        importlib.import_module("seqio")
    except ImportError:
        _stand_in_for_seqio()
    try:
        api = importlib.import_module("jetstream.engine.engine_api")
    except ImportError as error:
        raise MissingExtraError(
            f"jetstream cannot be imported ({error}). Install the extra [jetstream], or its slim "
            "form (docs/engines.md, JetStream); the package is google-jetstream, not "
            "jetstream."
        ) from None
    if "bulk_insert" in api.Engine.__abstractmethods__:
        raise MissingExtraError(
            "this jetstream has the 0.3.0 contract (prefill returns the first token). Install "
            "google-jetstream==0.2.2."
        )
    return api


def _stand_in_for_seqio() -> None:
    """Register empty classes under seqio's names, so jetstream's annotations resolve."""
    for name, classes in STAND_IN.items():
        module = types.ModuleType(name)
        for class_name in classes:
            setattr(module, class_name, type(class_name, (), {}))
        sys.modules[name] = module


class SlotStates(NamedTuple):
    """Our decode state, and the state of each slot that JetStream leaves to the engine."""

    core: DecodeState
    active: jax.Array  # [S] bool
    lengths: jax.Array  # [S] int32, tokens in the slot's pages
    sampled: jax.Array  # [S] int32


class PrefilledPrompt(NamedTuple):
    """A prefilled prompt."""

    core: Prefix
    length: int


class JaxrlEngine:
    """JetStream's Engine implemented by ours; see make_engine."""

    def __init__(
        self, core: Engine, policy: Policy, template: Request, seed: int, tokenizer: object
    ) -> None:
        """template: sampling, stop tokens and max_new_tokens of every request. tokenizer: ours, or
        None."""
        self._core, self._policy, self._seed, self._tokenizer = core, policy, seed, tokenizer
        self._template, self._inserted = template, 0
        # An upper bound of each slot's length, so no length is read back from the device.
        self._longest = np.zeros(core.spec.slots, np.int64)
        self._tables = fixed_tables(core.spec)

    def load_params(self, *args: object, **kwargs: object) -> EngineWeights:
        """Return the policy's parameters in the engine's format."""
        return self.take_params(self._policy.params)

    def take_params(self, params: Params) -> EngineWeights:
        """Convert parameters of a Policy for prefill and generate; see build_engine of
        interop/jetstream_samplers.py."""
        return self._core.prepare(params)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> SlotStates:
        """Return empty slots."""
        zeros = jnp.zeros(self._core.spec.slots, jnp.int32)
        return SlotStates(self._core.init_decode_state(), zeros > 0, zeros, zeros + 0)

    def prefill(
        self,
        *,
        params: EngineWeights,
        existing_prefix: Any = None,
        padded_tokens: AnyArray,
        true_length: int,
    ) -> PrefilledPrompt:
        """Prefill a prompt; padded_tokens [bucket], the first true_length are real.

        Raises NotImplementedError for an existing_prefix.
        """
        if existing_prefix is not None:
            raise NotImplementedError("existing_prefix: prefill the whole prompt instead")
        tokens = np.asarray(padded_tokens, np.int32)
        indices = np.arange(len(tokens), dtype=np.int32)
        one = np.zeros(1, np.int32)
        no_pages = np.zeros((1, self._tables.shape[1], 0), np.int32)
        chunk = PrefillArgs(
            tokens, indices, indices[None], indices, one, one + true_length, no_pages
        )
        return PrefilledPrompt(self._core.prefill(params, None, chunk), int(true_length))

    def insert(self, prefix: PrefilledPrompt, decode_state: SlotStates, slot: int) -> SlotStates:
        """Start decoding a prefilled prompt in a slot."""
        length, core, spec = prefix.length, self._core, self._core.spec
        assert prefix.core.kv is not None
        positions = np.arange(prefix.core.kv.k[0].shape[0])
        numbers = np.minimum(positions // PAGE_TOKENS, self._tables.shape[2] - 1)
        firsts = [g.first_page(length, PAGE_TOKENS) for g in spec.kv_layout.groups]
        is_kept = (positions < length) & (numbers >= np.reshape(firsts, (-1, 1)))
        request = replace(self._template, request_id=str(self._inserted), key=(self._inserted, 0))
        live = LiveRequest(
            request=request, max_new=min(request.max_new_tokens, spec.max_length - length)
        )
        no_pages = np.zeros(0, np.int32)
        args = InsertArgs(
            pages=np.where(is_kept, self._tables[slot][:, numbers], spec.pages).astype(np.int32),
            offsets=(positions % PAGE_TOKENS).astype(np.int32),
            sources=no_pages,
            targets=no_pages,
            rows=np.zeros(1, np.int32),
            slots=np.array([slot], np.int32),
            slot_params=slot_params_of([live], 1, self._seed),
        )
        self._inserted += 1
        self._longest[slot] = length
        return SlotStates(
            core.insert(prefix.core, decode_state.core, args),
            decode_state.active.at[slot].set(True),
            decode_state.lengths.at[slot].set(length),
            decode_state.sampled.at[slot].set(0),
        )

    def generate(self, params: EngineWeights, decode_state: SlotStates) -> tuple[SlotStates, Any]:
        """Sample K tokens per active slot; return the new state and JetStream's ResultTokens."""
        spec = self._core.spec
        k, every = spec.block, jnp.arange(spec.slots, dtype=jnp.int32)
        context = min(spec.num_pages(int(self._longest.max())), self._tables.shape[2])
        args = DecodeArgs(
            rows=jnp.where(decode_state.active, every, spec.slots),
            reserve=np.zeros(0, np.int32),
            num_reserve=np.int32(0),
            lengths=decode_state.lengths,
            num_sampled=decode_state.sampled,
            tables=self._tables,
            steps=np.int32(k),
        )
        core, block = self._core.generate(
            params,
            decode_state.core,
            args,
            context_pages=shapes.steps_of_half(context),
            mix=mix_of([self._template]),
        )
        self._longest = np.minimum(self._longest + k, spec.max_length)
        valid, sampled = _counted(block.owners, decode_state.sampled, spec.slots)
        ended = jnp.any(block.ends & valid, axis=1)
        lengths = decode_state.lengths + sampled - decode_state.sampled
        new = SlotStates(core, decode_state.active & ~ended, lengths, sampled)
        return new, _result_tokens(_as_data(block.tokens, valid, sampled), k)

    def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
        """Return the sharding of a prefix: the default device."""
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def get_tokenizer(self) -> Any:
        """Return JetStream's description of a tokenizer; build_tokenizer gives the real one."""
        tokenizer = importlib.import_module("jetstream.engine.tokenizer_pb2")
        return tokenizer.TokenizerParameters(path="")

    def build_tokenizer(self, metadata: object) -> Any:
        """Return our tokenizer in JetStream's interface."""
        return jetstream_tokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self._core.spec.slots

    @property
    def samples_per_slot(self) -> int:
        """One."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt, tokens. JetStream needs one of its own buckets, a power of two."""
        return 1 << ((self._core.spec.max_length - 1).bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh that the engine was made for, or a mesh of the default device."""
        return self._core.spec.mesh or jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))

    @property
    def colocated_cpus(self) -> None:
        """Return none."""


def make_engine(
    policy: Policy,
    *,
    slots: int = 8,
    max_length: int = 128,
    max_new_tokens: int = 64,
    tokens_per_step: int = 1,
    sampling: SamplingParams | None = None,
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    tokenizer: object = None,
    mesh: jax.sharding.Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Any:
    """Return a jetstream.engine.engine_api.Engine over the policy.

    Args:
        policy: the model and its parameters.
        slots: number of requests that decode concurrently.
        max_length: maximum length of prompt and answer, tokens.
        max_new_tokens: maximum length of an answer.
        tokens_per_step: tokens per slot in each `generate` (JetStream calls them speculations).
        sampling: settings of every request.
        stop_token_ids: stop tokens of every request.
        seed: seed of the random numbers; each insert is a new request with its own random numbers.
        tokenizer: ours, of data.tokenizer; only needed to serve text.
        mesh: a sampler's slice (mesh.make_slices); None: the default device.
        dtype: dtype of the computation.

    Raises MissingExtraError, and ConfigError if max_length is beyond the policy's positions.
    """
    check_positions(policy.spec, max_length, "max_length", "the policy")
    if policy.spec.delta:
        raise ConfigError(
            "JetStream's interface does not support the states of the gated delta nets of this "
            f"{policy.spec.family} model. Use this package's sampler (sampler.engine=native)."
        )
    layout = layout_of(policy.spec.kinds)
    spec = EngineSpec(
        model=policy.spec,
        slots=slots,
        max_length=max_length,
        pages=slots * layout.pages_of(max_length, PAGE_TOKENS, tokens_per_step),
        page_tokens=PAGE_TOKENS,
        block=tokens_per_step,
        mesh=mesh,
        dtype=dtype,
    )
    template = Request(
        request_id="",
        token_ids=np.zeros(0, np.int32),
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingParams(),
        stop_token_ids=stop_token_ids,
    )
    return _bound(JaxrlEngine, engine_api().Engine)(Engine(spec), policy, template, seed, tokenizer)


@lru_cache(maxsize=2)
def _bound(ours: type, theirs: type) -> type:
    """Return our class as a subclass of JetStream's, which rejects missing methods."""
    return type(ours.__name__, (ours, theirs), {})


def fixed_tables(spec: EngineSpec) -> IntArray:
    """Return each slot's pages [S, groups, width]. A group with a window cycles through just enough
    pages that none is overwritten while the window still covers it."""
    width, groups, firsts = spec.num_pages(spec.max_length), spec.kv_layout.groups, [0]
    for group in groups:
        alone = KvLayout(groups=(group,), arrays=1)
        firsts.append(firsts[-1] + alone.pages_of(spec.max_length, spec.page_tokens, spec.block))
    of_slot = [a + np.arange(width) % (b - a) for a, b in pairwise(firsts)]
    slots = np.arange(spec.slots)[:, None, None] * firsts[-1]
    tables: IntArray = (slots + np.stack(of_slot)).astype(np.int32)
    return tables


def _result_tokens(data: jax.Array, k: int) -> Any:
    """Return [S, 2 k + 1] of _as_data as JetStream's ResultTokens."""
    return engine_api().ResultTokens(
        data=data,
        tokens_idx=(0, k),
        valid_idx=(k, 2 * k),
        length_idx=(2 * k, 2 * k + 1),
        samples_per_slot=1,
    )


class JaxrlTokenizer:
    """Our tokenizer in JetStream's interface: encodes prompts as in training, and decodes sampled
    tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> Any:
        """Return padded token ids and their unpadded number."""
        kwargs.pop("is_bos", None)  # encode_prompt adds the model's first token
        ids = np.asarray(self._tokenizer.encode_prompt(s), np.int32)
        utils = importlib.import_module("jetstream.engine.token_utils")
        return utils.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=False, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Return the text of sampled tokens."""
        return str(self._tokenizer.decode(np.asarray(token_ids, np.int32)))

    @property
    def pad_id(self) -> int:
        """The end-of-sequence token, because JetStream also stops at padding."""
        return self.eos_id

    @property
    def eos_id(self) -> int:
        """The first end-of-sequence token."""
        return int(self._tokenizer.eos_ids[0])

    @property
    def bos_id(self) -> int:
        """Not used: encode_prompt adds it for models that have one."""
        return self.eos_id

    @property
    def stop_tokens(self) -> set[int]:
        """All end-of-sequence tokens."""
        return {int(i) for i in self._tokenizer.eos_ids}


def jetstream_tokenizer(tokenizer: object) -> Any:
    """Return our tokenizer (data.tokenizer) as a jetstream.engine.tokenizer_api.Tokenizer."""
    engine_api()
    api = importlib.import_module("jetstream.engine.tokenizer_api")
    return _bound(JaxrlTokenizer, api.Tokenizer)(tokenizer)


@partial(jax.jit, static_argnums=2)
def _counted(owners: AnyArray, sampled: AnyArray, slots: int) -> tuple[AnyArray, AnyArray]:
    """Return [S, k] whether a token was sampled, and each slot's number of sampled tokens."""
    valid = owners < slots
    return valid, sampled + jnp.sum(valid, axis=1, dtype=jnp.int32)


@jax.jit
def _as_data(tokens: AnyArray, valid: AnyArray, sampled: AnyArray) -> AnyArray:
    """Return [S, 2 k + 1] int32: the tokens, whether each is valid, and their total number."""
    return jnp.concatenate(
        [jnp.where(valid, tokens, 0), valid.astype(jnp.int32), sampled[:, None]], axis=1
    )

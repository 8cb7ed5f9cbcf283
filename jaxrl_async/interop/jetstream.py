"""Our engine as a JetStream Engine: a real subclass, made when jetstream is installed (extra
[jetstream]).

The core neither imports nor installs the archived package; this module is its one door. The
contract is
that of google-jetstream 0.2.2: prefill gives the prefix only, and every token comes out of
`generate`.
"""

import importlib
import sys
import types
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.errors import MissingExtraError
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import check_positions
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.batch import Sequence_, ask_of
from jaxrl_async.sampler.device.engine import (
    DecodeArgs,
    DecodeState,
    Engine,
    InsertArgs,
    PrefillArgs,
    Prefix,
)
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.types import Request, SamplingParams

PAGE_TOKENS = 32
"""Tokens in a page. JetStream knows no pages: each slot has its own for good."""
STAND_IN = {"seqio": (), "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary")}
"""What jetstream names of seqio, which would bring TensorFlow: two classes, used as annotations."""


@lru_cache(maxsize=1)
def engine_api() -> Any:
    """jetstream.engine.engine_api. Raises MissingExtraError where it is absent or of another
    contract."""
    try:
        importlib.import_module("seqio")
    except ImportError:
        _stand_in_for_seqio()
    try:
        api = importlib.import_module("jetstream.engine.engine_api")
    except ImportError as error:
        raise MissingExtraError(
            f"jetstream cannot be imported ({error}). Install the extra [jetstream], or its slim "
            "form (docs/sampler.md, section JetStream); the package is google-jetstream, not "
            "jetstream."
        ) from None
    if "bulk_insert" in api.Engine.__abstractmethods__:
        raise MissingExtraError(
            "this jetstream has the 0.3.0 contract (prefill gives the first token). Install "
            "google-jetstream==0.2.2."
        )
    return api


def _stand_in_for_seqio() -> None:
    """Empty classes under seqio's names, so that jetstream's annotations resolve."""
    for name, classes in STAND_IN.items():
        module = types.ModuleType(name)
        for class_name in classes:
            setattr(module, class_name, type(class_name, (), {}))
        sys.modules[name] = module


class State(NamedTuple):
    """Our decode state, and what JetStream leaves to the engine to remember of each slot."""

    core: DecodeState
    active: jax.Array  # [S] bool
    lengths: jax.Array  # [S] int32, tokens in the slot's pages
    drawn: jax.Array  # [S] int32


class Prefilled(NamedTuple):
    """A prefilled prompt."""

    core: Prefix
    length: int


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
    tokenizer: Any = None,
) -> Any:
    """A jetstream.engine.engine_api.Engine over the policy.

    tokens_per_step: K tokens a slot in each `generate`, in JetStream's words speculations. Each
    insert is a new request with a number of its own, which its random numbers depend on.
    tokenizer: ours, of data.tokenizer; only serving text needs one. Raises MissingExtraError, and
    ConfigError where max_length is beyond the policy's positions.
    """
    check_positions(policy.spec, max_length, "max_length", "the policy")
    core = Engine(
        policy.spec,
        slots=slots,
        max_length=max_length,
        pages=slots * _pages(max_length),
        page_tokens=PAGE_TOKENS,
        block=tokens_per_step,
    )
    wish = sampling or SamplingParams()
    return _engine_class()(core, policy, wish, stop_token_ids, seed, max_new_tokens, tokenizer)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


@lru_cache(maxsize=1)
def _engine_class() -> type:
    api = engine_api()

    class JaxrlEngine(api.Engine):  # type: ignore[name-defined]
        """JetStream's Engine in terms of ours; see make_engine."""

        def __init__(
            self,
            core: Engine,
            policy: Policy,
            sampling: SamplingParams,
            stop_token_ids: tuple[int, ...],
            seed: int,
            max_new_tokens: int,
            tokenizer: Any,
        ) -> None:
            self._core, self._policy, self._sampling = core, policy, sampling
            self._stops, self._seed, self._max_new = stop_token_ids, seed, max_new_tokens
            self._tokenizer, self._inserted = tokenizer, 0
            # An upper bound of each slot's length, so that no length is read back from the device.
            self._longest = np.zeros(core.slots, np.int64)
            width = _pages(core.max_length)
            self._tables = np.arange(core.slots * width, dtype=np.int32).reshape(core.slots, width)

        def load_params(self, *args: Any, **kwargs: Any) -> Any:
            """The policy's parameters, as the engine wants them."""
            return self._core.prepare(self._policy.params)

        def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
            """Empty slots."""
            nothing = jnp.zeros(self._core.slots, jnp.int32)
            return State(self._core.init_decode_state(), nothing > 0, nothing, nothing + 0)

        def prefill(
            self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int
        ) -> Any:
            """padded_tokens [bucket], of which true_length are real. existing_prefix is not
            supported."""
            if existing_prefix is not None:
                raise NotImplementedError("existing_prefix: prefill the whole prompt instead")
            tokens = np.asarray(padded_tokens, np.int32)
            places = np.arange(len(tokens), dtype=np.int32)
            one = np.zeros(1, np.int32)
            chunk = PrefillArgs(
                tokens, places, places[None], places, one, one + true_length, one[:0][None]
            )
            return Prefilled(self._core.prefill(params, None, chunk), int(true_length))

        def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
            """Start decoding the prefix in a slot."""
            length, core = prefix.length, self._core
            where = np.arange(prefix.core.kv.k[0].shape[0])
            pages = self._tables[slot][np.minimum(where // PAGE_TOKENS, self._tables.shape[1] - 1)]
            request = Request(
                request_id=str(self._inserted),
                token_ids=where[:0].astype(np.int32),
                max_new_tokens=0,
                sampling=self._sampling,
                stop_token_ids=self._stops,
                key=(self._inserted, 0),
            )
            ours = Sequence_(request=request, max_new=min(self._max_new, core.max_length - length))
            nothing = np.zeros(0, np.int32)
            into = InsertArgs(
                np.where(where < length, pages, core.pages).astype(np.int32),
                (where % PAGE_TOKENS).astype(np.int32),
                nothing,
                nothing,
                np.zeros(1, np.int32),
                np.array([slot], np.int32),
                ask_of([ours], 1, self._seed),
            )
            self._inserted += 1
            self._longest[slot] = length
            return State(
                core.insert(prefix.core, decode_state.core, into),
                decode_state.active.at[slot].set(True),
                decode_state.lengths.at[slot].set(length),
                decode_state.drawn.at[slot].set(0),
            )

        def generate(self, params: Any, decode_state: Any) -> tuple[Any, Any]:
            """K tokens in every active slot: the new state and JetStream's ResultTokens."""
            core, k, s = self._core, self._core.block, self._sampling
            every = jnp.arange(core.slots, dtype=jnp.int32)
            context = min(_pages(int(self._longest.max())), self._tables.shape[1])
            run = DecodeArgs(
                rows=jnp.where(decode_state.active, every, core.slots),
                reserve=np.zeros(0, np.int32),
                num_reserve=np.int32(0),
                lengths=decode_state.lengths,
                drawn=decode_state.drawn,
                tables=self._tables,
                steps=np.int32(k),
            )
            state, block = core.generate(
                params,
                decode_state.core,
                run,
                context_pages=shapes.steps_of_half(context),
                mix=Mix(
                    truncated=s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0,
                    greedy=s.temperature == 0,
                ),
            )
            self._longest = np.minimum(self._longest + k, core.max_length)
            valid, drawn = _counted(block.owners, decode_state.drawn, core.slots)
            ended = jnp.any(block.ends & valid, axis=1)
            new = State(
                state,
                decode_state.active & ~ended,
                decode_state.lengths + drawn - decode_state.drawn,
                drawn,
            )
            return new, self._results(_as_data(block.tokens, valid, drawn), k)

        def _results(self, data: Any, k: int) -> Any:
            return api.ResultTokens(
                data=data,
                tokens_idx=(0, k),
                valid_idx=(k, 2 * k),
                length_idx=(2 * k, 2 * k + 1),
                samples_per_slot=1,
            )

        def get_prefix_destination_sharding(self) -> Any:
            """Where a prefix lies: the default device."""
            return jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def get_tokenizer(self) -> Any:
            """JetStream's description of a tokenizer; ours is built by build_tokenizer."""
            tokenizer = importlib.import_module("jetstream.engine.tokenizer_pb2")
            return tokenizer.TokenizerParameters(path="")

        def build_tokenizer(self, metadata: Any) -> Any:
            """Ours, in JetStream's interface."""
            return jetstream_tokenizer(self._tokenizer)

        @property
        def max_concurrent_decodes(self) -> int:
            """Slots."""
            return self._core.slots

        @property
        def samples_per_slot(self) -> int:
            """One."""
            return 1

        @property
        def max_prefill_length(self) -> int:
            """Longest prompt, tokens: JetStream wants one of its own buckets, powers of two."""
            return 1 << ((self._core.max_length - 1).bit_length() - 1)

        @property
        def mesh(self) -> Any:
            """The default device."""
            return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))

        @property
        def colocated_cpus(self) -> Any:
            """None are named."""
            return None

    return JaxrlEngine


def jetstream_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of ours (data.tokenizer) as a jetstream.engine.tokenizer_api.Tokenizer."""
    engine_api()
    api = importlib.import_module("jetstream.engine.tokenizer_api")
    utils = importlib.import_module("jetstream.engine.token_utils")

    class JaxrlTokenizer(api.Tokenizer):  # type: ignore[name-defined]
        """Encodes a prompt as training does, and decodes what was drawn."""

        def encode(self, s: str, **kwargs: Any) -> Any:
            """Padded token ids and their true number."""
            kwargs.pop("is_bos", None)  # encode_prompt adds what the model begins with
            ids = np.asarray(tokenizer.encode_prompt(s), np.int32)
            return utils.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=False, **kwargs)

        def decode(self, token_ids: list[int], **kwargs: Any) -> str:
            """Text of drawn tokens."""
            return str(tokenizer.decode(np.asarray(token_ids, np.int32)))

        @property
        def pad_id(self) -> int:
            """JetStream stops at it too, so it is the end of sequence."""
            return self.eos_id

        @property
        def eos_id(self) -> int:
            """The first end-of-sequence token."""
            return int(tokenizer.eos_ids[0])

        @property
        def bos_id(self) -> int:
            """Never used: encode_prompt adds it where the model has one."""
            return self.eos_id

        @property
        def stop_tokens(self) -> set[int]:
            """All end-of-sequence tokens."""
            return {int(i) for i in tokenizer.eos_ids}

    return JaxrlTokenizer()


@partial(jax.jit, static_argnums=2)
def _counted(owners: Any, drawn: Any, slots: int) -> tuple[Any, Any]:
    valid = owners < slots
    return valid, drawn + jnp.sum(valid, axis=1, dtype=jnp.int32)


@jax.jit
def _as_data(tokens: Any, valid: Any, drawn: Any) -> Any:
    """[S, 2 k + 1] int32: the tokens, whether each is one, and how many in all."""
    return jnp.concatenate(
        [jnp.where(valid, tokens, 0), valid.astype(jnp.int32), drawn[:, None]], axis=1
    )

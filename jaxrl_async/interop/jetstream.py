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
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.errors import MissingExtraError
from jaxrl_async.model.policy import Policy
from jaxrl_async.sampler.engine import Engine, Slot, pad_stop_ids, request_keys
from jaxrl_async.sampler.sampling import Controls
from jaxrl_async.sampler.schedule import live_bucket
from jaxrl_async.types import SamplingParams

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
            "form as "
            "README, section JetStream, says; the package is google-jetstream, not jetstream."
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
    tokenizer_path: str = "",
) -> Any:
    """A jetstream.engine.engine_api.Engine over the policy.

    tokens_per_step: K tokens a slot in each `generate`, in JetStream's words speculations. Each
    insert is a new request with a number of its own, which its random numbers depend on. Raises
    MissingExtraError.
    """
    core = Engine(policy.spec, slots=slots, max_length=max_length, max_new_tokens=max_new_tokens)
    wish = sampling or SamplingParams()
    return _engine_class()(
        core, policy, wish, stop_token_ids, seed, tokens_per_step, tokenizer_path
    )


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
            tokens_per_step: int,
            tokenizer_path: str,
        ) -> None:
            self._core, self._policy, self._sampling = core, policy, sampling
            self._stops, self._seed, self._k = stop_token_ids, seed, tokens_per_step
            self._tokenizer_path, self._inserted = tokenizer_path, 0

        def load_params(self, *args: Any, **kwargs: Any) -> Any:
            """The policy's parameters."""
            return self._policy.params

        def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
            """Empty slots."""
            return self._core.init_decode_state()

        def prefill(
            self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int
        ) -> Any:
            """padded_tokens [bucket], of which true_length are real. existing_prefix is not
            supported."""
            if existing_prefix is not None:
                raise NotImplementedError("existing_prefix: prefill the whole prompt instead")
            tokens = np.asarray(padded_tokens, np.int32)[None]
            return self._core.prefill(params, tokens, np.array([true_length]), 0)

        def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
            """Start decoding the prefix in a slot."""
            room = self._core.max_length - int(prefix.lengths[0])
            ask = self._ask(min(self._core.max_new, room))
            self._inserted += 1
            return self._core.insert(prefix, decode_state, row=0, slot=slot, ask=ask)

        def _ask(self, max_new: int) -> Slot:
            s = self._sampling
            controls = Controls(
                np.array([s.temperature], np.float32),
                np.array([s.top_k], np.int32),
                np.array([s.top_p], np.float32),
                np.array([s.min_p], np.float32),
            )
            key = np.asarray(request_keys(self._seed, np.array([[self._inserted, 0]], np.int32)))
            stops = np.array([pad_stop_ids(self._stops)], np.int32)
            return Slot(controls, key, stops, np.array([max_new], np.int32), np.array([False]))

        def generate(self, params: Any, decode_state: Any) -> tuple[Any, Any]:
            """K tokens in every active slot: the new state and JetStream's ResultTokens."""
            s, k = self._sampling, self._k
            plain = s.top_k == 0 and s.top_p == 1.0 and s.min_p == 0.0
            before = jnp.copy(decode_state.drawn)  # the state is donated
            longest = int(jnp.max(decode_state.lengths))
            state, _ = self._core.generate(
                params,
                decode_state,
                version=0,
                steps=k,
                live=live_bucket(longest, k, self._core.max_length),
                plain=plain,
            )
            return state, self._results(_new_tokens(before, state.drawn, state.tokens, k), k)

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
            """JetStream's description of the tokenizer: its path."""
            tokenizer = importlib.import_module("jetstream.engine.tokenizer_pb2")
            return tokenizer.TokenizerParameters(path=self._tokenizer_path)

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
            """Longest prompt, tokens."""
            return self._core.max_length - 1

        @property
        def mesh(self) -> Any:
            """The default device."""
            return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))

        @property
        def colocated_cpus(self) -> Any:
            """None are named."""
            return None

    return JaxrlEngine


@jax.jit
def _gather(before: Any, after: Any, tokens: Any, offsets: Any) -> Any:
    at = before[:, None] + offsets
    valid = at < after[:, None]
    drawn = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
    parts = [jnp.where(valid, drawn, 0), valid.astype(jnp.int32), after[:, None]]
    return jnp.concatenate(parts, axis=1)


def _new_tokens(before: Any, after: Any, tokens: Any, k: int) -> Any:
    """[S, 2 k + 1] int32: the tokens drawn since `before`, whether each is one, and how many in
    all."""
    return _gather(before, after, tokens, jnp.arange(k))

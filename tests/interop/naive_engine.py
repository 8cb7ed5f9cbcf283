"""A JetStream engine as somebody else would write one, and as plain as can be: it has no KV cache,
and computes all tokens of every slot anew for each token that it samples. Named by FILE.py:CLASS in
tests, which load it as a user's file."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.interop.jetstream import engine_api
from jaxrl_async.model.decoder import hidden_states, output_head

api = engine_api()


class NaiveEngine(api.Engine):
    """Draws one token of each slot a step. Attributes: made, swapped: for tests."""

    made: ClassVar[list["NaiveEngine"]] = []

    def __init__(
        self, policy, *, slots, max_length, max_new_tokens, tokens_per_step, sampling,
        stop_token_ids, seed, tokenizer, mesh, dtype,
    ) -> None:  # fmt: skip
        self.spec, self.first, self.slots, self.longest = (
            policy.spec,
            policy.params,
            slots,
            max_length,
        )
        self.temperature, self.key, self.swapped = sampling.temperature, jax.random.key(seed), 0
        self.device = mesh.devices.flat[0]
        NaiveEngine.made.append(self)

        @jax.jit
        def sample(params, tokens, lengths, key):
            where = jnp.broadcast_to(jnp.arange(max_length), tokens.shape)
            real = (where < lengths[:, None]).astype(jnp.int32)
            hidden = hidden_states(self.spec, params, tokens, where, real)
            last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], 1)[:, 0]
            logits = last @ output_head(self.spec, params)
            sampled = jax.random.categorical(key, logits / self.temperature)
            rows = jnp.arange(tokens.shape[0])
            room = lengths < max_length
            tokens = tokens.at[rows, jnp.where(room, lengths, max_length)].set(sampled, mode="drop")
            return tokens, lengths + room, sampled, room & (lengths > 0)

        self.sample = sample

    def take_params(self, params: Any) -> Any:
        """New weights, or the first: as they are."""
        self.swapped += 1
        return params

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        return self.first

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
        empty = np.zeros((self.slots, self.longest), np.int32), np.zeros(self.slots, np.int32)
        return jax.device_put(empty, self.device)

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length, **kwargs) -> Any:
        return np.asarray(padded_tokens)[:true_length]

    def insert(self, prefix, decode_state, slot: int) -> Any:
        tokens, lengths = decode_state
        row = np.zeros(self.longest, np.int32)
        row[: len(prefix)] = prefix
        return tokens.at[slot].set(row), lengths.at[slot].set(len(prefix))

    def generate(self, params, decode_state, **kwargs) -> Any:
        self.key, key = jax.random.split(self.key)
        tokens, lengths, sampled, valid = self.sample(params, *decode_state, key)
        data = jnp.stack([sampled, valid.astype(jnp.int32), lengths], 1)
        result = api.ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )
        return (tokens, lengths), result

    def get_prefix_destination_sharding(self) -> Any:
        return None

    def get_tokenizer(self) -> Any:
        return None

    def build_tokenizer(self, metadata: Any) -> Any:
        return None

    max_concurrent_decodes = property(lambda self: self.slots)
    samples_per_slot = property(lambda self: 1)
    max_prefill_length = property(lambda self: self.longest - 1)
    mesh = property(lambda self: None)
    colocated_cpus = property(lambda self: None)


class DeafEngine(NaiveEngine):
    """One that new weights cannot reach."""

    take_params = None

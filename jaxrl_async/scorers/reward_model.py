"""Score answers with a reward model, in addition to a reward function.

reward = function_weight * function + model_weight * model      parts: function's, and "model"
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl_async.config.schema import ModelSection, RewardSection
from jaxrl_async.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_async.errors import CheckpointError, ConfigError, RefusedScore, RolloutError
from jaxrl_async.mesh import (
    NO_DEVICE_LOCK,
    TRAINER_RULES,
    DeviceGuard,
    batch_sharding,
    num_shards,
    shardings,
)
from jaxrl_async.model.decoder import TokenRows, settings_on
from jaxrl_async.model.heads import head_table, load_head, sequence_scores
from jaxrl_async.model.hf import load_spec
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.scorers.results import FUNCTION, MODEL
from jaxrl_async.types import Episode, FloatArray, IntArray, Prompt, Score

log = logging.getLogger(__name__)

SHORTEST = 32
"""Minimum length of a padded row, tokens."""


class RewardModel:
    """Scores token sequences with a decoder and a scalar head.

    Usable from any thread; runs one program at a time under `device_lock`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: Params,
        mesh: Mesh,
        *,
        dtype: DTypeLike = jnp.float32,
        attention: str = "auto",
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
    ) -> None:
        """Compile the scoring of sequences.

        Args:
            spec: The decoder.
            params: Its weights, on the mesh.
            mesh: The devices.
            dtype: Of the computation.
            attention: As model.attention.
            device_lock: Shared with everything that runs programs on these devices.
        """
        self._params, self._device_lock = params, device_lock
        self._num_row_shards = num_shards(mesh, TRAINER_RULES, "batch")
        self._sharding, self._parts = batch_sharding(mesh), 2 * mesh.shape["context"]
        settings = settings_on(mesh, spec, dtype=dtype, attention=attention)

        def scores(params: Params, token_ids: Array, positions: Array, segment_ids: Array) -> Array:
            tokens = TokenRows(token_ids, positions, segment_ids)
            each = sequence_scores(spec, params, tokens, settings)
            return jnp.sum(each, axis=1)

        self._scores = jax.jit(scores, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, sequences: list[IntArray]) -> FloatArray:
        """Score each whole sequence: [sequences] float32.

        Rows and lengths are padded to powers of two, so only few programs are compiled.
        """
        rows = padded_rows(sequences, self._num_row_shards, self._parts)
        with self._device_lock:
            inputs = jax.device_put(rows, self._sharding)
            scores = np.asarray(self._scores(self._params, *inputs))  # waits
        return scores[: len(sequences)]


class RewardModelScorer:
    """ports.Scorer: the model's score, added to another scorer's score if one is given.

    The model runs on a separate thread, one group after another, never on the event loop.
    """

    def __init__(
        self,
        model: RewardModel,
        *,
        function: Scorer | None = None,
        function_weight: float = 1.0,
        model_weight: float = 1.0,
    ) -> None:
        self._model, self._function = model, function
        self._function_weight, self._model_weight = function_weight, model_weight
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score each episode by its whole token sequence; with several contexts, by the last one.

        Raises RolloutError, naming the prompt, if the model's number is not finite; also raises any
        exception of the function.
        """
        loop = asyncio.get_running_loop()
        sequences = [episode.token_ids[episode.starts[-1] :] for episode in episodes]
        scores: tuple[Score, ...] = (Score(reward=0.0),) * len(episodes)
        if self._function is not None:
            scores = await self._function(episodes, prompt)
        values = await loop.run_in_executor(self._thread, self._model, sequences)
        return tuple(
            self._add(score, float(value), prompt)
            for score, value in zip(scores, values, strict=True)
        )

    def _add(self, score: Score, value: float, prompt: Prompt) -> Score:
        if not math.isfinite(value):
            raise RolloutError(
                f"the reward model scored an answer to prompt {prompt.prompt_id} with {value}. "
                "Train it again with a smaller algorithm.learning_rate, or set "
                "model.dtype=float32."
            )
        if MODEL in score.parts:  # from an environment: make_scorer reserves the name for the model
            raise RefusedScore(
                f"prompt {prompt.prompt_id}: the environment gave a part named {MODEL!r}, which is "
                "the reward model's. Rename it."
            )
        parts = dict(score.parts)
        if self._function is not None and not parts and not score.left_out:
            parts = {FUNCTION: score.reward}
        token_rewards = score.token_rewards
        return replace(
            score,
            reward=self._function_weight * score.reward + self._model_weight * value,
            parts={**parts, MODEL: value},
            token_rewards=None if token_rewards is None else self._function_weight * token_rewards,
            named_of_tokens=self._function_weight * score.named_of_tokens,
        )


def padded_rows(
    sequences: Sequence[IntArray], row_shards: int, parts: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return a row for each sequence, padded to powers of two, so only few programs are compiled:
    token ids, positions and segment ids, each [rows, length] int32.

    Args:
        sequences: at least one, of at least one token.
        row_shards: the number of rows is a multiple of it.
        parts: the length is a multiple of it.
    """
    rows = next_power_of_two(-(-len(sequences) // row_shards)) * row_shards
    length = next_power_of_two(max(map(len, sequences)), SHORTEST)
    length += -length % parts
    token_ids, segment_ids = (np.zeros((rows, length), np.int32) for _ in range(2))
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = sequence
        segment_ids[row, : len(sequence)] = 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), token_ids.shape)
    return token_ids, positions, segment_ids


def next_power_of_two(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `count` and `least`."""
    return max(least, 1 << (count - 1).bit_length())


def load_reward_model(
    section: RewardSection,
    model: ModelSection,
    tokenizer: Tokenizer,
    mesh: Mesh,
    device_lock: DeviceGuard = NO_DEVICE_LOCK,
) -> RewardModel:
    """Load the model in reward.model onto this mesh, in model.dtype.

    Raises ConfigError if the folder holds no reward model, or the model uses other tokens than the
    policy.
    """
    folder, dtype = Path(section.model or ""), jnp.dtype(model.computes_in)
    try:
        spec = load_spec(folder)
        _check_tokens(folder, spec, tokenizer)
        where = shardings(head_table(spec, "reward"), mesh, TRAINER_RULES)
        spec, params = load_head(folder, "reward", where, dtype)
    except CheckpointError as error:
        raise ConfigError(
            f"reward.model = {folder} is not a reward model: {error} run.job=reward_model makes "
            "one, in runs/NAME/reward_model."
        ) from None
    return RewardModel(
        spec, params, mesh, dtype=dtype, attention=model.attention, device_lock=device_lock
    )


def _check_tokens(folder: Path, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the model was trained on other token ids than the policy's."""
    remedy = "Train it from the policy's own start, or set data.tokenizer to its tokenizer."
    if tokenizer.vocab_size > spec.vocab:
        raise ConfigError(
            f"reward.model = {folder} has a vocabulary of {spec.vocab} tokens; the policy's "
            f"tokenizer has ids up to {tokenizer.vocab_size - 1}. {remedy}"
        )
    if not (folder / "tokenizer.json").is_file():
        log.warning(
            "%s: no tokenizer.json, so its tokens cannot be compared with the policy's", folder
        )
        return
    policys, models = tokenizer.hf.get_vocab(), load_tokenizer(folder).hf.get_vocab()
    if policys != models:
        union = policys.keys() | models.keys()
        differing = sorted(k for k in union if policys.get(k) != models.get(k))
        raise ConfigError(
            f"reward.model = {folder} uses other tokens than the policy: {len(differing)} differ, "
            f"the first is {differing[0]!r}. {remedy}"
        )

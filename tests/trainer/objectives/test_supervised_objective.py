"""Supervised updates: the same loss as the policy step's, and what greedy decoding would say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import hidden_states, init_params, output_head
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.supervised_objective import (
    SupervisedObjective,
    supervised_update,
)
from jaxrl_async.trainer.pack import pack_pairs
from jaxrl_async.trainer.update import Update

pytestmark = pytest.mark.full

VOCAB, ROW = 8, 16
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48), VOCAB
)


def step_of(rows: int, chunk: int = 32) -> Update[SupervisedObjective]:
    settings = LearningSettings(
        mesh=make_slices(schema.MeshSection()).trainer,
        trainer=schema.TrainerSection(micro_batch_tokens=rows * ROW, logprob_chunk=chunk),
        row_length=ROW,
    )
    return supervised_update(SPEC, settings, learning_rate=1e-2, total_steps=100)


@pytest.fixture(scope="module")
def params() -> Any:
    return init_params(SPEC, jax.random.key(0))


def logits_of(params: Any, token_ids: np.ndarray) -> np.ndarray:
    row = jnp.asarray(np.pad(token_ids, (0, ROW - len(token_ids))))[None]
    return np.asarray(_logits(params, row), np.float64)


@jax.jit
def _logits(params: Any, row: Any) -> Any:
    hidden = hidden_states(SPEC, params, row, jnp.arange(ROW)[None], jnp.ones_like(row))
    return hidden[0] @ output_head(SPEC, params)


def greedy(params: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    """Prompt and the likeliest continuation, one token after another."""
    ids = prompt
    for _ in range(count):
        ids = np.append(ids, logits_of(params, ids)[len(ids) - 1].argmax()).astype(np.int32)
    return ids


def pairs_of(params: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Nine answers of four tokens; every third as greedy decoding gives it, others end wrongly."""
    rng, made = np.random.default_rng(0), []
    for index in range(9):
        ids = greedy(params, rng.integers(0, VOCAB, rng.integers(1, 5)).astype(np.int32), 4)
        if index % 3:
            ids[-1] = (ids[-1] + 1) % VOCAB
        made.append((ids, np.arange(len(ids)) >= len(ids) - 4))
    return made


def test_accuracy_is_the_share_that_greedy_decoding_gives_token_for_token(params):
    pairs = pairs_of(params)
    for step in (step_of(2), step_of(32, chunk=7)):
        measured = step.measure(params, pack_pairs(pairs, ROW))
        assert measured["sft/accuracy"] == pytest.approx(3 / 9)
        assert measured["sft/token_accuracy"] == pytest.approx(30 / 36)


def test_the_loss_is_that_of_each_answer_alone_and_a_step_lowers_it(params):
    pairs, step = pairs_of(params), step_of(2)
    batch = pack_pairs(pairs, ROW)
    terms = []
    for ids, mask in pairs:
        logits = logits_of(params, ids)
        at = np.flatnonzero(mask)
        terms += list(np.log(np.exp(logits[at - 1]).sum(-1)) - logits[at - 1, ids[at]])
    state, stats = step.update(step.init(params), batch)
    assert stats["train/loss"] == pytest.approx(float(np.mean(terms)), rel=1e-5)
    assert stats["train/tokens"] == 36 and stats["train/skipped"] == 0
    before, after = (step.measure(p, batch)["train/loss"] for p in (params, state.params))
    assert before == pytest.approx(stats["train/loss"], rel=1e-6) and after < before - 0.01


def test_updates_learn_the_answers(params):
    step = step_of(32)
    batch = pack_pairs(pairs_of(params), ROW)
    state, losses = step.init(params), []
    for _ in range(15):
        state, stats = step.update(state, batch)
        losses.append(stats["train/loss"])
    assert losses[-1] < 0.5 * losses[0]
    assert stats["train/learning_rate"] == pytest.approx(1e-2)

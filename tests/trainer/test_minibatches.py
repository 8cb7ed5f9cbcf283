"""Mini-batches: parts of a step's sequences, in which each weighs what it does in the whole."""

import weakref

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.algorithms.advantages import StepData
from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.learner import Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.trainer.row_index import RowIndex, moved, repacked
from jaxrl_async.trainer.step_data import PackedStep, StepRows, deal
from jaxrl_async.types import PackedBatch

pytestmark = pytest.mark.full

VOCAB = 24
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=24), VOCAB
)
MESH = make_slices(schema.MeshSection(), jax.devices()).trainer
PARAMS = init_params(SPEC, jax.random.key(0))


def sequence(length: int, number: int = 0, *, learns: bool = True, worked: bool = False):
    rng = np.random.default_rng(number)
    return TrainSequence(
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        mask=(np.arange(length) >= 1) & learns,
        behavior_logprobs=-3 - rng.random(length).astype(np.float32),
        versions=np.zeros(length, np.int32),
        advantages=np.full(length, rng.normal(), np.float32),
        group=number // 4,
        supervised=worked,
    )


def learner_of(row_length: int, minibatches: int, **algorithm) -> Learner:
    section = schema.AlgorithmSection(minibatches=minibatches, learning_rate=0.0, **algorithm)
    trainer = schema.TrainerSection(micro_batch_tokens=4 * row_length, logprob_chunk=32)
    settings = LearningSettings(mesh=MESH, trainer=trainer, row_length=row_length)
    step = policy_update(SPEC, settings, section, total_steps=9)
    return Learner(
        step, step.init(PARAMS), LearnerSettings(algorithm=section, row_length=row_length)
    )


def step_of(batch: PackedBatch) -> PackedStep:
    """A step of which only the rows are looked at."""
    data = StepData(groups=(), rewards=())
    return PackedStep(data, StepRows(batch, {}, {}), RowIndex.of(batch))


LENGTHS = np.clip(np.random.default_rng(0).lognormal(6.39, 0.8, 128), 16, 4000).astype(int)
EPISODES = pack([sequence(n, i) for i, n in enumerate(LENGTHS)], 4096)
"""128 lognormal episodes, 817 tokens in the mean and 2,929 at most, in 26 rows."""


def sequence_weights(parts: list[StepRows]) -> np.ndarray:
    """Of each episode, over all updates."""
    found = np.zeros(len(LENGTHS))
    for part in parts:
        mask = part.batch.mask
        np.add.at(found, part.batch.sequence_ids[mask], part.columns["weights"][mask] / len(parts))
    return found


@pytest.mark.parametrize("minibatches", [4, 16, 64])
@pytest.mark.parametrize("aggregate", ["sequence_mean", "per_group", "token_mean"])
def test_a_long_sequence_weighs_as_much_in_mini_batches_as_in_the_whole_step(
    minibatches, aggregate
):
    """Rows of neighbours in length, each mini-batch a mean of its own, gave the longest quarter
    1.2, 2.5 and 3.6 times the weight of the shortest."""
    learner = learner_of(4096, minibatches, aggregate=aggregate)
    many, lazy = learner.mini_batches(step_of(EPISODES), (0, 0, 0))
    parts = list(lazy)
    assert len(parts) == many == minibatches
    whole = learner._step.objective.weights(EPISODES)["weights"][EPISODES.mask]
    wanted = np.zeros(len(LENGTHS))
    np.add.at(wanted, EPISODES.sequence_ids[EPISODES.mask], whole)
    np.testing.assert_allclose(sequence_weights(parts), wanted, rtol=1e-4)
    if aggregate == "sequence_mean":
        order = np.argsort(LENGTHS)
        found = sequence_weights(parts)
        ratio = found[order[-32:]].mean() / found[order[:32]].mean()
        assert ratio == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("minibatches", [2, 3, 16])
def test_a_token_weighs_as_much_for_the_critic_as_in_the_whole_step(minibatches):
    """The mean over the mini-batches is the mean over the step's tokens: 1 / tokens each."""
    own = StepRows(
        EPISODES, {}, {name: np.zeros(EPISODES.mask.shape) for name in ("values", "returns")}
    )
    step = step_of(EPISODES)
    step = PackedStep(step.data, own, step.index)
    many, lazy = learner_of(4096, minibatches).mini_batches(step, (0, 0, 0))
    parts = list(lazy)
    found = np.concatenate([p.critic["weights"][p.batch.mask] for p in parts]) / many
    assert len(found) == EPISODES.mask.sum()
    np.testing.assert_allclose(found, 1 / EPISODES.mask.sum(), rtol=1e-5)


def test_mini_batches_have_as_many_sequences_and_nearly_as_many_tokens():
    for minibatches in (4, 16):
        parts = deal(EPISODES, minibatches, (0, 0, 0))
        assert {len(p) for p in parts} == {128 // minibatches}
        tokens = np.array([LENGTHS[p].sum() for p in parts])
        assert tokens.std() / tokens.mean() < 0.1


@pytest.mark.parametrize(
    "algorithm",
    [
        {"aggregate": "sequence_mean", "loss": "gspo"},
        {"aggregate": "token_mean", "supervised_coefficient": 0.5},
        {"aggregate": "per_group"},
    ],
    ids=str,
)
def test_the_mean_of_the_mini_batches_losses_is_the_steps(algorithm):
    """Also where sequences cannot be dealt evenly. The loss is linear in each token's part, so that
    its gradient follows."""
    sequences = [sequence(3 + 2 * i, i, worked=i in (3, 8)) for i in range(11)]
    batch = pack([*sequences, sequence(9, 11, learns=False)], 32)
    learner = learner_of(32, 4, **algorithm)
    step = learner._step
    _, lazy = learner.mini_batches(step_of(batch), (0, 0, 0))
    parts = list(lazy)
    assert len(parts) == 4
    losses = [step.measure(PARAMS, PolicyData(p.batch, p.columns))["train/loss"] for p in parts]
    whole = step.measure(PARAMS, PolicyData(batch))["train/loss"]
    assert np.mean(losses) == pytest.approx(whole, rel=1e-5)


def test_the_mini_batches_are_made_one_by_one():
    """All at once, each with its rows' sampling masks, were the step a second time."""
    many, parts = learner_of(4096, 16).mini_batches(step_of(EPISODES), (0, 0, 0))
    made: list[weakref.ref] = []
    for part in parts:
        made.append(weakref.ref(part.batch.token_ids))
        assert sum(one() is not None for one in made) <= 2
    assert len(made) == many == 16


def batches(draw_lengths: list[int], untrained: list[bool]) -> PackedBatch:
    pairs = enumerate(zip(draw_lengths, untrained, strict=True))
    return pack([sequence(n, i, learns=not s, worked=i % 5 == 4) for i, (n, s) in pairs], 16)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 16), st.booleans()), min_size=1, max_size=30),
    parts=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_every_sequence_that_learns_is_in_one_part_as_it_was(lengths, parts, seed):
    batch = batches([n for n, _ in lengths], [s for _, s in lengths])
    learns = np.unique(batch.sequence_ids[batch.mask | batch.supervised])
    dealt = deal(batch, parts, (seed,))
    assert len(dealt) <= parts
    if len(learns):
        np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), learns)
    own = np.unique(batch.sequence_ids[batch.mask])
    sizes = [np.isin(p, own).sum() for p in dealt]
    assert max(sizes) - min(sizes) <= 1
    for part in dealt:
        selection = RowIndex.of(batch).select(part)
        found = repacked(batch, selection)
        np.testing.assert_array_equal(np.unique(found.sequence_ids[selection.indices >= 0]), part)
        for number in part:
            before, after = batch.sequence_ids == number, found.sequence_ids == number
            for name in ("token_ids", "positions", "mask", "supervised", "behavior_logprobs",
                         "versions", "advantages", "group_ids"):  # fmt: skip
                values = getattr(batch, name)
                np.testing.assert_array_equal(values[before], getattr(found, name)[after])
            wide = np.stack([batch.token_ids, batch.positions], -1)
            np.testing.assert_array_equal(wide[before], moved(wide, selection)[after])
            rows, at = np.nonzero(after)
            assert len(set(rows)) == 1 and (np.diff(at) == 1).all()
            assert len(np.unique(found.segment_ids[after])) == 1
        for row in range(len(selection.indices)):
            real = found.segment_ids[row] > 0
            assert len(np.unique(found.segment_ids[row][real])) == len(
                np.unique(found.sequence_ids[row][real])
            )
            assert not found.mask[row][~real].any() and (found.sequence_ids[row][~real] == -1).all()


def test_no_length_is_in_the_larger_parts_more_often():
    batch = pack([sequence(n, i) for i, n in enumerate((2, 3, 4, 12, 14))], 16)
    found = np.zeros(5)
    for seed in range(600):
        for part in deal(batch, 3, (seed,)):
            found[part] += len(part) == 1
    assert (np.abs(found / 600 - 1 / 5) < 0.07).all()  # one of five is alone; 4 standard errors


def test_the_deal_is_keyed_by_its_seed():
    first, again, other = (deal(EPISODES, 4, seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))

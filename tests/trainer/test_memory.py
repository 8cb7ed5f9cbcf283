"""An update for which memory does not suffice: half the rows, the same numbers, and an end."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.data.preferences import PreferencePair
from jaxrl_async.errors import TrainingError
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.heads import with_head
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer import update as update_module
from jaxrl_async.trainer.learning_settings import LearningSettings, MicroSizes
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.objectives.reward_objective import reward_update
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.trainer.pack_pairs import pack_preference
from jaxrl_async.trainer.update import MOST_OF_FREE
from jaxrl_async.trainer.update_programs import NOTHING_FROZEN

pytestmark = pytest.mark.full

VOCAB, ROW, ROWS = 24, 16, 6
ARCHITECTURE = schema.ArchitectureSection(
    layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16
)
SPEC = ModelSpec.from_architecture(ARCHITECTURE, VOCAB)


def make_step(micro_batch_tokens=ROWS * ROW, **axes):
    mesh = make_slices(
        schema.MeshSection(trainer=schema.AxesSection(**axes)), jax.devices()
    ).trainer
    # epsilon 1: a step that is nearly the gradient, so that sums in another order agree
    settings = LearningSettings(
        mesh=mesh,
        trainer=schema.TrainerSection(micro_batch_tokens=micro_batch_tokens, epsilon=1.0),
        row_length=ROW,
    )
    algorithm = schema.AlgorithmSection(learning_rate=1e-2)
    return policy_update(SPEC, settings, algorithm, total_steps=10)


def sequence(rng):
    mask = np.ones(ROW, bool)
    mask[:3] = False
    return TrainSequence(
        token_ids=rng.integers(0, VOCAB, ROW).astype(np.int32),
        mask=mask,
        behavior_logprobs=-3 - rng.random(ROW).astype(np.float32),
        versions=np.zeros(ROW, np.int32),
        advantages=np.full(ROW, rng.normal(), np.float32),
    )


RNG = np.random.default_rng(0)
DATA = PolicyData(pack([sequence(RNG) for _ in range(ROWS)], ROW))
PARAMS = init_params(SPEC, jax.random.key(0))


@contextmanager
def memory_for(step, rows, seen):
    """Programs of more rows than this run out of memory, as a device says it."""
    real = step.programs.accumulate

    def limited(params, sums, micro, *rest):
        seen.append(len(jax.tree.leaves(micro)[0]))
        if seen[-1] > rows:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
        return real(params, sums, micro, *rest)

    step.programs.accumulate = limited
    try:
        yield
    finally:
        step.programs.accumulate = real


def test_with_half_the_rows_the_update_is_the_same_and_stays_halved():
    whole = make_step()
    expected, report = whole.update(whole.init(PARAMS), DATA)
    step, seen = make_step(), []
    with memory_for(step, 2, seen):
        state, stats = step.update(step.init(PARAMS), DATA)
        assert seen == [6, 3, 2, 2, 2]
        trained = jax.tree.map(np.array, state.params)
        step.update(state, DATA)
        assert seen[5:] == [2, 2, 2], "it does not try the large ones again"
    assert stats["faults/oom_retries"] == 2 and stats["train/micro_batches"] == 3
    assert "faults/oom_retries" not in report
    assert stats["train/loss"] == pytest.approx(report["train/loss"], abs=1e-6)  # terms of about 1
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(trained), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_with_one_row_on_each_device_it_ends_with_a_reason_and_the_state_as_it_was():
    step, seen = make_step(fsdp=2), []
    state = step.init(PARAMS)
    before = jax.tree.map(np.array, state)
    with memory_for(step, 0, seen), pytest.raises(TrainingError, match=r"2 rows.*model\.remat"):
        step.update(state, DATA)
    assert seen == [6, 4, 2]
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_error_of_the_device_is_not_taken_for_it():
    step = make_step()

    def broken(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    step.programs.accumulate = broken
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        step.update(step.init(PARAMS), DATA)


def test_both_answers_of_a_pair_stay_in_one_micro_batch():
    mesh = make_slices(schema.MeshSection(), jax.devices()).trainer
    trainer = schema.TrainerSection(micro_batch_tokens=ROWS * ROW)
    settings = LearningSettings(mesh=mesh, trainer=trainer, row_length=ROW)
    step, seen = reward_update(SPEC, settings, learning_rate=1e-2, total_steps=10), []
    state = step.init(with_head(SPEC, PARAMS, "reward", jax.random.key(1)))
    ids = np.arange(1, 5, dtype=np.int32)
    pair = PreferencePair(prompt_ids=ids, chosen_ids=ids, rejected_ids=ids)
    with memory_for(step, 0, seen), pytest.raises(TrainingError, match="out of memory"):
        step.update(state, pack_preference([pair], ROW, step.micro_rows))
    assert seen == [ROWS]


def test_an_update_computes_little_more_than_its_rows():
    step = make_step()
    data = PolicyData(pack([sequence(RNG) for _ in range(ROWS + 2)], ROW))
    state, report = step.update(step.init(PARAMS), data)
    assert (report["train/rows"], report["train/micro_batches"]) == (ROWS + 2, 2)
    few = PolicyData(pack([sequence(RNG)], ROW))
    _, report = step.update(state, few)
    assert report["train/rows"] == 1, "of 6, 2 and 1 rows the size that holds it"


def test_a_program_that_the_machine_has_no_memory_for_is_not_started(monkeypatch, caplog):
    """On a CPU the process would be killed."""
    step, expected_step = make_step(), make_step()
    expected, _ = expected_step.update(expected_step.init(PARAMS), DATA)
    needed = []

    def lowered(rows):
        shapes = expected_step.programs.put(
            expected_step.objective.micro_batches(DATA, MicroSizes((rows,)))[0]
        )
        context = expected_step.objective.context(DATA)
        program = expected_step.programs.accumulate.lower(
            PARAMS, expected_step.programs.zeros(), shapes, context, NOTHING_FROZEN
        )
        return program.compile().memory_analysis().temp_size_in_bytes

    needed = [lowered(ROWS // 2), lowered(ROWS)]
    free = sum(needed) / 2 / MOST_OF_FREE
    monkeypatch.setattr(update_module, "host_memory", lambda: (2**40, free))
    state, report = step.update(step.init(PARAMS), DATA)
    assert report["train/micro_batches"] == 2 and step.sizes.most == ROWS // 2
    assert "faults/oom_retries" not in report, "nothing failed"
    (record,) = [r for r in caplog.records if "out of memory" in r.getMessage()]
    assert "GB are free" in record.getMessage()
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    monkeypatch.setattr(update_module, "host_memory", lambda: (2**40, 1))
    another = make_step()
    trained, _ = another.update(another.init(PARAMS), DATA)
    assert another.sizes.most == 1 and "may not suffice" in caplog.text, "an estimate ends no run"
    for a, b in zip(jax.tree.leaves(expected.params), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)

"""Weights kept in bfloat16: what small updates do to them, against a float32 run and float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_spec

from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.spec import ModelSpec, Weight
from jaxrl_async.run.checkpoint.store import Checkpoints
from jaxrl_async.trainer.critic import make_critic
from jaxrl_async.trainer.frozen_models import _moved_average
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import policy_update
from jaxrl_async.trainer.objectives.preference_objective import preference_update
from jaxrl_async.trainer.objectives.reward_objective import reward_update
from jaxrl_async.trainer.objectives.supervised_objective import supervised_update
from jaxrl_async.trainer.optimizer import optimizer_bytes, rounded_tree, stochastically_rounded
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import TrainState, WithMasters

pytestmark = pytest.mark.full

MESH = make_slices(schema.MeshSection(), jax.devices()).trainer
SHAPE = (64, 64)
TABLE = {"w": Weight(shape=SHAPE, axes=("embed", "vocab"), init="normal")}
RATE, UPDATES = 1e-6, 60


class Given:
    """An objective whose gradient is its one micro-batch, whatever the weights are; and what these
    say of a token is their first row."""

    spec, table, prefix, rows_are_independent = tiny_spec(8), TABLE, "train", True

    def micro_batches(self, data: Any, sizes: Any) -> Any:
        return [{"given": data, "token_ids": np.zeros((1, SHAPE[0]), np.int32)}]

    def context(self, data: Any) -> None:
        return None

    def loss(self, trainable: Any, frozen: Any, micro: Any, context: None) -> tuple[Any, Totals]:
        loss = jnp.sum(trainable["w"].astype(jnp.float32) * micro["given"][0])
        return loss, Totals({"train/loss": loss}, {}, {}, {})

    def measures(self, *args: Any) -> Totals:
        return self.loss(*args)[1]

    def probe(self, trainable: Any, *_: Any) -> Any:
        return trainable["w"][0]

    def report(self, *_: Any) -> dict[str, float]:
        return {}


def update_of(dtype: Any, **settings: Any) -> Update[Given]:
    trainer = schema.TrainerSection(max_grad_norm=1e9, **settings)
    common = LearningSettings(mesh=MESH, trainer=trainer, row_length=SHAPE[0], param_dtype=dtype)
    return Update(Given(), common, learning_rate=RATE, total_steps=UPDATES)


RNG = np.random.default_rng(0)
START = np.asarray(jnp.asarray(0.02 * RNG.normal(size=SHAPE), jnp.bfloat16), np.float32)
DRIFT = RNG.normal(size=SHAPE)
GRADIENTS = [
    np.asarray(jnp.asarray(DRIFT + RNG.normal(size=SHAPE), jnp.bfloat16), np.float32)[None]
    for _ in range(UPDATES)
]
"""What bfloat16 holds exactly: the gradients of weights in bfloat16 are in it, too."""


def train(
    step: Update[Given], state: TrainState, first: int = 0, last: int = UPDATES
) -> TrainState:
    for gradient in GRADIENTS[first:last]:
        state, report = step.update(state, gradient)
        assert report["train/skipped"] == 0
    return state


def weights(state: TrainState) -> np.ndarray:
    return np.asarray(state.params["w"], np.float64)


def adamw(steps: int = UPDATES) -> np.ndarray:
    """float64 of Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2."""
    w, m, v = START.astype(np.float64), 0.0, 0.0
    for t, gradient in enumerate(GRADIENTS[:steps], 1):
        g = gradient[0].astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        w = w - RATE * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return w


EXACT = adamw()


@pytest.mark.parametrize("offload", [(), ("optimizer",)], ids=str)
def test_masters_are_the_float32_run_bit_for_bit_and_the_weights_are_these_rounded(offload):
    wide, narrow = update_of(jnp.float32), update_of(jnp.bfloat16, offload=offload)
    expected = weights(train(wide, wide.init({"w": START})))
    np.testing.assert_allclose(expected, EXACT, atol=2e-9 * UPDATES)  # float32 at 0.02: 1e-9 each
    state = train(narrow, narrow.init({"w": START}))
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.opt_state.masters["w"], expected.astype(np.float32))
    rounded = np.asarray(jnp.asarray(expected, jnp.bfloat16), np.float64)
    np.testing.assert_array_equal(weights(state), rounded)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state.masters)}
    assert kinds == {"pinned_host" if offload else "device"}


def test_stochastic_rounding_follows_the_float32_run_in_the_mean():
    step = update_of(jnp.bfloat16, rounding="stochastic")
    state = step.init({"w": START})
    assert not isinstance(state.opt_state, WithMasters)
    found, went = weights(train(step, state)), EXACT - START
    total = np.sum((found - START) * np.sign(went))
    assert total == pytest.approx(np.abs(went).sum(), rel=0.1)  # 4 standard errors of 4,096 weights
    ulp = 2.0 ** (np.floor(np.log2(np.abs(START) + 1e-9)) - 7)
    assert np.mean(np.abs(found - EXACT) < 2 * ulp + np.abs(went)) > 0.99


def test_rounding_to_the_nearest_loses_nearly_all_steps_and_is_there_by_name_only():
    step = update_of(jnp.bfloat16, rounding="nearest")
    found = weights(train(step, step.init({"w": START})))
    went = EXACT - START
    share = np.sum((found - START) * np.sign(went)) / np.abs(went).sum()
    assert share < 0.5 and np.mean(found != START) < 0.1
    assert schema.TrainerSection().rounding == "masters"


def test_masters_begin_as_what_is_given_before_it_is_rounded_and_leave_it_to_the_caller():
    step = update_of(jnp.bfloat16)
    given = {"w": jnp.asarray(START + 1e-6 * DRIFT, jnp.float32)}
    state = step.init(given)
    np.testing.assert_array_equal(state.opt_state.masters["w"], given["w"])
    train(step, state, last=1)
    assert not given["w"].is_deleted()


@pytest.mark.parametrize("rounding", ["masters", "stochastic"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_an_optimizer_keeps_as_many_bytes_as_a_plan_counts(dtype, rounding):
    state = update_of(dtype, rounding=rounding).init({"w": START})
    kept = sum(x.nbytes for x in jax.tree.leaves(state.opt_state) if x.ndim)
    section = schema.TrainerSection(rounding=rounding)
    assert kept == START.size * optimizer_bytes(section, dtype)


def test_a_skipped_step_leaves_masters_too():
    step = update_of(jnp.bfloat16)
    state = step.init({"w": START})
    before = jax.tree.map(np.array, state)
    state, report = step.update(state, np.full((1, *SHAPE), np.nan, np.float32))
    assert report["train/skipped"] == 1
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rounding", ["masters", "stochastic"])
def test_a_run_from_a_checkpoint_continues_bit_for_bit(tmp_path, rounding):
    step = update_of(jnp.bfloat16, rounding=rounding)
    state = train(step, step.init({"w": START}), last=5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state={"train": state}, loop={})
        checkpoints.wait()
        like = {"train": step.init({"w": np.zeros(SHAPE, np.float32)})}
        restored = checkpoints.restore(None, like).state["train"]
    ends = [train(step, s, first=5, last=9) for s in (state, restored)]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_every_kind_of_update_keeps_masters():
    shape = schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16)
    spec = ModelSpec.from_architecture(shape, 24)
    settings = LearningSettings(
        mesh=MESH,
        trainer=schema.TrainerSection(micro_batch_tokens=64),
        row_length=16,
        param_dtype=jnp.bfloat16,
    )
    steps: list[Update[Any]] = [
        policy_update(spec, settings, schema.AlgorithmSection(), total_steps=9),
        make_critic(spec, settings, learning_rate=RATE, total_steps=9).step,
        supervised_update(spec, settings, learning_rate=RATE, total_steps=9),
        preference_update(spec, settings, "dpo", learning_rate=RATE, total_steps=9),
        reward_update(spec, settings, learning_rate=RATE, total_steps=9),
    ]
    assert all(isinstance(s.programs.state_shardings.opt_state, WithMasters) for s in steps)


def test_rounding_at_random_gives_one_of_both_neighbours_and_the_right_mean():
    values = np.array([1.001, -1.001, 0.0, 1.0, 3e-3, -2.5e5, np.inf, np.nan], np.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    rounded = jax.vmap(lambda k: stochastically_rounded(k, jnp.asarray(values), jnp.bfloat16))(keys)
    found = np.asarray(rounded, np.float64)
    np.testing.assert_array_equal(found[:, [2, 3]], np.tile([0.0, 1.0], (4000, 1)))
    assert (found[:, 6] == np.inf).all() and np.isnan(found[:, 7]).all()
    for column, value in zip(found.T[[0, 1, 4, 5]], values[[0, 1, 4, 5]], strict=True):
        below, above = np.unique(column)
        assert below < value < above and above - below <= 2**-7 * abs(value)
        standard_error = (above - below) / 2 / np.sqrt(4000)
        assert abs(column.mean() - value) < 4 * standard_error


def test_a_moving_average_in_bfloat16_arrives():
    """With the nearest, a share of 1 % of a difference of 10 % would never be added."""
    follow = jax.jit(_moved_average, static_argnums=(3,))
    reference = {"w": jnp.full((64, 64), 1.0, jnp.bfloat16)}
    params = {"w": jnp.full((64, 64), 1.1, jnp.bfloat16)}
    for version in range(200):
        reference = follow(reference, params, np.int32(version), 0.99)
    goal = float(params["w"][0, 0])
    wanted = goal + (1 - goal) * 0.99**200
    assert float(reference["w"].astype(jnp.float32).mean()) == pytest.approx(wanted, abs=1e-3)


def test_arrays_of_one_shape_are_rounded_by_bits_of_their_own():
    between = jnp.full((64, 64), 1 + 2**-8, jnp.float32)  # half way between two numbers
    tree = rounded_tree(jax.random.key(0), {"a": between, "b": between}, jnp.bfloat16)
    same = np.mean(np.asarray(tree["a"] == tree["b"]))
    assert 0.4 < same < 0.6

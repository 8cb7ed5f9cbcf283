"""One device and meshes of eight, over each choice of axes, learn the same."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.mesh import NO_DEVICE_LOCK, make_mesh, shapes_on
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.lora import Lora
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.plan.cost import cost_of
from jaxrl_async.plan.hlo import parse
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import (
    PolicyData,
    PolicyObjective,
    policy_update,
)
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import NOTHING_FROZEN, probe_ids

pytestmark = pytest.mark.full

VOCAB, ROW, ROWS = 16, 32, 8
DENSE = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=16), VOCAB
)
ROUTED = ModelSpec.from_architecture(
    schema.ArchitectureSection(
        family="qwen3_moe", experts=8, experts_per_token=2,
        layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=8,
    ),
    VOCAB,
)  # fmt: skip
LINEAR = {"epsilon": 1.0, "max_grad_norm": 1e9, "beta1": 0.0, "beta2": 0.0}
"""AdamW whose step is nearly proportional to the gradient: other ones divide each gradient by
itself, and make whole steps of the rounding of those that are nearly 0."""


FEW = (
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
)
"""Each axis is in one of them; the others are CI's."""


def meshes(*names: str, having: str = "") -> list[Any]:
    """A mesh of eight devices over each choice of these axes."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(names))
    found = [
        {name: n for name, n in zip(names, size, strict=True) if n > 1}
        for size in sizes
        if np.prod(size) == 8
    ]
    chosen = {tuple(axes): axes for axes in found if not having or having in axes}
    return [
        pytest.param(axes, marks=() if axes in FEW else pytest.mark.exhaustive)
        for axes in chosen.values()
    ]


def sequence(rng: np.random.Generator, length: int) -> TrainSequence:
    mask = np.ones(length, bool)
    mask[:2] = mask[5] = False
    return TrainSequence(
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        mask=mask,
        behavior_logprobs=-3 - rng.random(length).astype(np.float32) / 5,
        versions=np.full(length, 3, np.int32),
        advantages=np.full(length, rng.normal(), np.float32),
    )


def batch() -> Any:
    """Eight rows, each of a longer and a shorter sequence and some padding."""
    rng = np.random.default_rng(0)
    return pack([sequence(rng, n) for _ in range(ROWS) for n in (17, 12)], ROW)


def step_on(
    spec: ModelSpec, axes: dict[str, int], lora: Lora | None = None, **trainer: Any
) -> Update[PolicyObjective]:
    section = {"micro_batch_tokens": ROWS * ROW, "logprob_chunk": 16, **LINEAR, **trainer}
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    settings = LearningSettings(
        mesh=make_mesh(schema.AxesSection(**axes), devices),
        trainer=schema.TrainerSection(**section),
        row_length=ROW,
        remat="layer",
        lora=lora,
    )
    algorithm = schema.AlgorithmSection(learning_rate=1e-2, entropy_coefficient=0.01)
    return policy_update(spec, settings, algorithm, total_steps=10)


def outcome(step: Update[PolicyObjective], params: Any) -> dict[str, Any]:
    """Loss and gradients of the batch, and the weights after one step of the optimizer."""
    state, data = step.init(params), PolicyData(batch(), version=3)
    micros = step.objective.micro_batches(data, step.sizes)
    context = step.objective.context(data)
    sums, _ = step._gradients(state, micros, context, NOTHING_FROZEN, NO_DEVICE_LOCK)
    parts = step.programs.parts > 1
    whole = jax.tree.map(lambda g: np.array(g).sum(axis=0) if parts else np.array(g), sums.grads)
    found = {"loss": np.array(sums.loss), "gradients": whole}
    moved, _ = step.programs.apply(state, sums, NOTHING_FROZEN, probe_ids(micros[0]))
    return found | {"weights": jax.tree.map(np.array, moved.params)}


def assert_same(found: Any, wanted: Any) -> None:
    """Within 1e-5 of the largest number of each array, float32's rounding of other orders of
    summing."""
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, b), a in zip(leaves, jax.tree.leaves(found), strict=True):
        limit = 1e-5 * max(np.abs(b).max(), 1e-3)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=limit, err_msg=str(path))


@pytest.fixture(scope="module")
def alone() -> Any:
    """(random weights, what one device makes of them) of a model; computed once each."""

    @functools.cache
    def of(spec: ModelSpec) -> tuple[Any, Any]:
        params = init_params(spec, jax.random.key(0))
        return params, outcome(step_on(spec, {}), params)

    return of


@pytest.mark.parametrize("axes", meshes("data", "fsdp", "context", "tensor"), ids=str)
def test_every_mesh_learns_what_one_device_does(axes, alone):
    params, wanted = alone(DENSE)
    assert_same(outcome(step_on(DENSE, axes), params), wanted)


@pytest.mark.parametrize("axes", [{}, {"data": 2, "tensor": 2}, {"context": 2}], ids=str)
def test_the_cpus_own_kernels_learn_what_xlas_programs_do(axes, alone):
    params, wanted = alone(DENSE)
    assert_same(outcome(step_on(DENSE, axes, cpu_kernels=False), params), wanted)


@pytest.mark.parametrize(
    "axes",
    meshes("data", "fsdp", "expert", "context", "tensor", having="expert"),
    ids=str,
)
def test_every_mesh_learns_with_experts_what_one_device_does(axes, alone):
    params, wanted = alone(ROUTED)
    assert_same(outcome(step_on(ROUTED, axes), params), wanted)


def bytes_over_data(lowered: Any, axes: dict[str, int]) -> float:
    """What a device of a program sends to other parts of the axis data."""
    program = parse(lowered.compile().as_text())
    talk = cost_of(program, axes, lambda i, flops, num_bytes: 0.0).collectives
    return sum(one.num_bytes for one in talk if "data" in one.axes.split("+"))


def test_gradients_cross_the_axis_data_once_an_update():
    """A micro-batch's program sends a few numbers of the report over it; the optimizer's the
    gradient, of which each device has its share. The report's are the same as without."""
    axes = {"data": 2, "fsdp": 2}
    step = step_on(DENSE, axes)
    params = init_params(DENSE, jax.random.key(0))
    shares = jax.tree.map(lambda p: p.nbytes // 2, params)
    data = PolicyData(batch(), version=3)
    micro = step.programs.put(step.objective.micro_batches(data, step.sizes)[0])
    shapes = shapes_on(params, step.programs.state_shardings.params)
    programs = step.programs.lower(shapes, micro, step.objective.context(data))
    over_data = {name: bytes_over_data(program, axes) for name, program in programs.items()}
    gradient = sum(jax.tree.leaves(shares))
    assert over_data["gradient"] < gradient / 4 < gradient / 2 < over_data["update"]
    one, alone = (s.update(s.init(params), data)[1] for s in (step, step_on(DENSE, {})))
    assert one.keys() == alone.keys()
    for name in one.keys() - {"train/rows", "train/packing", "train/micro_batches"}:
        np.testing.assert_allclose(one[name], alone[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_each_part_of_the_axis_data_drops_inputs_of_its_own():
    """Equal rows on two parts have unequal gradients where an adapter drops inputs."""
    step = step_on(DENSE, {"data": 2}, lora=Lora(rank=2, names=("q", "up"), scale=1.0, dropout=0.5))
    policy = Policy(DENSE, init_params(DENSE, jax.random.key(0))).adapted(
        step.settings.lora, jax.random.key(1)
    )
    rng = np.random.default_rng(0)
    twice = [sequence(rng, ROW)] * 2
    data = PolicyData(pack(twice, ROW), version=3)
    micros, context = step.objective.micro_batches(data, step.sizes), step.objective.context(data)
    frozen = NOTHING_FROZEN._replace(base=policy.params)
    state = step.init(policy.adapter)
    sums, _ = step._gradients(state, micros, context, frozen, NO_DEVICE_LOCK)
    first, second = (jax.tree.map(lambda g, i=i: np.array(g)[i], sums.grads) for i in (0, 1))
    unequal = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-6, first, second)
    assert any(jax.tree.leaves(unequal))

"""The norm of each loss component's gradient, against jax.grad of whole sequences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import NO_DEVICE_LOCK
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.model.decoder import hidden_states, init_params, output_head
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.component_gradients import ComponentGradients
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.trainer.update_programs import NOTHING_FROZEN

pytestmark = pytest.mark.full

VOCAB, ROW = 24, 16
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48), VOCAB
)
PARAMS = init_params(SPEC, jax.random.key(0), jnp.float32)
SECTION = schema.AlgorithmSection(
    aggregate="token_mean",
    losses={
        "sft": {"loss": "nll", "coefficient": 0.3},
        "near": {"loss": "squared_log_ratio", "coefficient": 0.5, "gradient_every": 2},
        "low": {"loss": "entropy", "coefficient": -0.25, "gradient_every": 3},
    },
)


def sequences(count: int = 9) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        length = int(rng.integers(6, ROW + 1))
        mask = np.arange(length) >= 2
        mask[4] = False
        made.append(
            TrainSequence(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                mask=mask,
                behavior_logprobs=-3 - rng.random(length).astype(np.float32),
                versions=np.full(length, 3, np.int32),
                advantages=np.full(length, rng.normal(), np.float32),
            )
        )
    return made


SEQUENCES = sequences()
DATA = PolicyData(pack(SEQUENCES, ROW), version=3)


@functools.cache
def made(data: int, fsdp: int) -> tuple[ComponentGradients, Any]:
    """Compiled once for each mesh."""
    settings = LearningSettings(
        mesh=mesh_of(data=data, fsdp=fsdp),
        trainer=schema.TrainerSection(micro_batch_tokens=4 * ROW, logprob_chunk=32),
        row_length=ROW,
    )
    update = policy_update(SPEC, settings, SECTION, total_steps=9)
    assert len(update.objective.micro_batches(DATA, update.sizes)) > 1, "gradients add up"
    return ComponentGradients(update, SECTION.components), update.init(PARAMS).params


def measured(version: int, data: int = 1, fsdp: int = 1) -> dict[str, float]:
    gradients, params = made(data, fsdp)
    return gradients.norms(version, params, DATA, NOTHING_FROZEN, NO_DEVICE_LOCK)


def term(params: Any, name: str) -> jax.Array:
    """The mean of a component over all trained tokens, from the logits of whole sequences."""
    total, count = jnp.float32(0), 0
    for one in SEQUENCES:
        ids = jnp.asarray(one.token_ids)[None]
        positions = jnp.arange(ids.shape[1])[None]
        hidden = hidden_states(SPEC, params, ids, positions, jnp.ones_like(ids), dtype=jnp.float32)
        logs = jax.nn.log_softmax(hidden[0, :-1] @ output_head(SPEC, params))
        if name == "near":
            chosen = jnp.take_along_axis(logs, ids[0, 1:, None], -1)[:, 0]
            values = (chosen - one.behavior_logprobs[1:]) ** 2 / 2
        else:
            values = jnp.sum(jnp.exp(logs) * logs, -1)  # -entropy
        total += jnp.sum(jnp.where(one.mask[1:], values, 0.0))
        count += int(one.mask[1:].sum())
    return total / count


def norm_of(name: str, coefficient: float) -> float:
    slopes = jax.tree.leaves(jax.grad(term)(PARAMS, name))
    return abs(coefficient) * float(
        np.sqrt(sum((np.asarray(s, np.float64) ** 2).sum() for s in slopes))
    )


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 2)])
def test_the_norm_is_that_of_the_terms_own_gradient(data: int, fsdp: int) -> None:
    found = measured(5, data, fsdp)
    assert set(found) == {"loss_grad_norm/near", "loss_grad_norm/low"}
    assert all(metric_of(key) for key in found)
    assert found["loss_grad_norm/near"] == pytest.approx(norm_of("near", 0.5), rel=1e-4)
    assert found["loss_grad_norm/low"] == pytest.approx(norm_of("low", -0.25), rel=1e-4)


def test_each_component_is_measured_at_its_own_interval() -> None:
    due = [sorted(key.partition("/")[2] for key in measured(version)) for version in range(4)]
    assert due == [[], ["near"], ["low"], ["near"]]


def test_an_unknown_option_of_the_compiler_names_the_setting() -> None:
    """A component may be measured before the first update, which would say the same."""
    trainer = schema.TrainerSection(
        micro_batch_tokens=4 * ROW, compiler_options={"xla_no_such_option": "1"}
    )
    settings = LearningSettings(mesh=mesh_of(), trainer=trainer, row_length=ROW)
    update = policy_update(SPEC, settings, SECTION, total_steps=9)
    gradients, params = ComponentGradients(update, SECTION.components), update.init(PARAMS).params
    with pytest.raises(ConfigError, match=r"trainer\.compiler_options: .*xla_no_such_option"):
        gradients.norms(1, params, DATA, NOTHING_FROZEN, NO_DEVICE_LOCK)

"""Three updates on a mesh over the devices of two processes: update_worker.py HOST:PORT INDEX
prints the losses as JSON."""

import json
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_async.config import schema
from jaxrl_async.mesh import TRAINER_RULES, make_slices, shardings
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.types import PackedBatch

DEVICES = 2
"""One for each process."""


def losses(devices: Sequence[jax.Device]) -> list[float]:
    """Of three updates on these devices, of which this process may hold a part."""
    axes = schema.AxesSection(fsdp=DEVICES)
    section = schema.MeshSection(trainer=axes).without_samplers
    mesh = make_slices(section, devices).trainer
    architecture = schema.ArchitectureSection(
        layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64
    )
    spec = ModelSpec.from_architecture(architecture, 16)
    make = jax.jit(
        lambda: init_params(spec, jax.random.key(0)),
        out_shardings=shardings(weight_table(spec), mesh, TRAINER_RULES),
    )
    trainer = schema.TrainerSection(micro_batch_tokens=64)
    settings = LearningSettings(mesh=mesh, trainer=trainer, row_length=16)
    step = policy_update(spec, settings, schema.AlgorithmSection(learning_rate=1e-2), total_steps=3)
    state, found = step.init(make()), []
    for number in range(3):
        state, stats = step.update(state, PolicyData(batch(number)))
        found.append(stats["train/loss"])
    return found


def batch(number: int) -> PackedBatch:
    """Sixteen answers of one to twelve tokens, the same in every process."""
    rng = np.random.default_rng(number)
    answers = []
    for _ in range(16):
        n = int(rng.integers(1, 13))
        answers.append(
            TrainSequence(
                token_ids=rng.integers(0, 16, n).astype(np.int32),
                mask=np.arange(n) > 0,
                behavior_logprobs=np.full(n, -2.5, np.float32),
                versions=np.zeros(n, np.int32),
                advantages=np.full(n, rng.normal(), np.float32),
            )
        )
    return pack(answers, row_length=16)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[1], DEVICES, int(sys.argv[2]))
    print(json.dumps(losses(jax.devices())))

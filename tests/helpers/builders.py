"""Build the small things that many tests need: a spec, its weights, a mesh, a group, a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.config import schema
from jaxrl_async.config.load import load
from jaxrl_async.mesh import make_mesh
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import NOT_DRAWN, Episode, EpisodeGroup, Score, StopReason, Ticket

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48
}  # fmt: skip


def tiny_spec(vocab: int, **sizes: Any) -> ModelSpec:
    """Make the spec of a decoder of SIZES, but for these fields of schema.ArchitectureSection."""
    return ModelSpec.from_architecture(schema.ArchitectureSection(**{**SIZES, **sizes}), vocab)


def tiny_params(spec: ModelSpec, seed: int = 0) -> Any:
    """Make float32 weights, the same for the same seed."""
    return init_params(spec, jax.random.key(seed))


def mesh_of(**axes: int) -> Mesh:
    """Make a mesh of the first devices with these axes."""
    section = schema.AxesSection(**axes)
    return make_mesh(section, jax.devices()[: section.num_devices])


def episode_of(
    versions: Sequence[int], stop: StopReason = StopReason.EOS, *, logprob: float = -1.0
) -> Episode:
    """Make an episode of one token per version, NOT_DRAWN (-1) where the policy drew none."""
    numbers = np.array(versions, np.int32)
    drawn = numbers != NOT_DRAWN
    return Episode(
        token_ids=np.arange(1, len(numbers) + 1, dtype=np.int32),
        drawn=drawn,
        logprobs=np.where(drawn, logprob, 0.0).astype(np.float32),
        versions=numbers,
        stop=stop,
    )


def group_of(
    number: int,
    episodes: Sequence[Episode],
    rewards: Sequence[float] | None = None,
    *,
    parts: Sequence[Mapping[str, float]] | None = None,
    version: int = 0,
) -> EpisodeGroup:
    """Make a finished group with ticket and prompt `number`; default rewards are 0, 1, 2, ..."""
    rewards = list(range(len(episodes))) if rewards is None else rewards
    named = parts or [{}] * len(episodes)
    return EpisodeGroup(
        prompt=make_prompt(number),
        episodes=tuple(episodes),
        scores=tuple(Score(reward=float(r), parts=p) for r, p in zip(rewards, named, strict=True)),
        ticket=Ticket(group=number, version=version),
    )


def config_of(name: str, folder: Path, *overrides: str) -> schema.Config:
    """Load configs/NAME.yaml with these overrides, its runs in `folder`."""
    return load(ROOT / "configs" / f"{name}.yaml", [f"run.dir={folder}", *overrides])


def metrics_of(config: schema.Config) -> list[dict[str, Any]]:
    """Read the metrics of a run that has ended."""
    return read_lines(Path(config.run.dir) / config.run.name / "metrics.jsonl")

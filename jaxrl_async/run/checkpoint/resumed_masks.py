"""Sampling masks for a resumed run's answers that were sampled without masks."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jaxrl_async.config.sampler_section import SamplerSection
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import CheckpointError
from jaxrl_async.run.checkpoint.store import Saved
from jaxrl_async.types import Completion, Episode, KeptTokens, Prompt

T = TypeVar("T")

log = logging.getLogger(__name__)


def with_masks(state: T, saved: Saved, config: Config, folder: Path) -> T:
    """Return a checkpoint's rollouts with a sampling mask for each sampled token, if the run keeps
    masks.

    Tokens that were sampled from the whole vocabulary get a mask that excludes none. Raises
    CheckpointError if other tokens have no mask: it cannot be reconstructed.
    """
    if not config.keeps_masks or not (missing := _num_missing(state)):
        return state
    settings = yaml.safe_load(saved.loop.get("config", "")) or {}
    for task, number in missing.items():
        cuts = _cuts_of(settings, task)
        if SamplerSection.model_validate(cuts).truncates:
            of_task = f" of the task {task}" if task else ""
            listed = ", ".join(f"sampler.{key}={value:g}" for key, value in cuts.items())
            raise CheckpointError(
                f"{folder / str(saved.step)}: {number} answers{of_task} that are not trained on "
                f"yet were sampled with {listed} and without sampling masks, which "
                "algorithm.keep_sampling_mask (null: true with these) asks for now. Resume with "
                "algorithm.keep_sampling_mask=false, as "
                "the run was, or choose another run.name; model.path=.../policy starts from a "
                "finished run's weights."
            )
    if not config.named_tasks:  # of several, some may always sample so
        log.warning(
            "%d answers that are not trained on yet were sampled from the whole vocabulary: their "
            "sampling masks exclude no token",
            missing.total(),
        )
    filled: T = _fill(state)
    return filled


def _cuts_of(settings: Mapping[str, Any], task: str) -> dict[str, float]:
    """Return the settings of saved ones that truncated the sampling of a task; "": the only one."""
    own = ((settings.get("tasks") or {}).get(task) or {}).get("sampling") or {}
    both = settings.get("sampler", {}) | {k: v for k, v in own.items() if v is not None}
    return {key: both[key] for key in ("top_k", "top_p", "min_p") if key in both}


def _lacks(value: object) -> bool:
    return isinstance(value, Episode | Completion) and value.kept is None and _num_tokens(value) > 0


def _num_tokens(value: Episode | Completion) -> int:
    return value.num_drawn if isinstance(value, Episode) else len(value.token_ids)


def _num_missing(value: object, task: str = "") -> Counter[str]:
    """Count the episodes and turns without masks in these records, by the task of their group."""
    prompt = getattr(value, "prompt", None)
    task = prompt.task if isinstance(prompt, Prompt) else task
    missing = Counter({task: 1}) if _lacks(value) else Counter[str]()
    for part in _parts(value).values():
        missing += _num_missing(part, task)
    return missing


def _fill(value: Any) -> Any:
    """Return the records with masks that exclude no token where they had none."""
    if _lacks(value):
        return replace(value, kept=KeptTokens.whole(_num_tokens(value)))
    if isinstance(value, tuple):
        return tuple(_fill(part) for part in value)
    changed = {
        name: new for name, part in _parts(value).items() if (new := _fill(part)) is not part
    }
    return replace(value, **changed) if changed else value


def _parts(value: object) -> dict[Any, Any]:
    """Return the records within a record or tuple."""
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {}

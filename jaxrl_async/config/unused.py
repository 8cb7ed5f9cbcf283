"""Settings that nothing would read: refused, or only reported where their feature is turned off.

A setting that has no effect is most likely a mistake. But where the switch of a feature is written
down as off, the feature's other settings may stay: an override can turn off what a file describes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.rule import as_text
from jaxrl_async.config.schema import (
    AlgorithmSection,
    Config,
    CriticSection,
    ReferenceSection,
    TeacherSection,
    name_of,
)
from jaxrl_async.config.section import Section
from jaxrl_async.config.userfile import is_own

SECTIONS_OF_OTHER_JOBS: dict[str, tuple[str, ...]] = {
    "rl": ("sft", "preference"),
    "sft": ("preference", "reference", "critic", "teacher"),
    "preference": ("sft", "reference", "critic", "teacher"),
    "reward_model": ("sft", "reference", "critic", "teacher"),
}
"""Sections that nothing reads, by run.job. The sections about how rollouts are made (sampler,
staleness, buffer, reward) may stand in a configuration that several jobs share."""
SHARED_BY_JOBS = (
    "learning_rate",
    "group_size",
    "groups_per_step",
    "keep_sampling_mask",
    "keep_routing",
)
"""Settings of algorithm that may stand there for any job, too."""
OF_OUR_ENGINE = (
    "reserve",
    "block",
    "prefill_chunk",
    "page_tokens",
    "kv_memory_mib",
    "prefix_cache",
    "matmul",
    "attention",
)
"""Settings of sampler that a server of somebody else has flags of its own for."""


@dataclass(frozen=True, slots=True)
class Use:
    """Some settings, and when something reads them."""

    keys: tuple[str, ...]  # dotted
    is_read: Callable[[Config], bool]
    needs: str  # what would make something read them, in words
    switches: tuple[str, ...] = ()  # dotted settings that turn the feature on and off


@dataclass(frozen=True, slots=True)
class Unused:
    """The settings of one configuration that differ from their defaults and that nothing reads."""

    refused: list[str]  # one sentence each
    turned_off: dict[str, list[str]]  # by the switch that is written down as off: "key (value)"


def unused_settings(config: Config) -> Unused:
    """Find the settings that nothing would read."""
    unused = Unused([], {})
    for use in _uses(config):
        if use.is_read(config):
            continue
        for key in use.keys:
            section, name = _owner(config, key)
            if not section.is_set(name):
                continue
            shown = f"{key} ({as_text(getattr(section, name))})"
            if off := [switch for switch in use.switches if _is_given(config, switch)]:
                unused.turned_off.setdefault(off[0], []).append(shown)
            else:
                unused.refused.append(
                    f"{shown} is read by nothing without {use.needs}. Set that, or leave {key} out."
                )
    return unused


def warnings_of_unused(config: Config) -> Iterator[str]:
    """Yield a sentence for each feature that is turned off and whose settings are not."""
    for switch, settings in unused_settings(config).turned_off.items():
        value = as_text(_value(config, switch))
        yield f"read by nothing, as {switch} is {value}: {', '.join(settings)}"


def _owner(config: Config, key: str) -> tuple[Section, str]:
    """Return the section that holds a dotted key, and the last part of the key."""
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
    return section, name


def _is_given(config: Config, key: str) -> bool:
    """Return whether a setting was written down, even as its default."""
    section, name = _owner(config, key)
    return name in section.model_fields_set


def _value(config: Config, key: str) -> Any:
    section, name = _owner(config, key)
    return getattr(section, name)


def _keys(section: str, kind: type[Section], *without: str) -> tuple[str, ...]:
    """Return the dotted keys of all fields of a section but for some."""
    return tuple(f"{section}.{name}" for name in kind.model_fields if name not in without)


# --- who reads what ------------------------------------------------------------------------------


def _uses(config: Config) -> Iterator[Use]:
    """Yield what has a reader under conditions, for run.job."""
    job = config.run.job
    yield from _of_other_jobs(config)
    if job in ("preference", "reward_model"):
        yield from OF_PREFERENCES
    yield from OF_EVERY_JOB
    if job == "rl":
        yield from OF_RL
        if _distils(config):
            yield from OF_DISTILLATION
        yield from OF_LOSS_AND_REWARD


def _of_other_jobs(config: Config) -> Iterator[Use]:
    job = config.run.job
    for other in SECTIONS_OF_OTHER_JOBS[job]:
        keys = _keys(other, type(getattr(config, other)))
        yield Use(keys, lambda c: False, f"another run.job than {job}")
    yield Use(
        _keys("algorithm", AlgorithmSection, *SHARED_BY_JOBS),
        lambda c: c.run.job == "rl",
        "run.job=rl",
    )


def _reads_jsonl(config: Config) -> bool:
    return config.data.source == "jsonl"


def _mixes(config: Config) -> bool:
    return bool(config.algorithm.supervised_coefficient)


def _refers(config: Config) -> bool:
    return bool(config.algorithm.kl_coefficient)


def _has_critic(config: Config) -> bool:
    """Return whether the advantage may need a critic; a user's own says so in its file."""
    name = name_of(config.algorithm.advantage)
    return name in facts.NEEDS_VALUES or is_own(name)


def _distils(config: Config) -> bool:
    return config.teacher.source != "none"


def _distils_by_loss(config: Config) -> bool:
    return config.teacher.form == "loss"


OF_PREFERENCES = (
    Use(
        ("preference.loss", "preference.reference"),
        lambda c: c.run.job == "preference",
        "run.job=preference",
    ),
    Use(
        ("preference.margin",),
        lambda c: c.run.job == "reward_model",
        "run.job=reward_model",
    ),
    Use(
        ("preference.reference",),
        lambda c: name_of(c.preference.loss) not in facts.WITHOUT_REFERENCE,
        "a preference.loss that compares with it",
    ),
)
OF_EVERY_JOB = (
    Use(("data.jsonl.path", "data.jsonl.eval_path"), _reads_jsonl, "data.source=jsonl"),
    Use(
        ("data.jsonl.prompt_field", "data.jsonl.template"),
        lambda c: _reads_jsonl(c) or c.warm_start.path is not None,
        "data.source=jsonl or warm_start.path",
    ),
    Use(
        ("warm_start.path",),
        lambda c: bool(c.warm_start.steps) or _mixes(c),
        "warm_start.steps above 0",
        ("warm_start.steps",),
    ),
    Use(
        ("weights.probe_tolerance",),
        lambda c: c.weights.probe,
        "weights.probe=true",
        ("weights.probe",),
    ),
)


def _samples(config: Config) -> bool:
    return config.sampler.engine == "ours"


OF_RL = (
    Use(
        (
            *(f"sampler.{name}" for name in OF_OUR_ENGINE),
            "mesh.sampler",
            "mesh.samplers",
            "weights.checksum",
            *_keys("remote", RemoteSection, "transfer", "folder"),
        ),
        _samples,
        "sampler.engine=ours",
    ),
    Use(
        _keys("remote", RemoteSection),
        lambda c: c.mesh.remote,
        "mesh.samplers_in=processes or elsewhere",
        ("mesh.samplers_in",),
    ),
    Use(
        ("data.curriculum_pool", "data.curriculum_threshold"),
        lambda c: c.data.curriculum != "none",
        "data.curriculum",
        ("data.curriculum",),
    ),
    Use(
        ("staleness.overcommit",),
        lambda c: c.staleness.when_too_old == "drop",
        "staleness.when_too_old=drop",
        ("staleness.when_too_old",),
    ),
    Use(
        ("staleness.ess_target",),
        lambda c: c.staleness.adapt == "ess",
        "staleness.adapt=ess",
        ("staleness.adapt",),
    ),
    Use(
        ("algorithm.max_resampled", "algorithm.signal_part", "algorithm.signal_std"),
        lambda c: c.algorithm.dynamic_sampling,
        "algorithm.dynamic_sampling=true",
        ("algorithm.dynamic_sampling",),
    ),
    Use(
        (
            "algorithm.kl",
            "algorithm.kl_in",
            "algorithm.kl_target",
            *_keys("reference", ReferenceSection),
        ),
        _refers,
        "algorithm.kl_coefficient above 0",
        ("algorithm.kl_coefficient",),
    ),
    Use(
        ("algorithm.kl_horizon",),
        lambda c: c.algorithm.kl_target is not None,
        "algorithm.kl_target",
        ("algorithm.kl_target",),
    ),
    Use(
        ("algorithm.entropy_clip",),
        lambda c: bool(c.algorithm.entropy_coefficient or c.algorithm.entropy_target),
        "algorithm.entropy_coefficient or entropy_target",
        ("algorithm.entropy_coefficient", "algorithm.entropy_target"),
    ),
    Use(
        ("algorithm.entropy_step",),
        lambda c: c.algorithm.entropy_target is not None,
        "algorithm.entropy_target",
        ("algorithm.entropy_target",),
    ),
    Use(
        ("algorithm.supervised_batch",),
        _mixes,
        "algorithm.supervised_coefficient above 0",
        ("algorithm.supervised_coefficient",),
    ),
    Use(
        _keys("critic", CriticSection, "path"),
        _has_critic,
        "algorithm.advantage=gae, which has a critic",
        ("algorithm.advantage",),
    ),
    # A folder that the start would look for: no switch excuses it.
    Use(("critic.path",), _has_critic, "algorithm.advantage=gae, which has a critic"),
    Use(
        _keys("teacher", TeacherSection, "source", "path"),
        _distils,
        "teacher.source",
        ("teacher.source",),
    ),
)
OF_DISTILLATION = (
    Use(
        ("teacher.refresh_every",),
        lambda c: c.teacher.source == "self",
        "teacher.source=self",
        ("teacher.source",),
    ),
    Use(
        ("teacher.kind", "teacher.top_k"),
        _distils_by_loss,
        "teacher.form=loss",
        ("teacher.form",),
    ),
    Use(("teacher.beta",), _distils_by_loss, "teacher.form=loss and kind=js", ("teacher.form",)),
    Use(
        ("teacher.beta",),
        lambda c: c.teacher.kind == "js" or not _distils_by_loss(c),
        "teacher.form=loss and kind=js",
        ("teacher.kind",),
    ),
    Use(
        tuple(
            f"algorithm.{name}" for name in ("advantage", "loss", "shaping", "correction", "anchor")
        ),
        lambda c: bool(c.teacher.rewards) or not _distils_by_loss(c),
        "teacher.rewards above 0",
        ("teacher.rewards",),
    ),
)
OF_LOSS_AND_REWARD = (
    Use(
        ("algorithm.anchor",),
        lambda c: (
            name_of(c.algorithm.loss) not in facts.WITHOUT_RATIO
            or c.algorithm.correction not in (None, "none")
        ),
        "another algorithm.loss or a correction",
    ),
    Use(
        ("reward.model_weight",),
        lambda c: c.reward.model is not None,
        "reward.model",
        ("reward.model",),
    ),
)

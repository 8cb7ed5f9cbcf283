"""Settings without an effect because of other sections: refused, or only reported if their feature
is turned off. What is read only with another setting of its own section is marked there (ReadWith).

A setting that has no effect is most likely a mistake. But if the switch of a feature is explicitly
off, the feature's other settings may stay: an override can turn off what a file configures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.schema import (
    AdditionSection,
    AlgorithmSection,
    Config,
    CriticSection,
    JsonlSection,
    ReferenceSection,
    name_of,
)
from jaxrl_async.config.section import Section, Unread, as_text
from jaxrl_async.config.task_section import EnvSection
from jaxrl_async.config.userfile import is_own

OF_RECORDS = ("sft", "preference", "reward_model")
"""Jobs that train on records, each with a section of its name."""
OF_ROLLOUTS = ("pairs", "reference", "critic", "teacher", "env", "priorities")
"""Sections of run.job=rl alone."""
SECTIONS_OF_OTHER_JOBS: dict[str, tuple[str, ...]] = {
    "rl": OF_RECORDS,
    **{job: (*(other for other in OF_RECORDS if other != job), *OF_ROLLOUTS) for job in OF_RECORDS},
}
"""Sections without an effect, by run.job. The sections about rollouts (sampler, staleness, buffer,
reward) are allowed: several jobs may share a configuration."""
SHARED_BY_JOBS = (
    "learning_rate",
    "group_size",
    "groups_per_step",
    "keep_sampling_mask",
    "keep_routing",
)
"""Settings of algorithm that are allowed for any job, too."""
NOTHING = Section()
"""Takes the place of a section that is null: none of its settings is set."""


@dataclass(frozen=True, slots=True)
class Use:
    """Some settings, and the conditions under which they have an effect."""

    keys: tuple[str, ...]  # dotted
    is_read: Callable[[Config], bool]
    needs: str  # what gives them an effect, in words
    switches: tuple[str, ...] = ()  # dotted settings that turn the feature on and off
    checked: tuple[str, ...] = ()  # those among `keys` that no switch excuses


@dataclass(frozen=True, slots=True)
class Unused:
    """The settings of one configuration that differ from their defaults without an effect."""

    refused: list[str]  # one sentence each
    turned_off: dict[str, list[str]]  # by the switch that is explicitly off: "key (value)"


def unused_settings(config: Config) -> Unused:
    """Find the settings without an effect."""
    found: dict[str, tuple[str, str | None]] = {}
    for key, needs, switches in (*_unread_with_others(config), *_unread_in_sections(config)):
        off = next((switch for switch in switches if _is_given(config, switch)), None)
        if key not in found or (off is None and found[key][1] is not None):
            found[key] = needs, off
    unused = Unused([], {})
    for key, (needs, off) in found.items():
        shown = f"{key} ({as_text(_value(config, key))})"
        if off is not None:
            unused.turned_off.setdefault(off, []).append(shown)
        else:
            unused.refused.append(
                f"{shown} has no effect without {needs}. Set that, or leave {key} out."
            )
    return unused


def _unread_with_others(config: Config) -> Iterator[Unread]:
    """Yield the settings without an effect because of other sections, by dotted names."""
    for use in _uses(config):
        if not use.is_read(config):
            for key in (key for key in use.keys if _is_set(config, key)):
                yield Unread(key, use.needs, () if key in use.checked else use.switches)


def _unread_in_sections(config: Config) -> Iterator[Unread]:
    """Yield the settings without an effect because of their own section, by dotted names."""
    for path, section in config.inner():
        for name, needs, switches in section.unread(path):
            yield Unread(f"{path}.{name}", needs, tuple(f"{path}.{one}" for one in switches))


def without_unread_sections(config: Config) -> Config:
    """Return the configuration with null for optional sections that nothing reads."""
    unread = {name: None for name in OPTIONAL if _is_unread(config, name)}
    return config.model_copy(update=unread) if unread else config


def sections_of_defaults(config: Config) -> dict[str, str | None]:
    """Return the optional sections that have only defaults, as earlier versions wrote them in every
    run; for each what it needs, in words, if nothing reads it."""
    return {
        name: use.needs if _is_unread(config, name) else None
        for name, use in OPTIONAL.items()
        if getattr(config, name) is not None and not any(_is_set(config, key) for key in use.keys)
    }


def _is_unread(config: Config, name: str) -> bool:
    return getattr(config, name) is not None and not OPTIONAL[name].is_read(config)


def warnings_of_unused(config: Config) -> Iterator[str]:
    """Yield a sentence for each feature that is turned off but has settings."""
    for switch, settings in unused_settings(config).turned_off.items():
        value = as_text(_value(config, switch))
        yield f"without an effect, as {switch} is {value}: {', '.join(settings)}"


def unread_with_records(config: Config, task: str) -> list[str]:
    """Return a sentence for each data setting that a task with records makes ineffective."""
    keys = (
        *_keys("data.addition", AdditionSection),
        *_keys("data.jsonl", JsonlSection),
        "data.max_prompt_tokens",
    )
    for_pairs = (
        "prompt_field",
        "messages_field",
        "tools_field",
        "answer_field",
        "answer_mark",
        "template",
        "max_bad_share",
    )
    read = {f"data.jsonl.{name}" for name in for_pairs} | {"data.max_prompt_tokens"}
    without = keys if config.warm_start.path is None else [k for k in keys if k not in read]
    found = []
    for key in without:
        if _is_set(config, key):
            found.append(
                f"{key} ({as_text(_value(config, key))}) has no effect: the task {task} "
                f"has its own records. Leave {key} out."
            )
    return found


def unread_of_task(config: Config, name: str) -> Iterator[str]:
    """Yield a sentence for each setting of a task's records and reward without an effect because of
    its other sections."""
    task, alone = config.named_tasks[name], config.of_task(name)
    for use in _uses(alone):
        if not use.is_read(alone):
            for key in use.keys:
                if key.startswith(("data.", "reward.")) and _is_set(task, key):
                    yield (
                        f"tasks.{name}.{key} ({as_text(_value(task, key))}) has no effect without "
                        f"{use.needs}. Set that for the task, or leave it out."
                    )


def _owner(config: Section, key: str) -> tuple[Section, str]:
    """Return the section of a dotted key, NOTHING if it is null, and the key's last part."""
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
        if section is None:
            return NOTHING, name
    return section, name


def _is_set(config: Section, key: str) -> bool:
    """Return whether a setting differs from its default; no setting of a null section does."""
    section, name = _owner(config, key)
    return section is not NOTHING and section.is_set(name)


def _is_given(config: Config, key: str) -> bool:
    """Return whether a setting was written down, even with its default."""
    section, name = _owner(config, key)
    return name in section.model_fields_set


def _value(config: Section, key: str) -> Any:
    section, name = _owner(config, key)
    return getattr(section, name)


def _keys(section: str, kind: type[Section], *without: str) -> tuple[str, ...]:
    """Return the dotted keys of all fields of a section except some."""
    return tuple(f"{section}.{name}" for name in kind.model_fields if name not in without)


# --- the uses of settings ------------------------------------------------------------------------


def _uses(config: Config) -> Iterator[Use]:
    """Yield the settings that have an effect only under conditions, for run.job."""
    job = config.run.job
    yield from _of_other_jobs(config)
    yield Use(
        ("task",),
        lambda c: job in ("rl", "sft"),
        "run.job=rl or sft (preferences among a task's own answers: run.job=rl with pairs.loss)",
    )
    yield from OF_EVERY_JOB
    if job == "rl":
        yield from (*OPTIONAL.values(), *OF_RL)
        if _distils(config):
            yield from OF_DISTILLATION
        yield from OF_LOSS_AND_REWARD


def _of_other_jobs(config: Config) -> Iterator[Use]:
    job = config.run.job
    for other in SECTIONS_OF_OTHER_JOBS[job]:
        section = getattr(config, other)
        keys = () if section is None else _keys(other, type(section))
        of_job = other if other in OF_RECORDS else "rl"
        yield Use(keys, lambda c: False, f"run.job={of_job}")
    yield Use(
        (*_keys("algorithm", AlgorithmSection, *SHARED_BY_JOBS), "trainer.share_prefixes"),
        lambda c: c.run.job == "rl",
        "run.job=rl",
    )


def _pairs(config: Config) -> bool:
    return config.pairs is not None


def _compares_some(config: Config) -> bool:
    """Return whether shapings mask answers, and the advantage compares answers of a group."""
    a, name = config.algorithm, name_of(config.algorithm.advantage)
    shapings = [name_of(choice) for choice in a.shaping]
    masks = any(s in facts.MASKS_EPISODES or is_own(s) for s in shapings)
    compares = name in facts.COMPARED_IN_GROUP or name == "discounted" or is_own(name)
    return masks and compares and not _pairs(config) and _weighs_rewards(config)


def _averages(config: Config) -> bool:
    """Return whether a term of the loss is a mean over tokens; the loss of pairs is not."""
    a = config.algorithm
    beside = a.kl_coefficient or a.entropy_coefficient or a.entropy_target or _distils(config)
    return not _pairs(config) or bool(beside)


def _has_critic(config: Config) -> bool:
    """Return whether the advantage may need a critic; a user's own declares that in its file."""
    name = name_of(config.algorithm.advantage)
    return name in facts.NEEDS_VALUES or is_own(name)


def _distils(config: Config) -> bool:
    return config.teacher is not None


def _distils_by_loss(config: Config) -> bool:
    return config.teacher is not None and config.teacher.form == "loss"


def _weighs_rewards(config: Config) -> bool:
    return config.teacher is None or config.teacher.rewards > 0


OPTIONAL = {
    "remote": Use(
        _keys("remote", RemoteSection),
        lambda c: c.run.job != "rl" or c.mesh.remote,
        "mesh.samplers_in=processes or external",
        ("mesh.samplers_in",),
    ),
    "reference": Use(
        _keys("reference", ReferenceSection),
        lambda c: c.run.job == "rl" and c.refers,
        "algorithm.kl_coefficient above 0 or a pairs.loss or a loss component that compares with "
        "it",
        ("algorithm.kl_coefficient",),
    ),
    "critic": Use(
        _keys("critic", CriticSection),
        lambda c: c.run.job == "rl" and _has_critic(c),
        "algorithm.advantage=gae, which has a critic",
        ("algorithm.advantage",),
        checked=("critic.path",),
    ),
}
"""Sections that are null by default, and have their defaults where they are read nevertheless."""
OF_EVERY_JOB = (
    Use(
        ("data.system_prompt", "data.chat_format", "data.chat_arguments", "data.keep_thinking"),
        lambda c: (
            any(own.data.records_path is not None for own in c.by_task.values())
            or c.warm_start.path is not None
            or c.has_task
        ),
        "data.jsonl.path, warm_start.path or task",
    ),
    Use(
        ("warm_start.path",),
        lambda c: bool(c.warm_start.steps) or c.algorithm.mixes,
        "warm_start.steps above 0",
        ("warm_start.steps",),
    ),
)


OF_RL = (
    Use(
        _keys("env", EnvSection),
        lambda c: c.has_task or c.serving.external_agents,
        "task, or endpoint.external_agents",
        ("task",),
    ),
    Use(
        (
            *("sampler.block", "mesh.sampler", "mesh.samplers", "weights.checksum"),
            *_keys("remote", RemoteSection, "transfer", "folder"),
        ),
        lambda c: c.sampler.engine != "vllm",
        "sampler.engine=native or jetstream",
    ),
    Use(("priorities.later_turns",), lambda c: c.has_task, "task", ("task",)),
    Use(
        ("priorities.guests",),
        lambda c: c.endpoint is not None or c.has_task,
        "endpoint, or a task with a program",
        ("endpoint", "task"),
    ),
    Use(
        ("algorithm.baseline",),
        _compares_some,
        "a shaping that masks answers (mask_truncated, overlong_filter, your own) and an "
        "advantage that compares the answers of a group, such as rloo",
    ),
    Use(
        ("algorithm.max_resampled",),
        lambda c: c.algorithm.dynamic_sampling or _pairs(c),
        "algorithm.dynamic_sampling=true or pairs",
        ("algorithm.dynamic_sampling",),
    ),
    Use(
        tuple(
            f"algorithm.{name}" for name in ("advantage", "loss", "losses", "correction", "anchor")
        ),
        lambda c: not _pairs(c),
        "pairs=null, as pairs have their own loss",
    ),
    Use(
        ("algorithm.aggregate",),
        _averages,
        "pairs=null, or a KL, an entropy bonus or a teacher in the loss",
    ),
)
OF_DISTILLATION = (
    Use(
        tuple(
            f"algorithm.{name}" for name in ("advantage", "loss", "shaping", "correction", "anchor")
        ),
        lambda c: _weighs_rewards(c) or not _distils_by_loss(c),
        "teacher.rewards above 0",
        ("teacher.rewards",),
    ),
)
OF_LOSS_AND_REWARD = (
    Use(
        ("reward.processes",),
        lambda c: c.has_task or any(map(is_own, c.reward.weights)),
        "your own reward function",
        ("reward.function", "task"),
    ),
)

"""Settings without an effect because of other sections: refused, or only reported if their feature
is turned off. What is read only with another setting of its own section is marked there (ReadWith).

A setting that has no effect is most likely a mistake. But if the switch of a feature is explicitly
off, the feature's other settings may stay: an override can turn off what a file configures.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.schema import Config, name_of
from jaxrl_async.config.section import Section, Unread, as_text
from jaxrl_async.config.several import section_of
from jaxrl_async.config.userfile import is_own

RECORD_JOBS = ("sft", "preference", "reward_model")
"""Jobs that train on records, each with a section of its name."""
ROLLOUT_SECTIONS = (
    *("pairs", "reference", "critic", "teacher", "teachers"),
    *("env", "seats", "evals", "priorities"),
)
"""Sections of run.job=rl alone."""
SECTIONS_OF_OTHER_JOBS: dict[str, tuple[str, ...]] = {
    "rl": RECORD_JOBS,
    **{
        job: (*(other for other in RECORD_JOBS if other != job), *ROLLOUT_SECTIONS)
        for job in RECORD_JOBS
    },
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
SPLIT_SETTINGS = ("path", "eval_path", "eval_size")
"""Settings of data.jsonl that say where records are; the others say how they are read."""
NULL_SECTION = Section()
"""Stands for a section that is null: none of its settings is set."""


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
    by_key: dict[str, Unread] = {}
    in_sections = (setting for path, section in config.inner() for setting in section.unread(path))
    for setting in (*_unread_with_others(config), *in_sections):
        known = by_key.get(setting.key)
        if known is None or (setting.off is None and known.off is not None):
            by_key[setting.key] = setting
    unused = Unused([], {})
    for key, value, needs, off in by_key.values():
        text = key if isinstance(value, Section) else f"{key} ({_shown(value)})"
        if off is not None:
            unused.turned_off.setdefault(off, []).append(text)
        else:
            unused.refused.append(
                f"{text} has no effect without {needs}. Set that, or leave {key} out."
            )
    return unused


def _shown(value: object) -> str:
    """Return a value for a sentence; of sections by name the names."""
    named = isinstance(value, dict) and any(isinstance(one, Section) for one in value.values())
    return ", ".join(value) if isinstance(value, dict) and named else as_text(value)


def _unread_with_others(config: Config) -> Iterator[Unread]:
    """Yield the settings without an effect because of other sections, by dotted names."""
    for use in _uses(config):
        if not use.is_read(config):
            for key in (key for key in use.keys if _is_set(config, key)):
                switches = () if key in use.checked else use.switches
                yield Unread(key, _value(config, key), use.needs, _off(config, switches))


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
    for off, settings in unused_settings(config).turned_off.items():
        yield f"without an effect, as {off}: {', '.join(settings)}"


def unread_with_records(config: Config, task: str) -> list[str]:
    """Return a sentence for each data setting that a task with records makes ineffective."""
    keys = (*_keys("data.addition"), *_keys("data.jsonl"), "data.max_prompt_tokens")
    if config.warm_start.path is not None:  # which is read in the same way
        keys = (*_keys("data.addition"), *(f"data.jsonl.{name}" for name in SPLIT_SETTINGS))
    return [
        f"{key} ({as_text(_value(config, key))}) has no effect: the task {task} has its own "
        f"records. Leave {key} out."
        for key in keys
        if _is_set(config, key)
    ]


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
    """Return the section of a dotted key, NULL_SECTION if it is null, and the key's last part."""
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
        if section is None:
            return NULL_SECTION, name
    return section, name


def _is_set(config: Section, key: str) -> bool:
    """Return whether a setting differs from its default; no setting of a null section does, and an
    empty table is as none."""
    section, name = _owner(config, key)
    return section is not NULL_SECTION and section.is_set(name) and getattr(section, name) != {}


def _off(config: Config, switches: Iterable[str]) -> str | None:
    """Return the first of these dotted settings that was written down, with its value."""
    for switch in switches:
        section, name = _owner(config, switch)
        if off := section.given((name,), switch.removesuffix(f".{name}")):
            return off
    return None


def _value(config: Section, key: str) -> Any:
    section, name = _owner(config, key)
    return getattr(section, name)


def _keys(path: str, *without: str) -> tuple[str, ...]:
    """Return the dotted keys of all fields of a section except some; a table of sections by name is
    one setting."""
    kind: type[Section] | None = Config
    for name in path.split("."):
        kind = kind and section_of(kind.model_fields[name])
    if kind is None:
        return (path,)
    return tuple(f"{path}.{name}" for name in kind.model_fields if name not in without)


# --- the uses of settings ------------------------------------------------------------------------


def _uses(config: Config) -> Iterator[Use]:
    """Yield the settings that have an effect only under conditions, for run.job."""
    job = config.run.job
    for other in SECTIONS_OF_OTHER_JOBS[job]:
        of_job = other if other in RECORD_JOBS else "rl"
        yield Use(_keys(other), lambda c: False, f"run.job={of_job}")
    yield from USES_OF_ALL_JOBS
    if job == "rl":
        yield from (*OPTIONAL.values(), *USES_OF_RL)


def _compares_some(config: Config) -> bool:
    """Return whether shapings mask answers, and the advantage compares answers of a group."""
    a, name = config.algorithm, name_of(config.algorithm.advantage)
    shapings = [name_of(choice) for choice in a.shaping]
    masks = any(s in facts.MASKS_EPISODES or is_own(s) for s in shapings)
    compares = name in facts.COMPARED_IN_GROUP or name == "discounted" or is_own(name)
    return masks and compares and config.pairs is None and config.weighs_rewards


def _has_critic(config: Config) -> bool:
    """Return whether the advantage may need a critic; a user's own declares that in its file."""
    name = name_of(config.algorithm.advantage)
    return name in facts.NEEDS_VALUES or is_own(name)


OPTIONAL = {
    "remote": Use(
        _keys("remote"),
        lambda c: c.run.job != "rl" or c.mesh.remote,
        "mesh.samplers_in=processes or external",
        ("mesh.samplers_in",),
    ),
    "reference": Use(
        _keys("reference"),
        lambda c: c.run.job == "rl" and c.refers,
        "algorithm.kl_coefficient above 0 or a pairs.loss or a loss component that compares with "
        "it",
        ("algorithm.kl_coefficient",),
    ),
    "critic": Use(
        _keys("critic"),
        lambda c: c.run.job == "rl" and _has_critic(c),
        "algorithm.advantage=gae, which has a critic",
        ("algorithm.advantage",),
        checked=("critic.path",),
    ),
}
"""Sections that are null by default, and have their defaults where they are read nevertheless."""
USES_OF_ALL_JOBS = (
    Use(
        (*_keys("algorithm", *SHARED_BY_JOBS), "trainer.share_prefixes"),
        lambda c: c.run.job == "rl",
        "run.job=rl",
    ),
    Use(
        ("task",),
        lambda c: c.run.job in ("rl", "sft"),
        "run.job=rl or sft (preferences among a task's own answers: run.job=rl with pairs.loss)",
    ),
    Use(
        ("checkpoint.hugging_face",),
        lambda c: c.run.job != "reward_model",
        "run.job=rl, sft or preference, which train a policy",
    ),
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


USES_OF_RL = (
    Use(
        _keys("env"),
        lambda c: c.has_task or c.serving.external_agents,
        "task, or endpoint.external_agents",
        ("task",),
    ),
    Use(
        (
            *("sampler.block", "mesh.sampler", "mesh.samplers", "weights.checksum"),
            *_keys("remote", "transfer", "folder"),
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
        lambda c: c.algorithm.dynamic_sampling or c.pairs is not None,
        "algorithm.dynamic_sampling=true or pairs",
        ("algorithm.dynamic_sampling",),
    ),
    Use(
        tuple(
            f"algorithm.{name}" for name in ("advantage", "loss", "losses", "correction", "anchor")
        ),
        lambda c: c.pairs is None,
        "pairs=null, as pairs have their own loss",
    ),
    Use(
        ("algorithm.aggregate",),
        lambda c: (
            c.pairs is None
            or c.algorithm.kl_coefficient > 0
            or c.algorithm.has_entropy_bonus
            or c.teacher is not None
        ),
        "pairs=null, or a KL, an entropy bonus or a teacher in the loss",
    ),
    Use(
        tuple(
            f"algorithm.{name}" for name in ("advantage", "loss", "shaping", "correction", "anchor")
        ),
        lambda c: c.weighs_rewards or not c.distils_by_loss,
        "teacher.rewards above 0",
        ("teacher.rewards",),
    ),
    Use(
        ("reward.processes",),
        lambda c: c.has_task or any(map(is_own, c.reward.weights)),
        "your own reward function",
        ("reward.function", "task"),
    ),
)

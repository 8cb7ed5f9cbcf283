"""Settings without an effect: refused, or only reported if their feature is turned off.

A setting that has no effect is most likely a mistake. But if the switch of a feature is explicitly
off, the feature's other settings may stay: an override can turn off what a file configures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.lora_section import FOUR_BITS
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.rule import as_text
from jaxrl_async.config.schema import (
    AdditionSection,
    AlgorithmSection,
    Config,
    CriticSection,
    JsonlSection,
    ReferenceSection,
    name_of,
)
from jaxrl_async.config.section import Section
from jaxrl_async.config.task_section import EnvSection
from jaxrl_async.config.userfile import is_own

SECTIONS_OF_OTHER_JOBS: dict[str, tuple[str, ...]] = {
    "rl": ("sft", "preference"),
    "sft": ("preference", "pairs", "reference", "critic", "teacher", "env", "priorities"),
    "preference": ("sft", "pairs", "reference", "critic", "teacher", "env", "priorities"),
    "reward_model": ("sft", "pairs", "reference", "critic", "teacher", "env", "priorities"),
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
OF_OUR_ENGINE = (
    "reserve",
    "prefill_chunk",
    "page_tokens",
    "kv_memory_mib",
    "prefix_cache",
    "matmul",
    "attention",
    "compile_ahead",
)
"""Settings of sampler for which an external server has its own flags."""
OF_OUTSIDERS = ("agent_key_variable", "agent_tries")
"""Settings of endpoint for external agents."""


NOTHING = Section()
"""Takes the place of a section that is null: none of its settings is set."""


@dataclass(frozen=True, slots=True)
class Use:
    """Some settings, and the conditions under which they have an effect."""

    keys: tuple[str, ...]  # dotted
    is_read: Callable[[Config], bool]
    needs: str  # what gives them an effect, in words
    switches: tuple[str, ...] = ()  # dotted settings that turn the feature on and off


@dataclass(frozen=True, slots=True)
class Unused:
    """The settings of one configuration that differ from their defaults without an effect."""

    refused: list[str]  # one sentence each
    turned_off: dict[str, list[str]]  # by the switch that is explicitly off: "key (value)"


def unused_settings(config: Config) -> Unused:
    """Find the settings without an effect."""
    unused = Unused([], {})
    for use in _uses(config):
        if use.is_read(config):
            continue
        for key in use.keys:
            if not _is_set(config, key):
                continue
            shown = f"{key} ({as_text(_value(config, key))})"
            if off := [switch for switch in use.switches if _is_given(config, switch)]:
                unused.turned_off.setdefault(off[0], []).append(shown)
            else:
                unused.refused.append(
                    f"{shown} has no effect without {use.needs}. Set that, or leave {key} out."
                )
    return unused


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


def _owner(config: Config, key: str) -> tuple[Section, str]:
    """Return the section of a dotted key, NOTHING if it is null, and the key's last part."""
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
        if section is None:
            return NOTHING, name
    return section, name


def _is_set(config: Config, key: str) -> bool:
    """Return whether a setting differs from its default; no setting of a null section does."""
    section, name = _owner(config, key)
    return section is not NOTHING and section.is_set(name)


def _is_given(config: Config, key: str) -> bool:
    """Return whether a setting was written down, even with its default."""
    section, name = _owner(config, key)
    return name in section.model_fields_set


def _value(config: Config, key: str) -> Any:
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
    yield Use(("trainer.share_prefixes",), lambda c: job == "rl", "run.job=rl")
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
        section = getattr(config, other)
        keys = () if section is None else _keys(other, type(section))
        yield Use(keys, lambda c: False, f"another run.job than {job}")
    yield Use(
        _keys("algorithm", AlgorithmSection, *SHARED_BY_JOBS),
        lambda c: c.run.job == "rl",
        "run.job=rl",
    )


def _reads_jsonl(config: Config) -> bool:
    return config.data.records_path is not None


def _mixes(config: Config) -> bool:
    return bool(config.algorithm.supervised_coefficient)


def _has_kl(config: Config) -> bool:
    return bool(config.algorithm.kl_coefficient)


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


def _splits(config: Config) -> str | None:
    return None if config.reward.process is None else config.reward.process.split


def _rates_steps(config: Config) -> str | None:
    return None if config.reward.process is None else config.reward.process.function


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
    Use(
        ("model.architecture.family",),
        lambda c: c.model.decoder is None,
        "model.decoder=null: your own layer has no family",
    ),
    Use(
        ("model.balance.each_layer",),
        lambda c: c.model.balance.loss > 0,
        "model.balance.loss above 0",
        ("model.balance.loss",),
    ),
    Use(
        ("model.lora.group_size",),
        lambda c: c.model.lora is not None and c.model.lora.base in FOUR_BITS,
        "model.lora.base in 4 bits",
    ),
    Use(
        ("data.system_prompt", "data.chat_format", "data.chat_arguments", "data.keep_thinking"),
        lambda c: _reads_jsonl(c) or c.warm_start.path is not None or c.task is not None,
        "data.jsonl.path, warm_start.path or task",
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
    return config.sampler.engine == "native"


OF_RL = (
    Use(
        _keys("env", EnvSection),
        lambda c: c.task is not None or c.serving.external_agents,
        "task, or endpoint.external_agents",
        ("task",),
    ),
    Use(
        (
            *(f"sampler.{name}" for name in OF_OUR_ENGINE),
            *_keys("remote", RemoteSection, "transfer", "folder"),
        ),
        _samples,
        "sampler.engine=native",
    ),
    Use(
        ("sampler.block", "mesh.sampler", "mesh.samplers", "weights.checksum"),
        lambda c: c.sampler.engine != "vllm",
        "sampler.engine=native or jetstream",
    ),
    Use(
        ("sampler.engine_class",),
        lambda c: c.sampler.engine == "jetstream",
        "sampler.engine=jetstream",
    ),
    Use(("priorities.later_turns",), lambda c: c.task is not None, "task", ("task",)),
    Use(
        ("priorities.guests",),
        lambda c: c.endpoint is not None or c.task is not None,
        "endpoint, or a task with a program",
        ("endpoint", "task"),
    ),
    Use(
        tuple(f"endpoint.{name}" for name in OF_OUTSIDERS),
        lambda c: c.serving.external_agents,
        "endpoint.external_agents",
        ("endpoint.external_agents",),
    ),
    Use(
        _keys("remote", RemoteSection),
        lambda c: c.mesh.remote,
        "mesh.samplers_in=processes or external",
        ("mesh.samplers_in",),
    ),
    Use(
        ("remote.data_port",),
        lambda c: c.remote.transfer in ("auto", "tcp", "device"),
        "remote.transfer=auto, tcp or device",
        ("remote.transfer",),
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
        ("algorithm.pivots.mark",),
        lambda c: c.algorithm.pivots is not None and c.algorithm.pivots.where == "mark",
        "algorithm.pivots.where=mark",
        ("algorithm.pivots.where",),
    ),
    Use(
        ("algorithm.signal_part", "algorithm.signal_std"),
        lambda c: c.algorithm.dynamic_sampling,
        "algorithm.dynamic_sampling=true",
        ("algorithm.dynamic_sampling",),
    ),
    Use(
        ("algorithm.baseline",),
        _compares_some,
        "a shaping that masks answers (mask_truncated, overlong_filter, your own) and an "
        "advantage that compares the answers of a group, such as rloo",
    ),
    Use(
        ("algorithm.least_compared",),
        lambda c: c.algorithm.baseline == "unmasked",
        "algorithm.baseline=unmasked",
        ("algorithm.baseline",),
    ),
    Use(
        ("algorithm.max_resampled",),
        lambda c: c.algorithm.dynamic_sampling or _pairs(c),
        "algorithm.dynamic_sampling=true or pairs",
        ("algorithm.dynamic_sampling",),
    ),
    Use(
        tuple(f"algorithm.{name}" for name in ("advantage", "loss", "correction", "anchor")),
        lambda c: not _pairs(c),
        "pairs=null, as pairs have their own loss",
    ),
    Use(
        ("algorithm.aggregate",),
        _averages,
        "pairs=null, or a KL, an entropy bonus or a teacher in the loss",
    ),
    Use(
        ("algorithm.kl", "algorithm.kl_in", "algorithm.kl_target"),
        _has_kl,
        "algorithm.kl_coefficient above 0",
        ("algorithm.kl_coefficient",),
    ),
    Use(
        _keys("reference", ReferenceSection),
        lambda c: c.refers,
        "algorithm.kl_coefficient above 0 or a pairs.loss that compares with it",
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
    # A folder that the start checks: no switch excuses it.
    Use(("critic.path",), _has_critic, "algorithm.advantage=gae, which has a critic"),
)
OF_DISTILLATION = (
    Use(
        ("teacher.column",),
        lambda c: c.teacher is not None and c.teacher.source == "teachers",
        "teacher.source=teachers",
        ("teacher.source",),
    ),
    Use(
        ("teacher.refresh_every",),
        lambda c: c.teacher is not None and c.teacher.source == "self",
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
        lambda c: not _distils_by_loss(c) or (c.teacher is not None and c.teacher.kind == "js"),
        "teacher.form=loss and kind=js",
        ("teacher.kind",),
    ),
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
    Use(
        ("reward.processes",),
        lambda c: c.task is not None or any(map(is_own, c.reward.weights)),
        "your own reward function",
        ("reward.function", "task"),
    ),
    Use(
        ("reward.process.separator",),
        lambda c: _splits(c) == "separator",
        "reward.process.split=separator",
        ("reward.process.split",),
    ),
    Use(
        ("reward.process.rubric",),
        lambda c: _rates_steps(c) == "judge",
        "reward.process.function=judge",
        ("reward.process.function",),
    ),
    Use(
        ("reward.process.timeout_s",),
        lambda c: _rates_steps(c) != "judge",
        "your own reward.process.function",
        ("reward.process.function",),
    ),
)

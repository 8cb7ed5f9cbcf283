"""Rules about a run that trains on several tasks (`tasks`). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import as_text
from jaxrl_async.config.task_section import SHARED_DATA
from jaxrl_async.config.unused import unread_of_task
from jaxrl_async.staleness import capacity, memory_bound

rule = RuleBook()

SINGLE_TASK_SETTINGS = (
    *("addition", "jsonl", "max_prompt_tokens"),
    *("curriculum", "curriculum_pool", "curriculum_threshold"),
)
"""Settings of `data` that each task has for itself."""


@rule("tasks")
def tasks_replace_the_single_task(config: Config) -> Iterator[str]:
    """Refuse settings of the only task next to several, and other jobs."""
    if config.tasks is None:
        return
    if not config.tasks:
        yield (
            "tasks={} names no task. Give each task a section, such as tasks.math.data.jsonl.path, "
            "or leave tasks out: the run then has the one of task or data."
        )
        return
    if config.run.job != "rl":
        yield (
            f"tasks: run.job={config.run.job} trains on one source of records. Set run.job=rl, or "
            "give task or data instead."
        )
    if config.task is not None:
        yield (
            "task and tasks are both given. Move the task to tasks.NAME.task, or leave tasks out."
        )
    written = [key for key in SINGLE_TASK_SETTINGS if config.data.is_set(key)]
    if "addition" in written and config.data.addition is None:
        written.remove("addition")
    for name in written:
        yield (
            f"data.{name} is of one task, and the run has several. Move it to "
            f"tasks.NAME.data.{name}, or leave tasks out."
        )
    if not any(own.weight for own in config.tasks.values()):
        yield "tasks: no task has a weight above 0. Give one to each task to train on."


@rule("tasks")
def shared_settings_of_tasks_are_set_once(config: Config) -> Iterator[str]:
    """Refuse a task's own tokenizer and chat format, and models that would be loaded for each."""
    for name, own in config.named_tasks.items():
        for setting in SHARED_DATA:
            if own.data is not None and own.data.is_set(setting):
                yield (
                    f"tasks.{name}.data.{setting} is shared by all tasks, which train one model. "
                    f"Set data.{setting}."
                )
    if len(config.named_tasks) < 2:
        return
    for setting in ("model", "judge", "process"):
        if getattr(config.reward, setting) is not None:
            yield (
                f"reward.{setting} would score all tasks. Move it to tasks.NAME.reward.{setting} "
                "of those that it is for."
            )


@rule("tasks")
def process_rewards_have_one_age(config: Config) -> Iterator[str]:
    """Require one maximum age of process rewards, since a step's groups are treated equally."""
    ages = {
        f"tasks.{name}.reward.process.max_age": own.reward.process.max_age
        for name, own in config.by_task.items()
        if name and own.reward.process is not None
    }
    if len(set(ages.values())) > 1:
        listed = ", ".join(f"{setting}={age}" for setting, age in ages.items())
        yield f"{listed}: give the process rewards of all tasks one max_age."


@rule("tasks")
def a_tasks_settings_fit_the_runs(config: Config) -> Iterator[str]:
    """Require settings of a task that the run's own give an effect."""
    for name, own in config.named_tasks.items():
        if own.kl_weight != 1 and not config.algorithm.kl_coefficient:
            yield (
                f"tasks.{name}.kl_weight ({own.kl_weight:g}) has no effect without "
                "algorithm.kl_coefficient. Set that, or leave it out."
            )
        if own.loss_weight != 1 and config.pairs is not None:
            yield (
                f"tasks.{name}.loss_weight ({own.loss_weight:g}) is a factor of the policy loss, "
                "and pairs have their own. Leave it out, or set pairs=null."
            )
        if own.sampling.model_fields_set and config.sampler.engine == "jetstream":
            yield (
                f"tasks.{name}.sampling: an engine of JetStream's interface samples all requests "
                "in the same way. Leave it out, or set sampler.engine=native."
            )


@rule("tasks")
def each_setting_of_a_task_is_read(config: Config) -> Iterator[str]:
    """Require each task to read its settings of records and reward; see unused.py."""
    for name in config.named_tasks:
        yield from unread_of_task(config, name)


@rule("tasks")
def shared_settings_of_tasks_are_read_by_one(config: Config) -> Iterator[str]:
    """Require a task, or an evaluation of another task, that reads the run's env and reward."""
    tasks = config.named_tasks
    others = any(one.task not in tasks for one in config.named_evals.values())
    if not tasks or others:
        return
    playing = [own for own in tasks.values() if own.task is not None]
    read = {
        "env": not playing or any(own.env is None for own in playing),
        "reward": any(own.reward is None for own in tasks.values()),
    }
    for name in [name for name, is_read in read.items() if not is_read]:
        section = getattr(config, name)
        for setting in filter(section.is_set, type(section).model_fields):
            yield (
                f"{name}.{setting} ({as_text(getattr(section, setting))}) has no effect: each task "
                f"has its own {name}. Move it to tasks.NAME.{name}.{setting}, or leave it out."
            )


@rule("tasks")
def some_task_has_the_samplers_settings(config: Config) -> Iterator[str]:
    """Require that a task reads the sampler's settings that tasks may set for themselves."""
    tasks = config.named_tasks.values()
    for name in ("temperature", "top_k", "top_p", "min_p"):
        each_has_it = all(getattr(one.sampling, name) is not None for one in tasks)
        if tasks and each_has_it and config.sampler.is_set(name):
            yield (
                f"sampler.{name} ({as_text(getattr(config.sampler, name))}) has no effect: each "
                f"task has its own (tasks.NAME.sampling.{name}). Leave it out, or leave that out "
                "of the tasks that it is for."
            )


@rule("tasks")
def a_task_is_left_out_of_a_warm_start(config: Config) -> Iterator[str]:
    """Require a warm start from the tasks' demonstrations where one is left out of it."""
    warm, mixes = config.warm_start, config.algorithm.mixes
    for name in [n for n, own in config.named_tasks.items() if not own.warm_start]:
        if warm.path is not None:
            yield (
                f"tasks.{name}.warm_start=false has no effect: the demonstrations are those of "
                f"warm_start.path ({warm.path}). Leave one of them out."
            )
        elif not (warm.steps or mixes or "steps" in warm.model_fields_set):
            yield (
                f"tasks.{name}.warm_start=false has no effect without warm_start.steps. Set that, "
                "or leave it out."
            )


@rule("tasks")
def a_step_is_filled_by_tasks_that_the_trainer_waits_for(config: Config) -> Iterator[str]:
    """Require a limit for tasks that the trainer does not wait for, and room next to them."""
    lagging = {n: own for n, own in config.named_tasks.items() if not own.trainer_waits}
    for name, own in lagging.items():
        if own.max_in_flight is None:
            yield (
                f"tasks.{name}.trainer_waits=false lets other groups overtake its own, which could "
                f"take all places. Set tasks.{name}.max_in_flight."
            )
    section, groups = config.staleness, config.algorithm.groups_per_step
    if section.when_too_old == "wait":
        slots = capacity(section.max_staleness, groups, section.lookahead, config.buffer.reuse)
        slots //= config.buffer.reuse
    else:
        slots = memory_bound(section.max_staleness, groups, section.overcommit)
    held = sum(own.max_in_flight or 0 for own in lagging.values())
    if held and slots - held < groups:
        yield (
            f"tasks with trainer_waits=false may hold {held} of {slots} groups (max_in_flight), "
            f"and the others could not fill a step of {groups}. Lower their max_in_flight, or "
            "raise staleness.max_staleness."
        )


@rule("tasks")
def several_tasks_have_no_opponents(config: Config) -> Iterator[str]:
    """Refuse features that belong to the only task of a run."""
    if not config.named_tasks:
        return
    if config.serving.external_agents:
        yield (
            "endpoint.external_agents: external agents play the only task of a run, and tasks "
            "gives several. Set it to false, or leave tasks out."
        )
    if config.players:
        yield (
            "seats: the other players are those of the only task of a run, and tasks gives "
            "several. Leave seats out: the policy then plays all seats."
        )


@rule("tasks")
def tasks_of_different_temperatures_compare_tokens(config: Config) -> Iterator[str]:
    """Refuse different temperatures where the loss compares whole distributions."""
    warm = set(config.task_temperatures)
    if warm and config.compares_whole_distributions:
        yield (
            "tasks: algorithm.kl=full and teacher.form=loss compare distributions at one "
            f"temperature, and the tasks sample at {', '.join(f'{t:g}' for t in sorted(warm))}. "
            "Give all one temperature, or set algorithm.kl=k3 and teacher.form=advantage."
        )


@rule("tasks")
def teachers_on_samplers_compute_at_one_temperature(config: Config) -> Iterator[str]:
    """Refuse different temperatures with a teacher on the sampler's chips, which has one."""
    warm = sorted(set(config.task_temperatures))
    for name, teacher in config.named_teachers.items():
        if teacher.chips == "sampler" and warm:
            yield (
                f"teachers.{name}.chips=sampler computes at one temperature, and the tasks sample "
                f"at {', '.join(f'{t:g}' for t in warm)}: the two distributions would differ even "
                f"between equal models. Give all one temperature, or set teachers.{name}.chips="
                "trainer."
            )


@rule("tasks")
def loss_components_are_of_tasks_of_the_run(config: Config) -> Iterator[str]:
    """Require that the tasks of a loss component exist."""
    known = ", ".join(config.named_tasks)
    for name, one in config.algorithm.components.items():
        for task in (task for task in one.tasks or () if task not in config.named_tasks):
            yield f"algorithm.losses.{name}.tasks names {task}, and " + (
                f"the run's tasks are {known}. Correct the name."
                if known
                else "the run has one task, without a name. Leave it out."
            )


@rule("tasks")
def each_evaluation_names_one_of_several_tasks(config: Config) -> Iterator[str]:
    """Require the task of each evaluation by name, and names of their own."""
    if not config.named_tasks:
        return
    for name, section in config.named_evals.items():
        if name in config.named_tasks:
            yield (
                f"evals.{name}: {name} is also a task, whose held-out prompts `eval` answers as "
                f"eval/{name}. Choose another name."
            )
        if section.task is None and len(config.named_tasks) > 1:
            known = ", ".join(config.named_tasks)
            yield (
                f"evals.{name}: the run has several tasks. Set evals.{name}.task to one of "
                f"{known}, or to another task."
            )

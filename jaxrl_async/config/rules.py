"""Rules about combinations of settings of several sections: one function per rule, by name.

`load` reports all broken rules together, with the checks that a section itself makes. Rules about
training are in learning_rules.py, rules about other engines in engine_rules.py. Needs no JAX.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_async.config import engine_rules, learning_rules, seats_rules, several_rules, tasks_rules
from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.lora_section import FOUR_BITS
from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config, arguments_of, name_of
from jaxrl_async.config.section import as_text
from jaxrl_async.config.unused import unused_settings
from jaxrl_async.errors import ConfigError
from jaxrl_async.staleness import never_fills_a_step

GRADERS = {"exact", "gsm8k", "math"}
"""Built-in rewards that compare with the record's answer."""
MARGIN_S = 10.0
"""Minimum difference between two time limits if one is to act before the other, seconds."""

rule = RuleBook()


# --- replays, devices, teacher and sources --------------------------------------------------------


@rule(job="rl")
def a_replay_can_be_followed(config: Config) -> Iterator[str]:
    """Refuse a replay of what depends on time, is not recorded, or began elsewhere."""
    if config.run.replay_schedule is None:
        return
    engine, oversample = config.sampler.engine, config.algorithm.oversample
    timed = {
        f"tasks.{name}.max_in_flight": (
            task.max_in_flight is not None,
            "which group starts when depends on time and is not recorded",
        )
        for name, task in config.named_tasks.items()
    }
    obstacles = timed | {
        f"algorithm.oversample ({oversample})": (
            oversample > 0,
            "it keeps the members that end first, which depends on time and is not recorded",
        ),
        f"mesh.samplers_in={config.mesh.samplers_in}": (
            config.mesh.remote,
            "only samplers in threads follow the order of events. Set it to threads; at "
            "staleness.max_staleness=0 the numbers are the same, bit for bit",
        ),
        f"sampler.engine={engine}": (engine == "jetstream", "its events are not recorded"),
        "run.resume": (config.run.resume, "a recording starts where its run did"),
    }
    for setting, (applies, why) in obstacles.items():
        if applies:
            yield f"run.replay_schedule cannot follow {setting}: {why}. Leave one of them out."


@rule("mesh")
def colocated_slices_have_one_size(config: Config) -> Iterator[str]:
    """Require a colocated sampler to have as many devices as the trainer has in one process; the
    number of processes may only be known at the start."""
    mesh, processes = config.mesh, config.distributed
    count = processes.num_processes or (None if processes.detect else 1)
    trainer, sampler = mesh.trainer.num_devices, mesh.sampler.num_devices
    if mesh.colocated and (trainer % sampler if count is None else trainer != count * sampler):
        each = "" if count == 1 else " in each process"
        yield (
            f"mesh.colocated needs slices of the same size{each}; mesh.trainer has {trainer} "
            f"devices{'' if count == 1 else ' in all'} and mesh.sampler {sampler}. Make them "
            "equal (for several processes multiply mesh.trainer by their number), or set "
            "mesh.colocated=false."
        )


@rule("reward")
def something_gives_rewards(config: Config) -> Iterator[str]:
    """Require a reward function, a reward model or a judge."""
    reward = config.reward
    others = reward.model is not None or reward.judged or config.task is not None
    if not (reward.weights or others or config.named_tasks):
        yield (
            f"reward.function={as_text(reward.function)} leaves the run without a reward. Set "
            "reward.model to the folder of a reward model, reward.judge, or reward.function to "
            "exact, gsm8k, math or FILE.py:FUNCTION."
        )


@rule("data")
def prompts_have_one_source(config: Config) -> Iterator[str]:
    """Require the embedded task or a file of records, not both, unless a task has its own data."""
    data = config.data
    # data.jsonl without a path may say how warm_start.path is read
    reads_pairs = config.warm_start.path is not None and data.record_fields.eval_path is None
    if data.records_path and data.addition is not None:
        yield (
            f"data.jsonl.path ({data.records_path}) and data.addition are two sources of prompts. "
            "Set data.addition=null, or data.jsonl=null."
        )
    elif data.jsonl is not None and not data.jsonl.path and not reads_pairs:
        yield (
            "data.jsonl is given without path. Set data.jsonl.path to the file of records, or "
            "data.jsonl=null."
        )
    elif not (data.addition or data.records_path or config.task or config.named_tasks):
        yield (
            "data.addition and data.jsonl are null: there are no prompts. Set data.jsonl.path to a "
            "file of records, data.addition={} for the embedded task, or a task."
        )


# --- staleness and buffer ------------------------------------------------------------------------


@rule()
def a_step_can_be_filled(config: Config) -> Iterator[str]:
    """Require that the gate admits the groups of a whole step, if rollouts wait."""
    if config.staleness.when_too_old == "wait":
        problem = never_fills_a_step(
            config.staleness.max_staleness,
            config.algorithm.groups_per_step,
            config.staleness.lookahead,
            config.buffer.reuse,
        )
        if problem is not None:
            yield problem


@rule()
def an_adapting_staleness_has_room(config: Config) -> Iterator[str]:
    """Require more than one possible value of the staleness target."""
    section = config.staleness
    if section.adapt != "none" and config.lowest_limit >= section.max_staleness:
        yield (
            f"staleness.adapt={section.adapt} has nothing to choose from: the staleness target "
            f"can be {config.lowest_limit} at least (buffer.reuse, staleness.lookahead and "
            "staleness.when_too_old decide that) and staleness.max_staleness "
            f"({section.max_staleness}) at most. Raise staleness.max_staleness or set "
            "staleness.adapt=none."
        )


@rule()
def a_selection_has_a_choice(config: Config) -> Iterator[str]:
    """Require several groups to choose from for any selection but the strict one."""
    select = config.buffer.select
    if select != "strict" and config.buffer.reuse == 1 and not config.staleness.lookahead:
        yield (
            f"buffer.select={select} has nothing to choose from with staleness.lookahead=0 and "
            "buffer.reuse=1. Raise one of them, or set buffer.select=strict."
        )


# --- upper limits --------------------------------------------------------------------------------


class UpperLimit(NamedTuple):
    """A setting with an upper limit."""

    setting: str
    value: float | None  # None: it is not set, or not read
    of: str  # what gives the limit: a setting, or several in words
    limit: float
    why: str = ""  # the reason, or what would happen beyond it; "": that is clear
    below: bool = False  # whether the limit itself is too much


@rule()
def settings_are_within_their_limits(config: Config) -> Iterator[str]:
    """Require each setting to be at most what others leave room for."""
    of_rl = _limits_of_rl(config) if config.run.job == "rl" else ()
    for setting, value, of, limit, why, below in (*_limits(config), *of_rl):
        if value is None or value < limit or (value == limit and not below):
            continue
        yield (
            f"{setting} ({_number(value)}) must be {'below' if below else 'at most'} {of} "
            f"({_number(limit)}){': ' * bool(why)}{why}. Lower it, or raise "
            f"{of.split()[0].strip(',')}."
        )


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _has_critic(c: Config) -> bool:
    return c.run.job == "rl" and name_of(c.algorithm.advantage) in facts.NEEDS_VALUES


def _limits(c: Config) -> Iterator[UpperLimit]:
    """Yield the limits of every job."""
    longest, row, shape = c.sampler.max_length, c.trainer.row_length, c.model.architecture
    prompt = None if c.task is not None else c.data.max_prompt_tokens
    why, context = "the rest is room for an answer", ("sampler.max_length", longest)
    yield UpperLimit("data.max_prompt_tokens", prompt, *context, why, below=True)
    why = "long episodes could not be trained on"
    yield UpperLimit(*context, "trainer.row_length", c.row_length, why)
    yield UpperLimit(
        "sampler.max_length" if row is None else "trainer.row_length",
        c.row_length,
        "trainer.micro_batch_tokens",
        c.trainer.micro_batch_tokens,
        "a micro-batch holds at least one row",
    )
    if shape.experts:
        chosen = "model.architecture.experts_per_token", shape.experts_per_token
        yield UpperLimit(*chosen, "model.architecture.experts", shape.experts)
    a, waits = c.algorithm, c.critic_settings.warmup_steps if _has_critic(c) else 0
    often = a.epochs * a.minibatches if c.run.job == "rl" else 1
    updates = (c.run.steps - waits) * often
    yield UpperLimit(
        "trainer.warmup_steps",
        c.trainer.warmup_steps if updates > 0 else None,
        "run.steps"
        + " less critic.warmup_steps" * bool(waits)
        + ", times algorithm.epochs and minibatches" * (often > 1),
        updates,
        "the learning rate would never reach its peak",
    )
    judge, process = c.reward.judge, c.reward.process
    scores = "faults.scorer_timeout_s", c.faults.scorer_timeout_s
    if judge is not None:
        setting, why = "reward.judge.patience_s", "the first is of one call, that of all"
        yield UpperLimit("reward.judge.timeout_s", judge.timeout_s, setting, judge.patience_s, why)
        waits_s, why = judge.patience_s + MARGIN_S, "or on_failure would never act"
        yield UpperLimit(f"{setting} + {MARGIN_S:g} s", waits_s, *scores, why)
    why = "that ends the scoring of a group as a whole"
    if process is not None:
        yield UpperLimit("reward.process.max_age_s", process.max_age_s, *scores, why, below=True)
    for name, named in c.named_teachers.items():
        yield UpperLimit(f"teachers.{name}.max_wait_s", named.max_wait_s, *scores, why, below=True)


def _limits_of_rl(c: Config) -> Iterator[UpperLimit]:
    """Yield the limits of run.job=rl."""
    a, answer = c.algorithm, c.sampler.max_new_tokens
    group = "algorithm.group_size", a.group_size
    yield UpperLimit("algorithm.min_members", a.min_members, *group)
    compared = a.least_compared if a.baseline == "unmasked" else None
    yield UpperLimit("algorithm.least_compared", compared, *group, "all advantages would be 0")
    yield UpperLimit(
        "algorithm.minibatches",
        a.minibatches,
        "algorithm.groups_per_step * group_size",
        a.groups_per_step * a.group_size,
        "some minibatches would be empty",
    )
    if _has_critic(c):
        waits, why = c.critic_settings.warmup_steps, "no steps would be left to train the policy"
        yield UpperLimit("critic.warmup_steps", waits, "run.steps", c.run.steps, why, below=True)
    if "max_new_tokens" in c.sampler.model_fields_set:
        context = "sampler.max_length", c.sampler.max_length
        yield UpperLimit(
            "sampler.max_new_tokens", answer, *context, "it has the prompt, too", below=True
        )
    if c.mesh.samplers_in == "processes":
        least, why = c.remote_settings.min_samplers, "the run would never begin"
        yield UpperLimit("remote.min_samplers", least, "mesh.samplers", c.mesh.samplers, why)
    answers = "sampler.max_new_tokens", answer
    ages = "staleness.max_staleness", c.staleness.max_staleness
    for name, task in c.named_tasks.items():
        setting = f"tasks.{name}.sampling.max_new_tokens"
        yield UpperLimit(setting, task.sampling.max_new_tokens, *answers)
        yield UpperLimit(f"tasks.{name}.max_staleness", task.max_staleness, *ages)
    for name, section in c.named_evals.items():
        yield UpperLimit(f"evals.{name}.max_new_tokens", section.max_new_tokens, *answers)


# --- lengths -------------------------------------------------------------------------------------


@rule()
def context_devices_share_a_row_evenly(config: Config) -> Iterator[str]:
    """Require a row to divide into two equal parts per device of the context axis."""
    parts = config.mesh.trainer.row_parts
    if config.row_length % parts:
        yield (
            f"trainer.row_length ({config.row_length}; if null, from sampler.max_length) must be a "
            f"multiple of 2 * mesh.trainer.context ({parts}): each device takes two equal "
            "parts of a row. Change one of them."
        )


# --- data ----------------------------------------------------------------------------------------


@rule()
def records_have_the_needed_answers(config: Config) -> Iterator[str]:
    """Require answers in the records if a setting needs them."""
    jsonl = config.data.record_fields
    of_file = config.data.records_path is not None and config.task is None
    if not of_file or jsonl.answer_field is not None:
        return
    judges = sorted(GRADERS & config.reward.weights.keys())
    needs_answers = {
        "run.job=sft": config.run.job == "sft",
        "warm_start.steps": bool(config.warm_start.steps) and config.run.job == "rl",
        "algorithm.supervised_coefficient": bool(config.algorithm.supervised_coefficient),
        "algorithm.losses, tokens=demonstrations": config.algorithm.mixes,
        f"reward.function={', '.join(judges)}": config.run.job == "rl" and bool(judges),
        "data.jsonl.answer_mark": jsonl.answer_mark is not None,
    }
    if first := next((setting for setting, needs in needs_answers.items() if needs), None):
        yield (
            f"{first} needs the records' answers, and data.jsonl.answer_field=null means that they "
            "have none. Name the field, or leave the other setting out."
        )


@rule()
def sft_needs_no_warm_start(config: Config) -> Iterator[str]:
    """Require no warm start with run.job=sft, which is supervised training itself."""
    if config.run.job == "sft" and config.warm_start.steps:
        yield (
            f"run.job=sft is supervised training itself; warm_start.steps "
            f"({config.warm_start.steps}) would do the same before it. Set warm_start.steps=0."
        )


# --- judges and process rewards ------------------------------------------------------------------


@rule()
def a_ranking_judge_has_answers_to_compare(config: Config) -> Iterator[str]:
    """Require several answers to a prompt for a judge that compares them."""
    judge = config.reward.judge
    ranks = judge is not None and judge.judges_answers and judge.mode == "rank"
    if ranks and config.algorithm.group_size == 1:
        yield (
            "reward.judge.mode=rank compares the answers to a prompt, and algorithm.group_size=1 "
            "samples one. Raise it, or set mode=score."
        )


# --- weights and memory --------------------------------------------------------------------------


@rule()
def products_in_eight_bits_take_weights_in_eight_bits(config: Config) -> Iterator[str]:
    """Require weights that sampler.matmul=int8 can round: with float8 or 4-bit weights, products
    would stay unchanged."""
    lora = config.model.lora
    if config.sampler.matmul != "int8":
        return
    if config.weights.dtype == "float8_e4m3fn":
        yield (
            "sampler.matmul=int8 multiplies with int8 weights, and weights.dtype=float8_e4m3fn "
            "has none. Set weights.dtype=int8 or null, or sampler.matmul=bfloat16."
        )
    if lora is not None and lora.base in FOUR_BITS:
        yield (
            f"sampler.matmul=int8 multiplies with int8 weights, and model.lora.base={lora.base} "
            "has none. Set model.lora.base=int8 or full, or sampler.matmul=bfloat16."
        )


@rule()
def rounding_needs_bfloat16_weights(config: Config) -> Iterator[str]:
    """Require weights in bfloat16 if their rounding is chosen."""
    if config.model.param_dtype == "float32" and config.trainer.rounding != "masters":
        yield (
            f"trainer.rounding={config.trainer.rounding} decides how bfloat16 weights are rounded, "
            "and model.param_dtype is float32. Set model.param_dtype=bfloat16, or leave rounding "
            "out."
        )


# --- every setting has an effect -----------------------------------------------------------------


@rule()
def every_setting_is_read(config: Config) -> Iterator[str]:
    """Require every setting that differs from its default to have an effect; see unused.py."""
    yield from unused_settings(config).refused


@rule()
def gdpo_weighs_the_parts_itself(config: Config) -> Iterator[str]:
    """Require all other weights of rewards to be 1 with gdpo."""
    reward = config.reward
    weights = (
        reward.function_weight,
        reward.model_weight,
        1.0 if reward.judge is None else reward.judge.weight,
        1.0 if reward.process is None else reward.process.weight,
        *reward.weights.values(),
    )
    if name_of(config.algorithm.advantage) in facts.WEIGHS_PARTS and any(
        weight != 1 for weight in weights
    ):
        yield (
            "algorithm.advantage=gdpo weighs the parts of the reward itself. Set "
            "reward.function_weight, model_weight, judge.weight, process.weight and the functions' "
            "weights to 1, and gdpo's: "
            "{gdpo: {weights: {model: 0.5}}}."
        )


@rule()
def shaping_by_length_can_act(config: Config) -> Iterator[str]:
    """Require that answers can reach the length at which a length shaping acts."""
    longest = config.sampler.max_new_tokens
    for choice in config.algorithm.shaping:
        name, arguments = name_of(choice), arguments_of(choice)
        most, cache = arguments.get("max_tokens"), arguments.get("cache_tokens", 0)
        if not isinstance(most, int) or not isinstance(cache, int):
            continue
        if name in ("soft_overlong", "overlong_filter") and most - cache >= longest:
            yield (
                f"algorithm.shaping {name} acts on answers of more than {as_text(most - cache)} "
                f"tokens, and sampler.max_new_tokens allows {longest}: it would never act. Lower "
                "its max_tokens, or raise sampler.max_new_tokens."
            )


@rule()
def folders_that_are_written_are_on_this_machine(config: Config) -> Iterator[str]:
    """Refuse an address as the folder of results: a local folder of that name would be created."""
    folders = {"run.dir": config.run.dir, "remote.folder": config.remote_settings.folder}
    for setting, path in folders.items():
        if path is not None and "://" in path:
            yield (
                f"{setting} = {path!r} is an address, and a run writes to folders of this machine. "
                "Give a folder, and for run.dir set run.copy_to to the address: the run is copied "
                "there while it runs, and can be resumed from there."
            )


@rule()
def a_bucket_holds_all_that_a_resumed_run_needs(config: Config) -> Iterator[str]:
    """Refuse features that need more files of the run's folder than checkpoints on a bucket."""
    if config.checkpoint.dir is None:
        return
    unsaved = {
        "runs": bool(config.runs),
        "seats": bool(config.players),
        "warm_start.steps": config.warm_start.steps > 0,
        "model.lora without model.path": config.model.lora is not None
        and config.model.path is None,
    }
    for setting in (name for name, is_set in unsaved.items() if is_set):
        yield (
            f"checkpoint.dir does not work with {setting}: to resume on another machine the run "
            "would need more than its checkpoints. Leave checkpoint.dir out: run.copy_to copies "
            "the whole run to the bucket."
        )


@rule()
def a_copy_and_checkpoints_are_separate(config: Config) -> Iterator[str]:
    """Refuse a copy of the run that holds the checkpoints on the bucket, or lies among them."""
    addresses = (config.checkpoint.dir, config.run.copy_to)
    first, second = (f"{(a or '').rstrip('/')}/{config.run.name}/" for a in addresses)
    if None not in addresses and (first.startswith(second) or second.startswith(first)):
        yield (
            f"checkpoint.dir ({addresses[0]}) and run.copy_to ({addresses[1]}) lie in each other "
            f"for run.name={config.run.name}: a copy that is fetched would bring all checkpoints. "
            "Give them different addresses."
        )


# --- evaluations by name --------------------------------------------------------------------------


@rule("evals")
def each_evaluation_by_name_can_be_made(config: Config) -> Iterator[str]:
    """Require samples that differ."""
    for name, section in config.named_evals.items():
        if section.samples > 1 and (section.temperature == 0 or section.top_k == 1):
            yield (
                f"evals.{name}.samples ({section.samples}) with temperature "
                f"{section.temperature:g} and top_k {section.top_k} would all be the same answer. "
                "Set a temperature, such as 0.7, or samples=1."
            )


# --- several tasks -------------------------------------------------------------------------------

OF_THE_RUN = (
    "every_setting_is_read",
    "each_task_could_be_a_run_of_its_own",
    "loss_components_are_of_tasks_of_the_run",
)
"""Rules that a task's configuration need not keep: it has settings that only other tasks read."""


@rule("tasks")
def each_task_could_be_a_run_of_its_own(config: Config) -> Iterator[str]:
    """Require of each task what is required of a run that trains only on it."""
    if not config.named_tasks:
        return
    others = RuleBook({name: one for name, one in RULES.items() if name != OF_THE_RUN[1]})
    of_run = {violation.sentence for violation in others.violations(config)}
    for name, own in config.by_task.items():
        for broken in others.violations(own):
            if broken.name not in OF_THE_RUN and broken.sentence not in of_run:
                yield f"tasks.{name}: {broken.sentence}"


# --- all rules -----------------------------------------------------------------------------------

RULES = RuleBook(
    rule
    | learning_rules.rule
    | engine_rules.rule
    | seats_rules.rule
    | several_rules.rule
    | tasks_rules.rule
)


def check_rules(config: Config) -> None:
    """Raise ConfigError with all violations unless a configuration keeps all the rules."""
    if broken := RULES.violations(config):
        raise ConfigError("\n".join(violation.sentence for violation in broken))

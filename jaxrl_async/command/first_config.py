"""A first configuration for `jaxrl-async init`, from a few choices: settings, and commented YAML.

    choices ──> settings (of a recipe, for a built-in task) ──> YAML with a comment for each setting

Pure functions; needs no JAX.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config.draft import read_draft
from jaxrl_async.config.field_help import help_of_fields
from jaxrl_async.config.recipes import recipe_file
from jaxrl_async.config.schema import Config, name_of
from jaxrl_async.config.section import Section
from jaxrl_async.config.setting_fields import value_text
from jaxrl_async.config.several import section_of
from jaxrl_async.errors import ConfigError

EMBEDDED = "addition"
"""The task that is trained on without a choice; also the name of its recipe."""
SMALL_TASKS = ("calculator", "guess_number", "nim", "proposer_solver")
"""Built-in tasks that a small model with random weights learns; also the names of their recipes."""
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp")
"""Algorithms that can be chosen; also the names of their recipes."""
SIZES = ("learning_rate", "group_size", "groups_per_step")
"""Settings of `algorithm` that belong to the task and the model, not to the algorithm."""
CACHE_SHARE = 6
"""dapo: the longest answer over the tokens before it in which length costs, as in its recipe."""
ADAPTER_RATE, WHOLE_RATE = 1.0e-4, 1.0e-6
"""Learning rates for an adapter and for all weights of a model that was trained before."""
LORA_RANK = 16
STEPS, WARMUP_STEPS = 100, 5
QUESTIONS = ("question", "prompt", "problem", "instruction", "input", "query")
"""Columns that may hold a record's question, the likeliest first."""
ANSWERS = ("answer", "solution", "response", "output", "target", "label", "completion")
"""Columns that may hold a record's answer, the likeliest first."""
MARK = "#### "
"""Text before the final answer in GSM8K and records like it."""
WIDTH, BESIDES = 100, 116
"""Width of comments above a setting, and of a line with its comment, characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSizes:
    """What fits the devices."""

    slots: int
    max_length: int  # tokens of prompt and answer
    max_new_tokens: int
    groups_per_step: int


ON_CPU = FirstSizes(slots=16, max_length=512, max_new_tokens=256, groups_per_step=4)
ON_CHIP = FirstSizes(slots=64, max_length=1024, max_new_tokens=512, groups_per_step=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordColumns:
    """Which columns of a file of records hold what."""

    prompt: str | None  # None: chat messages
    messages: str | None  # None: no column has messages
    answer: str | None  # None: there are no answers
    mark: str | None = None  # text before the final answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChoices:
    """What a first configuration is for."""

    name: str  # of the run
    model: str | None = None  # path, name on the hub or GGUF file; None: small, random weights
    max_positions: int | None = None  # of the model, tokens; None: not known
    data: str | None = None  # file of records
    columns: RecordColumns | None = None  # of the file; None: as by default
    task: str | None = None  # a task by name; None, without data: the embedded one
    reward: str | None = None  # None: the task's own
    algorithm: str = "grpo"
    lora_rank: int | None = None  # 0: all weights are trained; None: LORA_RANK
    steps: int | None = None  # None: the recipe's, or STEPS
    platform: str = "cpu"
    devices: int = 1


def columns_of(
    record: Mapping[str, object], where: str, prompt: str | None, answer: str | None
) -> RecordColumns:
    """Return which columns hold question and answer, by their usual names. Raises ConfigError.

    Args:
        record: the first one of a file.
        where: the file, for messages.
        prompt: the name of the question's column, if it was given.
        answer: the same of the answer's.
    """
    for option, name in (("--prompt-field", prompt), ("--answer-field", answer)):
        if name is not None and name not in record:
            raise ConfigError(
                f"{option} {name}: the records of {where} have {', '.join(record)}. Give one."
            )
    question = prompt or next((name for name in QUESTIONS if name in record), None)
    messages = "messages" if prompt is None and "messages" in record else None
    if question is None and messages is None:
        raise ConfigError(
            f"{where}: none of the columns {', '.join(record)} is called as a question usually is. "
            "Name it: --prompt-field NAME."
        )
    column = answer or next((name for name in ANSWERS if name in record), None)
    holds_mark = column is not None and MARK in str(record[column])
    return RecordColumns(
        prompt=question, messages=messages, answer=column, mark=MARK if holds_mark else None
    )


# ---- settings


def first_settings(choices: FirstChoices) -> dict[str, Any]:
    """Return the settings of a first configuration, by section. Raises ConfigError."""
    if choices.algorithm not in ALGORITHMS:
        raise ConfigError(
            f"--algorithm {choices.algorithm}: give one of {', '.join(ALGORITHMS)}; `jaxrl-async "
            "recipes` shows others."
        )
    if choices.data is not None and choices.task is not None:
        raise ConfigError("--data and --task both say what is asked. Give one of them.")
    if choices.model is None:
        return _of_recipe(choices)
    return _of_model(choices)


def algorithm_settings(name: str, max_new_tokens: int) -> dict[str, Any]:
    """Return the settings of an algorithm, as in its recipe, for answers of this length."""
    tree = read_draft(recipe_file(name)).tree["algorithm"]
    settings = {key: value for key, value in tree.items() if key not in SIZES}
    if "constant" in (settings.get("aggregate") or ()):
        settings["aggregate"] = {"constant": {"divisor": max_new_tokens}}
    shaping = settings.get("shaping")
    if shaping is not None:
        overlong = {
            "max_tokens": max_new_tokens,
            "cache_tokens": max(max_new_tokens // CACHE_SHARE, 1),
        }
        settings["shaping"] = [
            {"soft_overlong": overlong} if name_of(choice) == "soft_overlong" else choice
            for choice in shaping
        ]
    return settings


def _of_recipe(choices: FirstChoices) -> dict[str, Any]:
    """Return the settings for a small model with random weights: the recipe of its task."""
    if choices.data is not None:
        raise ConfigError(
            f"--data {choices.data}: records of a file need a model that reads their text. Give "
            "--model: a directory, a name on the hub, or FILE.gguf."
        )
    if choices.lora_rank:
        raise ConfigError("--lora-rank: a model with random weights has no adapter. Leave it out.")
    task = choices.task or EMBEDDED
    if task not in (EMBEDDED, *SMALL_TASKS):
        raise ConfigError(
            f"--task {task}: a model with random weights learns only "
            f"{', '.join((EMBEDDED, *SMALL_TASKS))}. Give --model for other tasks."
        )
    tree = read_draft(recipe_file(task)).tree
    tree["run"] = {"name": choices.name, "steps": choices.steps or tree["run"]["steps"]}
    tree["trainer"]["warmup_steps"] = min(WARMUP_STEPS, tree["run"]["steps"] // 2)
    tree["mesh"] = mesh_settings(choices)
    sizes = {key: tree["algorithm"][key] for key in SIZES}
    longest = int(tree["sampler"]["max_new_tokens"])
    tree["algorithm"] = sizes | algorithm_settings(choices.algorithm, longest)
    if choices.reward is not None:
        tree["reward"] = {"function": choices.reward}
    order = ("run", "mesh", "model", "task", "data", "reward")
    return {key: tree[key] for key in order if key in tree} | tree


def _of_model(choices: FirstChoices) -> dict[str, Any]:
    """Return the settings for a model that was trained before."""
    sizes = ON_CPU if choices.platform == "cpu" else ON_CHIP
    length = min(sizes.max_length, choices.max_positions or sizes.max_length)
    answer = min(sizes.max_new_tokens, max(length // 2, 1))
    rank = LORA_RANK if choices.lora_rank is None else choices.lora_rank
    adapter = {"lora": {"rank": rank}} if rank else {}
    steps = choices.steps or STEPS
    tree: dict[str, Any] = {
        "run": {"name": choices.name, "steps": steps},
        "mesh": mesh_settings(choices),
        "model": {"path": choices.model, **adapter},
    }
    if choices.task is not None and choices.task != EMBEDDED:
        tree["task"] = choices.task
    elif choices.data is not None:
        tree["data"] = {"addition": None, "jsonl": _records(choices.data, choices.columns)}
    else:
        tree["data"] = {"addition": {"digits": 2, "eval_size": 64}}
    if choices.reward is not None:
        tree["reward"] = {"function": choices.reward}
    trainers = tree["mesh"].get("trainer", {}).get("fsdp", 1)
    rate = ADAPTER_RATE if rank else WHOLE_RATE
    tree |= {
        "sampler": {
            "slots": sizes.slots,
            "max_length": length,
            "max_new_tokens": answer,
            "temperature": 1.0,
        },
        "staleness": {"max_staleness": 1},
        "algorithm": {
            "learning_rate": rate,
            "group_size": 8,
            "groups_per_step": sizes.groups_per_step,
            **algorithm_settings(choices.algorithm, answer),
        },
        "trainer": {
            "warmup_steps": min(WARMUP_STEPS, steps // 2),
            "micro_batch_tokens": max(4096, 2 * length * trainers),
        },
        "eval": {"every": 10},
        "checkpoint": {"every": 50, "keep": 2},
    }
    return tree


def _records(path: str, columns: RecordColumns | None) -> dict[str, Any]:
    if columns is None:
        return {"path": path}
    fields = {
        "path": path,
        "prompt_field": columns.prompt,
        "messages_field": columns.messages,
        "answer_field": columns.answer,
        "answer_mark": columns.mark,
    }
    return {key: name for key, name in fields.items() if name is not None or key == "answer_field"}


def mesh_settings(choices: FirstChoices) -> dict[str, Any]:
    """Return how trainer and samplers divide the devices. A CPU has as many as are needed; a single
    chip is shared."""
    if choices.platform == "cpu":
        return {"trainer": {"fsdp": 1}, "sampler": {"tensor": 1}}
    if choices.devices < 2:
        return {"colocated": True}
    samplers = choices.devices // 2
    return {"trainer": {"fsdp": choices.devices - samplers}, "samplers": samplers}


# ---- YAML


def commented_yaml(tree: Mapping[str, object], head: str) -> str:
    """Return settings as YAML, each with the first sentence of its help.

    Args:
        tree: settings by section.
        head: lines of the comment at the beginning.
    """
    about = {field.path: field.about for field in help_of_fields()}
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for key, value in tree.items():
        lines += ["", *_setting_lines(key, value, Config, (), about)]
    return "\n".join(lines) + "\n"


def _setting_lines(
    key: str,
    value: object,
    section: type[Section],
    path: tuple[str, ...],
    about: Mapping[str, str],
) -> Iterator[str]:
    """Yield the lines of a setting, or of a section and its settings."""
    indent, name_path = "  " * len(path), (*path, key)
    comment = _first_sentence(about.get(".".join(name_path), ""))
    target = section.model_fields.get(key)
    inner = None if target is None else section_of(target)
    if inner is not None and isinstance(value, Mapping) and value:
        yield from _with_comment(f"{indent}{key}:", comment, indent)
        for name, item in value.items():
            yield from _setting_lines(name, item, inner, name_path, about)
    else:
        yield from _with_comment(f"{indent}{key}: {value_text(value)}", comment, indent)


def _with_comment(line: str, comment: str, indent: str) -> Iterator[str]:
    """Yield a line with its comment, behind it or, if that is too long, above it."""
    if not comment:
        yield line
    elif len(line) + len(comment) + 4 <= BESIDES:
        yield f"{line}  # {comment}"
    else:
        for part in textwrap.wrap(comment, WIDTH - len(indent) - 2):
            yield f"{indent}# {part}"
        yield line


def _first_sentence(text: str) -> str:
    """Return the first part of a setting's help, up to a period, semicolon or colon."""
    match = re.match(r".{12,}?(?=[.;:](?: |$)|$)", text)
    head = match[0] if match else text.rstrip(".")
    is_open = head.count("(") > head.count(")")
    return head[: head.rindex("(")].rstrip() if is_open else head


# ---- the reward


def reward_skeleton(config_name: str, *, with_answer: bool) -> str:
    """Return a file with a reward function to be changed.

    Args:
        config_name: the configuration's file, for the comment.
        with_answer: the records have answers.
    """
    if with_answer:
        return _SKELETON.replace("CONFIG", config_name)
    return _SKELETON_WITHOUT.replace("CONFIG", config_name)


_SKELETON = '''"""The reward of CONFIG: change it to say what a good answer is."""


def reward(completion: str, reference: str) -> dict[str, float]:
    """Return the reward of one answer, 0 to 1. The part `correct` is shown as the accuracy.

    completion: the policy's answer. reference: the right answer of the record. A parameter with the
    name of any other column of the records gets that column.
    """
    *_, last = completion.split() or [""]
    return {"correct": float(last.strip(".") == reference.strip())}


if __name__ == "__main__":
    print(reward("I think it is 42.", "42"), reward("It is 41", "42"))
'''
_SKELETON_WITHOUT = '''"""The reward of CONFIG: change it to say what a good answer is."""


def reward(prompt: str, completion: str) -> dict[str, float]:
    """Return the reward of one answer, 0 to 1.

    prompt: the question. completion: the policy's answer. A parameter with the name of any other
    column of the records gets that column.
    """
    words = completion.split()
    return {"short": float(0 < len(words) <= 30), "ends": float(completion.strip().endswith("."))}


if __name__ == "__main__":
    print(reward("Why is the sky blue?", "Air scatters blue light most."))
'''

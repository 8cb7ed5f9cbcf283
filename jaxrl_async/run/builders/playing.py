"""The task of a run: its records, environments, and the format of their messages."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxrl_async.config.schema import (
    AlgorithmSection,
    Config,
    DataSection,
    EndpointSection,
    EnvSection,
    FaultsSection,
    ModelSection,
    SamplerSection,
    name_of,
)
from jaxrl_async.config.task_section import section_of_task
from jaxrl_async.config.unused import unread_with_records
from jaxrl_async.data.addition import ALPHABET
from jaxrl_async.data.prompts import eval_prompts
from jaxrl_async.data.records import OwnRecords
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError, RolloutError, naming
from jaxrl_async.later import Later
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.rollout.env import MakeEnv, SingleTurn
from jaxrl_async.run import features
from jaxrl_async.run.optional_parts import SeatFillers, Serving
from jaxrl_async.tasks.task import NO_TASK, Task
from jaxrl_async.types import Prompt

if TYPE_CHECKING:
    from jaxrl_async.data import chat
    from jaxrl_async.data.chat import TeachableFormat
    from jaxrl_async.data.chat_formats import plain_format
    from jaxrl_async.rollout import chat_env
    from jaxrl_async.rollout.chat_env import ChatEnvs, ChatLimits
    from jaxrl_async.tasks import named_tasks, task_source, toolbox
    from jaxrl_async.tasks.task_source import TaskData
else:
    chat = Later("jaxrl_async.data.chat")
    plain_format = Later("jaxrl_async.data.chat_formats.plain_format")
    chat_env = Later("jaxrl_async.rollout.chat_env")
    task_source = Later("jaxrl_async.tasks.task_source")
    toolbox = Later("jaxrl_async.tasks.toolbox")
    named_tasks = Later("jaxrl_async.tasks.named_tasks")

log = logging.getLogger(__name__)

T = TypeVar("T")

TRIED = 8
"""Maximum number of held-out records that are tried if none has room for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A run's task with its environments."""

    task: Task
    make_env: MakeEnv
    stop_token_ids: tuple[int, ...]  # tokens that end a turn of the policy
    own: OwnRecords | None  # the task's records; None: the configuration's
    oldest_s: Callable[[], float] = lambda: 0.0  # age of the oldest running program, seconds


def find_task(config: Config, given: Task | None = None) -> Task:
    """Return the task of a run; NO_TASK if it has none. Raises ConfigError.

    given: the object of a Python program; None: the task that config.task names.
    """
    if config.task is None:
        return _for_outsiders(config.serving, config.algorithm, NO_TASK)
    task, name = given or named_tasks.load_task(config.task), name_of(config.task)
    whole = task.program is not None or task.game is not None
    both = task.program is not None and task.game is not None
    if both or (whole and (task.environment is not None or task.tools)):
        raise ConfigError(
            f"task = {name!r} has a program or a game, which plays whole episodes, and also "
            "another program, an environment or tools. Give it one of them."
        )
    if task.game is not None:
        features.check_game(config, name)
    if task.records is not None:
        if unread := unread_with_records(config, name):
            raise ConfigError("\n".join(unread))
        log.info("the records are the records of the task %s", name)
    if task.plays and (pivots := config.algorithm.pivots) is not None:
        raise ConfigError(
            f"algorithm.pivots.continuations ({pivots.continuations}) continue answers of one "
            f"turn, and the environment or program of task = {name!r} cannot be taken back to an "
            "earlier token. Set algorithm.pivots=null, or use a task with only rewards, over data."
        )
    if not task.plays and not task.rewards:
        raise ConfigError(
            f"task = {name!r} is empty. Give it records, an environment, tools or a reward."
        )
    return _for_outsiders(config.serving, config.algorithm, task)


def tasks_of(config: Config, given: Task | None = None) -> dict[str, Task]:
    """Return the run's tasks by name; "": the only one. given: see find_task. Raises
    ConfigError."""
    found: dict[str, Task] = {}
    for name, own in config.by_task.items():
        with naming(section_of_task(name)):
            found[name] = find_task(own, given)
    return found


def tokenizer_source(config: Config, tasks: Mapping[str, Task]) -> tuple[DataSection, Task]:
    """Return the data and the task by which the run's tokenizer is chosen: of several tasks those
    of one that needs the tokenizer of a directory, or else a task with the words of all."""
    configs = config.by_task
    if len(tasks) == 1:
        return next((configs[name].data, task) for name, task in tasks.items())
    for name, task in tasks.items():
        if not task.words and (task.records is not None or configs[name].data.problems is None):
            return configs[name].data, task
    data = next(iter(configs.values())).data
    words = [word for task in tasks.values() for word in task.words]
    if words and any(task.records is None for task in tasks.values()):
        words += ALPHABET
    return data, replace(NO_TASK, words=tuple(dict.fromkeys(words)))


def _for_outsiders(serving: EndpointSection, algorithm: AlgorithmSection, task: Task) -> Task:
    """Return the task as external agents play it, if endpoint.external_agents is set. Raises
    ConfigError."""
    if not serving.external_agents:
        return task
    if (pivots := algorithm.pivots) is not None:
        raise ConfigError(
            f"algorithm.pivots.continuations ({pivots.continuations}) continue answers of one "
            "turn, and with endpoint.external_agents agents play the episodes. Set pivots=null or "
            "external_agents=false."
        )
    players = (task.program, task.environment, task.game)
    if task.tools or any(one is not None for one in players):
        raise ConfigError(
            "endpoint.external_agents: the task has a program, an environment, a game or tools, "
            "and external agents would play instead of them. Remove one of the two."
        )
    return replace(task, program=features.placeholder_program())


def make_play(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    count: Callable[[str, int], None],
    serving: Serving,
    opponents: SeatFillers,
    outages: Outages | None = None,
) -> Play:
    """Make the environments of the task; one is tried on the first held-out record.

    Args:
        config: env, faults and data.
        task: NO_TASK for a run without a task: its prompts are answered once.
        tokenizer: the policy's.
        count: called with the name and number of faults.
        serving: the policy's endpoint for a program.
        opponents: the other players of a game.
        outages: tracker of outages of the environments; None: they make one.

    Raises ConfigError, also for an environment that cannot begin, and DataError.
    """
    if config.players and task.game is None:
        raise ConfigError(
            f"seats ({', '.join(config.players)}) are the players of a game, and task = "
            f"{name_of(config.task or '')!r} has none. Leave seats out, or give the task a game."
        )
    if not task.plays:
        return Play(task=task, make_env=SingleTurn, stop_token_ids=tokenizer.eos_ids, own=None)
    task, chat = _with_format(config.data, config.model, tokenizer, task)
    if task.program is not None:
        make_env, oldest_s = features.make_members(config, task, serving, count)
        return Play(
            task=task,
            make_env=make_env,
            oldest_s=oldest_s,
            stop_token_ids=chat.stop_token_ids,
            own=None
            if task.records is None
            else task_source.TaskData(task=task, chat=chat, tools=()),
        )
    limits = chat_limits(config.env, config.faults, config.sampler, tokenizer)
    envs = chat_env.ChatEnvs(task, chat, limits, lambda name: count(name, 1), outages)
    own = None if task.records is None else task_source.TaskData(task=task, chat=chat, tools=())
    examples = eval_prompts(config.limited_data, tokenizer, own)
    example = examples[0]
    if task.game is not None:
        games = features.make_games(envs, task.game, opponents, example, config)
        return Play(task=task, make_env=games, stop_token_ids=chat.stop_token_ids, own=own)
    tools = _tried(envs, examples[:TRIED], config.sampler.max_length)
    return Play(
        task=task,
        make_env=envs,
        stop_token_ids=chat.stop_token_ids,
        own=own and task_source.TaskData(task=task, chat=chat, tools=tools),
    )


def imitated(config: Config, task: Task, tokenizer: Tokenizer) -> "TaskData":
    """Return the records of a task whose demonstrations run.job=sft trains on.

    Each is written with the tools of the task's environment, which is begun once to list them.
    Raises ConfigError, DataError.
    """
    if task.records is None:
        raise ConfigError(
            f"task = {name_of(config.task or '')!r} has no records, and run.job=sft trains on the "
            "conversations of a task's records. Give it some, or leave task out to train on the "
            "records of data."
        )
    task, chat = _with_format(config.data, config.model, tokenizer, task)
    own = task_source.TaskData(task=task, chat=chat, tools=())
    if task.program is not None:
        return own
    limits = chat_limits(config.env, config.faults, config.sampler, tokenizer)
    envs = chat_env.ChatEnvs(task, chat, limits, lambda name: None)
    return replace(own, tools=_tried(envs, eval_prompts(config.limited_data, tokenizer, own)[:1]))


def _with_format(
    data: DataSection, model: ModelSection, tokenizer: Tokenizer, task: Task
) -> tuple[Task, "TeachableFormat"]:
    """Return the task with the configured system prompt, if there is one, and the format of its
    messages: the bare text for questions to a base model."""
    if data.system_prompt is not None:
        task = replace(task, system_prompt=data.system_prompt)
    parts = (task.environment, task.game, task.program, task.system_prompt)
    asks_alone = not task.tools and all(part is None for part in parts)
    if asks_alone and not chat.has_chat_format(tokenizer, data.chat_format):
        log.info("the tokenizer has no chat template: questions are sent as bare text")
        return task, plain_format.PlainFormat(tokenizer)
    return task, _chat_format(data, model, tokenizer)


def run_chat_format(
    data: DataSection, model: ModelSection, tokenizer: Tokenizer
) -> ChatFormat | None:
    """Return the chat format of a run; None: its tokenizer has none."""
    if not chat.has_chat_format(tokenizer, data.chat_format):
        return None
    return _chat_format(data, model, tokenizer)


def _chat_format(data: DataSection, model: ModelSection, tokenizer: Tokenizer) -> "TeachableFormat":
    return chat.chat_format(
        tokenizer,
        None if model.path is None else Path(model.path),
        data.chat_format,
        arguments=data.chat_arguments,
        keeps_thinking=data.keep_thinking,
    )


def chat_limits(
    section: EnvSection, faults: FaultsSection, sampler: SamplerSection, tokenizer: Tokenizer
) -> "ChatLimits":
    """Return the limits of an episode."""
    return chat_env.ChatLimits(
        max_turns=section.max_turns,
        timeout_s=faults.env_timeout_s,
        retries=section.retries,
        backoff_s=faults.backoff_s,
        threads=section.threads,
        tools=toolbox.ToolLimits(
            timeout_s=section.tool_timeout_s, result_chars=section.tool_result_chars
        ),
        most_chars=tokenizer.most_chars(sampler.max_length),
        cannot_fit=tokenizer.cannot_fit,
    )


def _tried(
    envs: "ChatEnvs", examples: Sequence[Prompt], max_length: float = math.inf
) -> Sequence[Mapping[str, Any]]:
    """Begin an episode and end it; return the environment's tools. If the prompt leaves no room for
    an answer, try the next record. Raises ConfigError, also if no record has room."""

    async def begun(example: Prompt) -> tuple[int, Sequence[Mapping[str, Any]]]:
        env = envs(example)
        try:
            return len(await env.open(example)), env.own_schemas
        finally:
            await env.close()

    lengths = []
    for example in examples:
        length, schemas = at_once(begun(example))
        if length < max_length:
            return schemas
        lengths.append(length)
    raise ConfigError(
        f"held-out records ({len(lengths)} were tried) begin with {min(lengths)} tokens and more, "
        f"which leaves no room for an answer in sampler.max_length={max_length}: the run would "
        "train on nothing. Raise max_length, or shorten the records."
    )


def at_once(trial: Coroutine[None, None, T]) -> T:
    """Run a trial of a task to its end. Raises ConfigError."""
    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's thread already runs an event loop
            return thread.submit(asyncio.run, trial).result()
    except RolloutError as error:
        raise ConfigError(f"task, tried on the first held-out record: {error}") from error

"""Pivots of given conversations: pivots:FILE. Each turn of a demonstration is a task of one turn.

task: {pivots:traces.jsonl: {turns: calls, profile: evaluations/base/answers.jsonl, max_mean: 0.6}}

    conversation     S U A1 T A2 T A3        (assistant turns A1, A2, A3)
    pivots           S U -> A1    S U A1 T -> A2    S U A1 T A2 T -> A3

The policy answers each history with one turn, a group of them, and a turn earns 1 if it does what
the given one does (turn_match). No tool runs. PivotRL, Yi et al. 2026 (arXiv:2603.21383), keeps the
pivots at which a frozen policy sometimes succeeds: those whose rewards in a profile (jaxrl-async
eval with several samples) have a variance above 0 and a mean below max_mean. While training,
algorithm.dynamic_sampling drops groups without variance.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl_async.data.chat_formats.chat_messages import (
    as_messages,
    checked_messages,
    record_tools,
    without_filled,
)
from jaxrl_async.data.record_files import Bad, BadRecord, parse_rows
from jaxrl_async.data.records import held_out_of
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.tasks.task import Task, TaskRecord
from jaxrl_async.tasks.turn_match import MatchRules, TurnReward
from jaxrl_async.types import Message

log = logging.getLogger(__name__)

MAX_BAD_SHARE = 0.01
"""Maximum share of conversations that may be skipped as malformed."""
Turns = Literal["all", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConversation:
    """A given conversation."""

    messages: tuple[Message, ...]
    columns: Mapping[str, Any]  # the record's others, with `tools` as a list


@dataclass(frozen=True, slots=True)
class Pivots(Sequence[TaskRecord]):
    """The pivots of conversations, as records that are made when they are read."""

    conversations: Sequence[GivenConversation]
    positions: Sequence[tuple[int, int]]  # conversation, message of the assistant

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Any) -> Any:
        """Return the history as `messages`, the turn as `given`, and both as `worked`."""
        number, at = self.positions[index]
        one = self.conversations[number]
        given = one.messages[at]
        return {
            **one.columns,
            "messages": [dict(message) for message in one.messages[:at]],
            "given": dict(given),
            "answer": shown_turn(given),
            "worked": [dict(message) for message in one.messages[: at + 1]],
            "conversation": number,
            "turn": at,
        }

    def subset(self, positions: Sequence[tuple[int, int]]) -> "Pivots":
        """Return some of the pivots."""
        return Pivots(self.conversations, tuple(positions))


def pivot_task(
    source: str,
    *,
    eval_path: str | None = None,
    turns: Turns = "all",
    calls: Literal["arguments", "names"] = "arguments",
    text: Literal["any", "same"] = "any",
    similarity: float = 1.0,
    ignored: Sequence[str] = (),
    profile: str | None = None,
    max_mean: float = 1.0,
) -> Task:
    """Return the task of the pivots of given conversations.

    Args:
        source: file of records with `messages` and, if they call tools, `tools`; as
            data.jsonl.path.
        eval_path: file of held-out conversations; None: the last tenth of source's, at most 64.
        turns: all turns of the assistant, or those that call tools (calls).
        calls: what must be the same in a turn that calls tools: names and arguments, or names.
        text: in a turn without calls, any text matches, or only one with the same words (same).
        similarity: least F1 of the words of texts in arguments and answers; 1: the same words.
        ignored: names of arguments that are not compared.
        profile: answers.jsonl of an evaluation of these pivots, with several samples; None: all
            pivots are kept.
        max_mean: pivots with a mean reward of at least this in the profile are left out.

    Raises ConfigError, DataError.
    """
    for name, value, allowed in (
        ("turns", turns, ("all", "calls")),
        ("calls", calls, ("arguments", "names")),
        ("text", text, ("any", "same")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} ({value!r}) must be one of {', '.join(allowed)}.")
    for name, share in (("similarity", similarity), ("max_mean", max_mean)):
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"{name} ({share!r}) must be a number above 0 and at most 1.")
    if isinstance(ignored, str) or not all(isinstance(name, str) for name in ignored):
        raise ConfigError(f"ignored ({ignored!r}) must be a list of names of arguments.")
    if profile is None and max_mean != 1.0:
        raise ConfigError(f"max_mean ({max_mean}) has no effect without profile. Set that, too.")
    rules = MatchRules(calls=calls, text=text, similarity=similarity, ignored=frozenset(ignored))
    pivots = pivots_of(read_conversations(source), turns, source)
    kept = pivots if profile is None else filter_by_profile(pivots, Path(profile), max_mean)
    if eval_path is not None:
        train, held_out = kept, pivots_of(read_conversations(eval_path), turns, eval_path)
    else:
        train, held_out = _split(kept, source)
    return Task(records=train, held_out=held_out, reward=TurnReward(rules))


# ---- conversations


def read_conversations(path: str) -> list[GivenConversation]:
    """Return the conversations of a file. Malformed ones are skipped, counted and logged. Raises
    DataError."""
    remedy = "Give each record a column `messages`, a conversation with turns of the assistant."
    return parse_rows(path, _conversation, MAX_BAD_SHARE, remedy)


def _conversation(columns: Mapping[str, object]) -> GivenConversation:
    """Return a record's conversation. Raises BadRecord."""
    if "messages" not in columns:
        raise BadRecord(Bad.FIELD, "messages")
    try:
        messages = checked_messages(without_filled(as_messages(columns["messages"])))
    except DataError as error:
        raise BadRecord(Bad.MESSAGES, str(error)) from None
    try:
        tools = [dict(tool) for tool in record_tools(columns)]
    except DataError as error:
        raise BadRecord(Bad.TOOLS, str(error)) from None
    if not any(_is_pivot(messages, at, "all") for at in range(len(messages))):
        raise BadRecord(Bad.MESSAGES, "no turn of the assistant with a message before it")
    if not tools and any(message.get("tool_calls") for message in messages):
        raise BadRecord(Bad.TOOLS, "the messages call tools, and there is no column `tools`")
    others = {k: v for k, v in columns.items() if k not in ("messages", "tools", "tool_defs")}
    shown = {"tools": tools} if tools else {}
    return GivenConversation(messages=messages, columns={**others, **shown})


def pivots_of(conversations: Sequence[GivenConversation], turns: Turns, source: str) -> Pivots:
    """Return the pivots of conversations, in order. Raises DataError if no turn is one."""
    positions = [
        (number, at)
        for number, one in enumerate(conversations)
        for at in range(len(one.messages))
        if _is_pivot(one.messages, at, turns)
    ]
    if not positions:
        raise DataError(
            f"{source}: no turn of the assistant is a pivot (turns={turns}). Set turns=all, or "
            "give conversations whose turns call tools."
        )
    log.info("%s: %d pivots in %d conversations", source, len(positions), len(conversations))
    return Pivots(conversations, tuple(positions))


def _is_pivot(messages: Sequence[Message], at: int, turns: Turns) -> bool:
    """Return whether a message is a turn that the policy can take: not the first message, and not
    the continuation of another turn."""
    message = messages[at]
    if message["role"] != "assistant" or not at or messages[at - 1]["role"] == "assistant":
        return False
    content = message.get("tool_calls") or (turns == "all" and message.get("content"))
    return bool(content)


def shown_turn(message: Message) -> str:
    """Return a turn as a text for people: its calls as JSON, or its content."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return json.dumps(calls, ensure_ascii=False) if calls else str(message.get("content") or "")


def _split(pivots: Pivots, source: str) -> tuple[Pivots, Pivots]:
    """Return the pivots to train on, and the held-out pivots of the last conversations: two pivots
    of one conversation share its beginning."""
    numbers = sorted({number for number, _ in pivots.positions})
    if len(numbers) < 2:
        raise DataError(
            f"{source}: pivots of one conversation alone, so none is left to evaluate on. Give "
            "eval_path."
        )
    first = numbers[-held_out_of(len(numbers))]
    train = [position for position in pivots.positions if position[0] < first]
    return pivots.subset(train), pivots.subset([p for p in pivots.positions if p[0] >= first])


# ---- the profile


def filter_by_profile(pivots: Pivots, file: Path, max_mean: float) -> Pivots:
    """Return the pivots whose rewards in a profile have a variance above 0 and a mean below
    `max_mean` (arXiv:2603.21383, eq. 5). The others are counted and logged. Raises DataError if the
    profile is of other records, or no pivot is left."""
    rewards = _rewards(pivots, file)
    single = sum(len(of_one) == 1 for of_one in rewards.values())
    if single:
        raise DataError(
            f"{file}: {single} pivots have one answer, which has no variance. Evaluate with "
            "several samples (jaxrl-async eval --samples 8 --temperature 1)."
        )
    missing = len(pivots) - len(rewards)
    same = {index for index, of_one in rewards.items() if min(of_one) == max(of_one)}
    easy = {
        index
        for index, of_one in rewards.items()
        if index not in same and sum(of_one) / len(of_one) >= max_mean
    }
    kept = [i for i in range(len(pivots)) if i in rewards and i not in same | easy]
    log.info(
        "%s: %d of %d pivots are kept; left out: %d with equal rewards, %d with a mean of at least "
        "%g, %d without answers",
        file,
        len(kept),
        len(pivots),
        len(same),
        len(easy),
        max_mean,
        missing,
    )
    if not kept:
        raise DataError(
            f"{file}: no pivot has rewards that differ with a mean below max_mean={max_mean}. "
            "Raise it, compare less strictly (calls, similarity), or profile another policy."
        )
    return pivots.subset([pivots.positions[i] for i in kept])


def _rewards(pivots: Pivots, file: Path) -> dict[int, list[float]]:
    """Return the rewards in a profile, by the index of their pivot. Raises DataError."""
    rewards: dict[int, list[float]] = {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not at U+2028
        answers = [json.loads(line) for line in lines if line.strip()]
        for answer in answers:
            index = int(answer["index"])
            if (
                not 0 <= index < len(pivots)
                or answer["reference"] != pivots[index]["answer"].strip()
            ):
                raise DataError(
                    f"{file}: its answer to record {index} is to another turn. Make the profile "
                    "from the same file, with the same `turns`: its eval_path must be this file."
                )
            rewards.setdefault(index, []).append(float(answer["reward"]))
    except OSError as error:
        raise DataError(f"profile={file}: {error.strerror}. Give an answers.jsonl.") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file}: not the answers of an evaluation ({type(error).__name__}: {error}). Give the "
            "answers.jsonl that jaxrl-async eval writes."
        ) from None
    return rewards

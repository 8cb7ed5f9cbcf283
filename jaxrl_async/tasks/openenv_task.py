"""OpenEnv environment servers as tasks: openenv:URL.

    record ──reset──> observation ──as text──> the policy's message ──as action──> step ──> ...

The server's schemas, or two functions of the user, define how an observation becomes messages, and
a message an action.
"""

import asyncio
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxrl_async.config.userfile import load_attribute
from jaxrl_async.errors import ConfigError, RolloutError, StartOver
from jaxrl_async.tasks.openenv_client import (
    EnvConnection,
    Observed,
    RefusedAction,
    ServerAddress,
    action_schema,
    checked_url,
    websocket_module,
)
from jaxrl_async.tasks.task import Environment, Said, Step, Task, TaskRecord
from jaxrl_async.types import Message

TEXTS = ("prompt", "message", "text", "content", "output", "result")
"""Fields of an observation; only the first one that holds a text is shown."""
FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
"""An action in a fenced block of a message."""
CUT = "\n[... cut]"
"""The end of an observation that was too long."""

ToMessages = Callable[[Mapping[str, Any]], Said]
"""Converts an observation to messages for the policy."""
ToAction = Callable[[Message], Mapping[str, Any]]
"""Converts the policy's message to an action; the policy gets the text of a ValueError."""


def openenv_task(
    url: str,
    *,
    size: int = 1000,
    eval_size: int = 64,
    observe: str | ToMessages | None = None,
    act: str | ToAction | None = None,
    max_chars: int = 8192,
    reply_s: float = 60.0,
    patience_s: float = 120.0,
) -> Task:
    """Return the task that an environment server plays.

    Args:
        url: of the server, http://HOST:PORT.
        size: number of training records; record i resets the environment with the seed i.
        eval_size: number of evaluation records, with separate seeds.
        observe: converts an observation to messages; a function, or FILE.py:NAME.
        act: converts a message to an action; a function, or FILE.py:NAME.
        max_chars: maximum length of a shown observation, characters; the rest is cut, with a note.
        reply_s: timeout of one reply of the server, seconds.
        patience_s: timeout until a full server lets an episode begin, seconds.

    Raises ConfigError and MissingExtraError.
    """
    if min(size, eval_size, max_chars) < 1 or min(reply_s, patience_s) <= 0:
        raise ConfigError(
            f"task = 'openenv:{url}': size, eval_size, max_chars, reply_s and patience_s must be "
            "above 0."
        )
    server = ServerAddress(url=checked_url(url), reply_s=reply_s, patience_s=patience_s)
    websocket_module()
    converter = EnvConverter(
        server, observe=_function(observe, "observe"), act=_function(act, "act"), chars=max_chars
    )
    return Task(
        records=[{"seed": seed} for seed in range(size)],
        held_out=[{"seed": seed} for seed in range(size, size + eval_size)],
        environment=functools.partial(OpenEnvEnvironment, server, converter),
    )


def _function(given: object, name: str) -> Any:
    if isinstance(given, str):
        return load_attribute(given, f"task.{name}", "function", callable)
    return given


class EnvConverter:
    """Converts messages between a policy and one kind of environment. Any thread."""

    def __init__(
        self,
        server: ServerAddress,
        *,
        observe: ToMessages | None = None,
        act: ToAction | None = None,
        chars: int = 8192,
    ) -> None:
        """Start without the server's schemas; see `openenv_task` for the arguments."""
        self._server, self._observe, self._act, self._chars = server, observe, act, chars
        self._schema: Mapping[str, Any] | None = None

    async def learn(self) -> None:
        """Fetch the server's actions, once. Raises RolloutError."""
        if self._act is None and self._schema is None:
            self._schema = await asyncio.to_thread(action_schema, self._server)

    def messages(self, observation: Mapping[str, object]) -> Said:
        """Return the messages to the policy for an observation."""
        if self._observe is not None:
            return self._observe(observation)
        return observation_text(observation, self._chars)

    def action(self, message: Message) -> Mapping[str, Any]:
        """Return the action of a message. Raises ValueError with a text for the policy."""
        if self._act is not None:
            return self._act(message)
        assert self._schema is not None, "learn() comes first"
        return message_action(str(message.get("content") or ""), self._schema)


def observation_text(observation: Mapping[str, Any], chars: int) -> str:
    """Return an observation as a text: the first of TEXTS that it has, or else all of it as JSON.

    chars: maximum length; the rest is cut.
    """
    texts = [observation[name] for name in TEXTS if isinstance(observation.get(name), str)]
    text = next((t for t in texts if t), None)
    if text is None:
        text = json.dumps(dict(observation), ensure_ascii=False, default=str)
    return text if len(text) <= chars else text[:chars] + CUT


def text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the field of an action that takes the policy's text unchanged: its only field except
    metadata, or its only required field, if that is a text; None if there is no such field."""
    fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
    needed = [k for k in schema.get("required", ()) if k in fields]
    names = list(fields) if len(fields) == 1 else needed
    if len(names) == 1 and fields[names[0]].get("type") == "string":
        return names[0]
    return None


def message_action(text: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the action in a text: the text itself if an action is a single text, or else the JSON
    object in it. Raises ValueError."""
    field = text_field(schema)
    if field is not None:
        return {field: text}
    fenced = FENCED.findall(text)
    fields = ", ".join(k for k in schema.get("properties", {}) if k != "metadata")
    try:
        action = json.loads(fenced[-1] if fenced else text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Answer with a JSON object with the fields {fields}: {error}") from None
    if not isinstance(action, dict):
        raise ValueError(f"Answer with a JSON object with the fields {fields}.")
    return action


class OpenEnvEnvironment(Environment):
    """One episode on an environment server."""

    def __init__(self, server: ServerAddress, converter: EnvConverter) -> None:
        """Do not connect yet."""
        self._server, self._converter = server, converter
        self._connection: EnvConnection | None = None
        self._arguments: dict[str, Any] = {}  # arguments of the reset
        self._taken: list[dict[str, Any]] = []  # actions so far, with what the server answered

    async def reset(self, record: TaskRecord) -> Said:
        """See Environment. The record's column `reset`, or else its `seed`, holds the arguments of
        the reset."""
        await self._converter.learn()
        arguments = record.get("reset") or {k: record[k] for k in ("seed",) if k in record}
        self._arguments = dict(arguments)
        self._connection, first = await EnvConnection.begin(self._server, arguments)
        if first.done:
            raise RolloutError(f"{self._server.url}: the episode is already over after the reset.")
        messages = self._converter.messages(first.observation)
        before: Sequence[Message] = record.get("messages") or ()
        return [*before, *_as_messages(messages)] if before else messages

    async def step(self, message: Message) -> Step | Said:
        """See Environment. The policy gets an error for a message that is not an action."""
        try:
            action = dict(self._converter.action(message))
        except ValueError as error:
            return str(error)
        reply = await self._act(action)
        if isinstance(reply, RefusedAction):
            return f"The environment refused this action. {reply}"
        messages = None if reply.done else self._converter.messages(reply.observation)
        return Step(messages=messages, reward=reply.reward, done=reply.done)

    async def _act(self, action: Mapping[str, object]) -> Observed | RefusedAction:
        """Take an action, and note it with a digest of the answer."""
        assert self._connection is not None, "reset comes first"
        reply: Observed | RefusedAction
        try:
            reply = await self._connection.step(action)
        except RefusedAction as error:
            reply = error
        self._taken.append({"action": dict(action), "answer": _digest(reply)})
        return reply

    def state(self) -> Any:
        """Return the arguments of the reset, and all actions: a server keeps no environment for a
        client that is gone."""
        return {"reset": self._arguments, "taken": list(self._taken)}

    async def restore(self, state: Any) -> None:
        """Reset an environment as before, and take the same actions. Raises StartOver if it answers
        differently."""
        await self._converter.learn()
        self._arguments = dict(state["reset"])
        self._connection, _ = await EnvConnection.begin(self._server, self._arguments)
        for number, taken in enumerate(state["taken"], 1):
            await self._act(taken["action"])
            if self._taken[-1]["answer"] != taken["answer"]:
                await self.close()
                raise StartOver(
                    f"{self._server.url} answers action {number} of {len(state['taken'])} in "
                    "another way than before the resume."
                )

    async def close(self) -> None:
        """See Environment."""
        if self._connection is not None:
            await self._connection.close()


def _digest(reply: Observed | RefusedAction) -> str:
    """Return a digest of a server's answer."""
    plain: Any = str(reply) if isinstance(reply, RefusedAction) else asdict(reply)
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _as_messages(messages: Said) -> list[Message]:
    if messages is None:
        return []
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [messages] if isinstance(messages, Mapping) else list(messages)

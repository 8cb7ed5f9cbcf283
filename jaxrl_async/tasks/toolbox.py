"""Python functions as tools: a schema from type hints and docstring, and calls with limits.

    assistant's message ──tool_calls──> arguments, checked ──> function ──> message of the role tool

Every failure of a call is reported to the policy as text and counted: an unknown tool, wrong
arguments, an exception, a timeout. If a tool's service did not accept the call (a refused
connection, 429, 503), it is retried at most TRIES times and for PATIENCE_S, since the policy may
have chosen the address. A call is not retried after a timeout or a broken connection, since it may
have taken effect.
"""

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from jaxrl_async.away import not_begun_in
from jaxrl_async.errors import ConfigError, GivenUp, RolloutError
from jaxrl_async.outages import Outages
from jaxrl_async.tasks.function_source import FunctionSource, source_of
from jaxrl_async.tasks.task import Tool
from jaxrl_async.tasks.tool_process import LOAD_S, tool_processes
from jaxrl_async.tasks.usercode import CallOutcome, Threads, TooLate, run_either, side_by_side
from jaxrl_async.types import Message

MOST_CALLS = 32
"""Maximum tool calls of one message that are run; the others get an error."""
TOO_MANY = f"error: not called: one message may have {MOST_CALLS} calls"
TRIES = 2
"""Number of retries of a call that a tool's service did not accept."""
PATIENCE_S = 20.0
"""Maximum time for these retries, from the end of the first call, seconds."""
ERROR_CHARS = 300
"""Maximum length of an error text about a call, characters."""
log = logging.getLogger(__name__)

MAIN_THREAD = "signal only works in main thread"
"""Text in the error of a tool that sets a timeout with SIGALRM, as TRL's examples do."""
BLOCK = re.compile(
    r"^\s*(?:Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$", re.M
)
"""Start of a block of a docstring."""
SETS_SIGNALS: dict[Tool, FunctionSource] = {}
"""Tools that were found to set signals, and where processes find them."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of one call of a tool."""

    timeout_s: float = 30.0
    result_chars: int = 8192  # longer results are cut


@dataclass(frozen=True, slots=True)
class _Bound:
    """A tool with the model of its arguments."""

    function: Tool
    arguments: type[BaseModel]
    names: tuple[str, ...]  # of its parameters, in the order of the model's fields
    schema: Mapping[str, Any]


class Toolbox:
    """The tools of one environment."""

    def __init__(
        self,
        tools: Sequence[Tool],
        threads: Threads,
        limits: ToolLimits,
        count: Callable[[str], None] = lambda name: None,
        outages: Outages | None = None,
    ) -> None:
        """Create the toolbox.

        Args:
            tools: functions with distinct names.
            threads: run the functions that are not async.
            limits: of each call.
            count: called with the name of each fault (metrics/fault_counts.py).
            outages: the run's; None: a separate one.

        Raises ConfigError for a function that cannot be a tool.
        """
        self._tools = {name_of_tool(tool): _bound(tool) for tool in tools}
        if len(self._tools) < len(tools):
            names = sorted(name_of_tool(tool) for tool in tools)
            raise ConfigError(f"two tools have one name: {', '.join(names)}. Rename one of them.")
        self._threads, self._limits, self._count = threads, limits, count
        self._outages = outages or Outages(count=count)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that may be called, as OpenAI's function tools."""
        return tuple(tool.schema for tool in self._tools.values())

    async def __call__(self, message: Message) -> list[Message]:
        """Run the message's tool calls concurrently; return one message of the role tool for each.

        Errors about calls that could not be parsed (`tool_call_errors`) are in a message of the
        user, who can answer without a call.
        """
        calls = list(message.get("tool_calls") or ())
        texts = await side_by_side(
            self._answer(call) if number < MOST_CALLS else self._error(TOO_MANY)
            for number, call in enumerate(calls)
        )
        messages = [_tool_message(call, text) for call, text in zip(calls, texts, strict=True)]
        if unread := message.get("tool_call_errors"):
            reasons = "; ".join(str(error["reason"]) for error in unread)
            text = await self._error(f"error: a tool call could not be read: {reasons}")
            messages.append({"role": "user", "content": text})
        return messages

    async def _answer(self, call: Mapping[str, object]) -> str:
        name, arguments = _parsed_call(call)
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return await self._error(f"error: there is no tool {name!r}; there are: {known}")
        try:
            checked = _checked(tool, arguments)
        except ValueError as error:
            return await self._error(f"error: {name}: {error}")
        try:
            outcome = await self._outcome(name, tool, checked, arguments)
        except TooLate:
            self._count("tool_timeouts")
            return f"error: {name} took more than {self._limits.timeout_s:g} s"
        if outcome.error is not None:
            kind = getattr(outcome.error, "kind", type(outcome.error).__name__)
            return await self._error(f"error: {name}: {kind}: {shown_error(outcome.error)}")
        return self._cut(outcome.value)

    async def _outcome(
        self, name: str, tool: "_Bound", checked: Mapping[str, object], arguments: object
    ) -> CallOutcome:
        """Call a tool: in a thread, or in a process once it was found to set a signal. The call
        that finds it is made again."""
        if tool.function not in SETS_SIGNALS:
            outcome = await self._call(name, functools.partial(tool.function, **checked))
            found = isinstance(outcome.error, ValueError) and MAIN_THREAD in str(outcome.error)
            if not (found and _runs_in_a_process(name, tool.function)):
                return outcome
        limit_s, source = self._limits.timeout_s, SETS_SIGNALS[tool.function]
        work = functools.partial(tool_processes().call, source, arguments, limit_s)
        outcome = await self._threads.run(work, limit_s + 2 * LOAD_S)
        if isinstance(outcome.error, TooLate):
            raise outcome.error
        return outcome

    async def _call(self, name: str, work: functools.partial[Any]) -> CallOutcome:
        """Call a tool, with a few retries if its service did not accept the call."""

        outcome = CallOutcome()

        async def attempt() -> CallOutcome:
            nonlocal outcome
            outcome = await run_either(work, self._threads, self._limits.timeout_s)
            if outcome.error is not None and not_begun_in(outcome.error) is not None:
                raise outcome.error
            return outcome

        try:
            return await self._outages.until_answered(
                f"the tool {name}", attempt, tries=TRIES, patience_s=PATIENCE_S, optional=True
            )
        except GivenUp:
            return outcome

    async def _error(self, text: str) -> str:
        self._count("tool_errors")
        text = _encodable(text)
        return text if len(text) <= ERROR_CHARS else text[: ERROR_CHARS - 3] + "..."

    def _cut(self, result: object) -> str:
        text = text_of(result)
        most = self._limits.result_chars
        if len(text) <= most:
            return _encodable(text)
        self._count("cut_tool_results")
        return f"{_encodable(text[:most])}... ({len(text) - most} more characters are cut)"


def name_of_tool(tool: Tool) -> str:
    """Return the name with which the policy calls a tool."""
    return str(getattr(tool, "__name__", type(tool).__name__))


def tool_schema(tool: Tool) -> Mapping[str, Any]:
    """Return a function as one of OpenAI's function tools: its name, the docstring's text before
    `Args:`, and a JSON schema of its parameters. Raises ConfigError."""
    return _bound(tool).schema


@functools.lru_cache(maxsize=1024)
def _bound_function(
    function: Tool, is_method: bool
) -> tuple[type[BaseModel], tuple[str, ...], Any]:
    """Return the model of a function's arguments, their names, and the schema."""
    name = name_of_tool(function)
    parameters = list(inspect.signature(function).parameters.values())[int(is_method) :]
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {name}: its type hints cannot be read: {error}.") from None
    about, texts = _parse_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.kind not in BY_NAME or parameter.name not in hints:
            raise ConfigError(
                f"tool {name}: parameter {parameter} needs a type hint, and must be one that can "
                "be given by name. Write NAME: TYPE."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        description: dict[str, Any] = (
            {"description": texts[parameter.name]} if parameter.name in texts else {}
        )
        described = Field(default, alias=parameter.name, **description)  # else from Annotated
        fields[f"argument_{number}"] = (hints[parameter.name], described)
    try:
        model: type[BaseModel] = create_model(
            name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
        )
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise ConfigError(
            f"tool {name}: a type of its parameters has no JSON schema: {str(error)[:200]}. Use "
            "plain types, lists, dicts, Literal or pydantic models."
        ) from None
    shown = {"name": name, "description": about, "parameters": _without_titles(schema)}
    names = tuple(parameter.name for parameter in parameters)
    return model, names, {"type": "function", "function": shown}


def _bound(tool: Tool) -> _Bound:
    if not callable(tool):
        raise ConfigError(f"tool {tool!r:.60} is not a function. Give functions with type hints.")
    own = getattr(tool, "__func__", None)
    model, names, schema = _bound_function(own or tool, own is not None)
    return _Bound(tool, model, names, schema)


def _parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's paragraphs before its first block (`Args:`, `Returns:`), and the
    descriptions in its block `Args:` by parameter."""
    about = "\n\n".join(" ".join(p.split()) for p in re.split(r"\n\s*\n", BLOCK.split(doc)[0]))
    texts: dict[str, str] = {}
    block = re.search(r"^\s*(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)*)", doc, re.M)
    last = ""
    for line in block.group(1).splitlines() if block else ():
        if found := re.match(r"\s*(\w+)(?:\s*\(.*?\))?:\s*(.*)", line):
            last = found.group(1)
            texts[last] = found.group(2).strip()
        elif last and line.strip():
            texts[last] += f" {line.strip()}"
    return about.strip(), texts


def _without_titles(schema: object) -> Any:
    """Return a JSON schema without the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _parsed_call(call: Mapping[str, object]) -> tuple[str, Any]:
    """Return name and arguments of a tool call; "" and {} if they are missing."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", {}
    return str(function.get("name", "")), function.get("arguments", {})


def checked_arguments(tool: Tool, arguments: object) -> dict[str, Any]:
    """Return a tool's arguments by name, from JSON or its value; raise ValueError with a short text
    if they do not fit."""
    return _checked(_bound(tool), arguments)


def _checked(tool: _Bound, arguments: object) -> dict[str, Any]:
    """Return the arguments by name; raise ValueError with a short text if they do not fit."""
    try:
        values = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise ValueError("its arguments are not JSON") from None
    if not isinstance(values, Mapping):
        raise ValueError("its arguments are not a JSON object")
    try:
        model = tool.arguments.model_validate(values)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}"
            for e in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise ValueError("; ".join(wrong)) from None
    set_ = model.model_fields_set
    return {
        n: getattr(model, f)
        for n, f in zip(tool.names, type(model).model_fields, strict=True)
        if f in set_
    }


def text_of(result: object) -> str:
    """Return a tool's result as the policy sees it: a text, or JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _encodable(text: str) -> str:
    """Return a text without unpaired surrogates, which no tokenizer encodes."""
    return text.encode("utf-8", "replace").decode()


def shown_error(error: BaseException) -> str:
    """Return an exception's message on one line."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return "(its message cannot be shown)"


def _runs_in_a_process(name: str, tool: Tool) -> bool:
    """Return whether a tool that sets a signal can run in a process, from now on; log it once."""
    if not hasattr(tool, "__self__"):  # a method belongs to an episode's object
        try:
            SETS_SIGNALS[tool] = source_of(tool, name, f"the tool {name}")
            tool_processes()
        except ConfigError:
            return _warn_of_signals(name)
        log.info("the tool %s sets a signal (SIGALRM): it is called in processes of its own", name)
        return True
    return _warn_of_signals(name)


@functools.cache
def _warn_of_signals(name: str) -> bool:
    """Log once that each call of a tool fails; return False."""
    log.warning(
        "the tool %s sets a signal (SIGALRM, as a time limit), which works only in the main "
        "thread, and it cannot run in a process, since it is not a function at a module's top "
        "level: each call fails. Move it there, or remove the signal: env.tool_timeout_s limits "
        "each call.",
        name,
    )
    return False


def _tool_message(call: object, text: str) -> Message:
    """Return the message of the role tool that answers a call."""
    message = {"role": "tool", "content": text}
    if isinstance(call, Mapping):
        if call.get("id") is not None:
            message["tool_call_id"] = str(call["id"])
        message["name"] = _parsed_call(call)[0]
    return message


def tools_of(owner: object, tools: Sequence[Tool | str], more: Sequence[Tool]) -> list[Tool]:
    """Return an environment's tools, with texts resolved to its methods, and its task's tools.

    Raises RolloutError for a text that does not name a method.
    """
    resolved: list[Tool] = []
    for tool in tools:
        method = getattr(owner, tool, None) if isinstance(tool, str) else tool
        if not callable(method):
            raise RolloutError(
                f"{type(owner).__name__}.tools names {tool!r}, which is not a method of it. "
                "Correct the name."
            )
        resolved.append(method)
    return [*resolved, *more]

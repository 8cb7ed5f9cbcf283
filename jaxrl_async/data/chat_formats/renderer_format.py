"""A ports.ChatFormat over a renderer of the package `renderers` (extra [chat]). These are
hand-written formats of known models, which handle templates that drop earlier thinking. Only this
module uses the package.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from jaxrl_async.data.chat_formats.chat_messages import (
    arguments_object,
    checked_messages,
    checked_tools,
    with_objects,
)
from jaxrl_async.data.chat_formats.written_turn import (
    THINK,
    THOUGHT,
    CallError,
    WrittenTurn,
    assistant_message,
    mark_tokens,
    read_call,
    split_thinking,
    with_thinking_in_content,
)
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError, DataError, extra_module, in_a_line
from jaxrl_async.ports.rollout import TurnMarks
from jaxrl_async.types import IntArray, Message

log = logging.getLogger(__name__)

PACKAGE = "renderers"
VOCABULARY_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
"""Environment variable for the folder from which openai-harmony reads its vocabulary."""
WELL_FORMED = ("ok", "unknown_tool")
"""Statuses of the package's tool calls that count as calls. Unknown tools are left to the
environment."""
MARK = "zqthought"
"""A marker word to search for in a format's output."""
CALLING: Message = {
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
        }
    ]
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {'
"""Start of a call in Hermes' form."""
FIRST_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""The mark at the start of a call in any form."""
QUESTION: Message = {"role": "user", "content": "1 + 2?"}
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Adapter of a tokenizer for the package, with our lock."""

    tokenizer: Tokenizer
    name_or_path: str = ""  # never a hub name, to avoid lookups there

    @property
    def unk_token_id(self) -> int | None:
        token_id: int | None = self.tokenizer.hf.unk_token_id
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        return next(iter(self.tokenizer.eos_ids), None)

    @property
    def chat_template(self) -> str:
        return str(self.tokenizer.hf.chat_template or "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        del add_special_tokens  # the renderers add all special tokens themselves
        return [int(i) for i in self.tokenizer.encode(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        ids = np.asarray(token_ids, np.int32).reshape(-1)
        return self.tokenizer.decode(ids) if skip_special_tokens else self.tokenizer.decode_all(ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            token_id = self.tokenizer.token_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]


def is_installed() -> bool:
    """Return True if the package is installed, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


def renderer_names() -> tuple[str, ...]:
    """Return the names of the package's renderers. Raises MissingExtraError."""
    (union, *_) = get_args(_package("configs").RendererConfig)
    names = [str(kind.model_fields["name"].default) for kind in get_args(union)]
    return tuple(sorted(n for n in names if n not in ("auto", "default", "custom")))


def _package(module: str) -> Any:
    instead = ", or set data.chat_format=template for the tokenizer's own chat template"
    needs = f"data.chat_format needs the package {PACKAGE}"
    return extra_module(f"{PACKAGE}.{module}", "chat", needs, instead)


def _make(
    tokenizer: Tokenizer, name: str, arguments: Mapping[str, object], retention: str | None
) -> Any:
    """Return a renderer of the package. Raises ConfigError for unsupported arguments."""
    if name == "gpt-oss" and not os.environ.get(VOCABULARY_FOLDER):
        raise ConfigError(
            f"data.chat_format={name} needs openai-harmony's vocabulary, which it would download. "
            f"Set {VOCABULARY_FOLDER} to a folder with o200k_base.tiktoken."
        )
    configs, base = _package("configs"), _package("base")
    try:
        kind = type(configs.config_from_name(name))
        config = kind() if retention is None else kind(thinking_retention=retention)
        return base.create_renderer(
            _Encoder(tokenizer), config, chat_template_kwargs=dict(arguments)
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"the chat format {name} does not fit data.chat_arguments={dict(arguments)} or the "
            f"tokenizer: {in_a_line(error)}."
        ) from None


class RendererFormat:
    """A renderer of the package. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        *,
        arguments: Mapping[str, object] | None = None,
        keeps_thinking: bool = False,
    ) -> None:
        """Create a renderer.

        Args:
            tokenizer: of a model of the renderer's family.
            name: one of renderer_names().
            arguments: further arguments of the format, such as enable_thinking.
            keeps_thinking: continue sequences even where the format would drop earlier thinking.

        Raises:
            MissingExtraError: the package is not installed.
            ConfigError: the tokenizer lacks a token of the format, or an argument is unknown.
        """
        arguments = arguments or {}
        self.name, self._tokenizer = name, tokenizer
        self._arguments, self._keeps = dict(arguments), keeps_thinking
        self._renderer = _make(tokenizer, name, arguments, "all" if keeps_thinking else None)
        own = [int(i) for i in self._renderer.get_stop_token_ids()]
        self._stops = tuple(dict.fromkeys([*own, *tokenizer.eos_ids]))
        self._knows_reasoning = True
        self._knows_reasoning = self._learn_reasoning()
        opened, closed = (self._ids([QUESTION], (), opens_turn=opens) for opens in (True, False))
        self._opened = opened
        self._header = opened[len(closed) :] if opened[: len(closed)] == closed else []
        # for contexts without thinking, where nothing is dropped
        self._keeping: Any = None
        answered = self._ids([QUESTION, {"role": "assistant", "content": MARK}, QUESTION], ())
        if answered[: len(opened)] == opened:
            with contextlib.suppress(ConfigError):  # some have no option to keep thinking
                self._keeping = _make(tokenizer, name, arguments, "all")

    def _learn_reasoning(self) -> bool:
        """Return True if the format has a field for reasoning."""
        thinking = {"role": "assistant", "content": "3", "reasoning_content": MARK}
        try:
            ids = self._ids([QUESTION, thinking], (), opens_turn=False)
        except DataError:
            return True
        return MARK in self._tokenizer.decode_all(ids)

    @cached_property
    def marks(self) -> TurnMarks:
        """How the format writes the policy's turn; see ports.ChatFormat."""
        reply: Message = {"role": "assistant", "content": MARK}
        header = self._tokenizer.decode_all(self._header)
        written, called, thought = (
            self._turn_text({**reply, **more}, tools)
            for more, tools in (({}, ()), (CALLING, (TOOL,)), ({"reasoning_content": MARK}, ()))
        )
        call = called.partition(MARK)[2].lstrip()
        first = FIRST_MARK.match(call) if TOOL["function"]["name"] in call else None
        thinking: Literal["", "may", "open", "other"] = ""
        if THINK in thought and self._knows_reasoning:
            thinking = "may"
        if header.rstrip().endswith(THINK):
            thinking = "open"
        elif THOUGHT in header:
            thinking = ""
        elif not written.removeprefix(f"{THINK}\n\n{THOUGHT}\n\n").startswith(MARK):
            thinking = "other"
        return TurnMarks(
            calls="hermes" if call.startswith(HERMES) else "other",
            thinking=thinking,
            texts=None if first is None else (THINK, THOUGHT, first[0]),
            tokens=mark_tokens(self._tokenizer.added_tokens),
        )

    @cached_property
    def _thought(self) -> int | None:
        """The token at the end of the reasoning, if there is one."""
        return mark_tokens(self._tokenizer.added_tokens).get(THOUGHT)

    def _turn_text(self, reply: Message, tools: Sequence[Mapping[str, object]]) -> str:
        """Return a turn's text after its header; empty: the format does not write it."""
        try:
            shown, full = self._ids([QUESTION], tools), self._ids([QUESTION, reply], tools)
        except DataError:
            return ""
        return self._tokenizer.decode_all(full[len(shown) :] if full[: len(shown)] == shown else ())

    def takes(self, argument: str) -> bool:
        """Return True if the renderer reads this variable; see ports.ChatFormat."""
        return argument in type(self._renderer.config).template_field_names()

    def with_arguments(self, arguments: Mapping[str, object]) -> "RendererFormat":
        """Return the renderer with other values of its variables; see ports.ChatFormat."""
        return RendererFormat(
            self._tokenizer,
            self.name,
            arguments={**self._arguments, **arguments},
            keeps_thinking=self._keeps,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The format's own end-of-turn tokens, then the tokenizer's end tokens."""
        return self._stops

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray:
        """Encode a conversation up to the start of the policy's turn; see ports.ChatFormat."""
        return np.asarray(self._ids(checked_messages(messages), checked_tools(tools)), np.int32)

    def message(self, token_ids: IntArray, tools: Sequence[Mapping[str, object]]) -> Message:
        """Parse a generated turn; see ports.ChatFormat and written_turn.assistant_message."""
        length = len(token_ids)
        while length and token_ids[length - 1] in self.stop_token_ids:
            length -= 1
        ids = [int(i) for i in token_ids[:length]]
        parsed = self._parse(ids, tools)
        is_open = parsed.reasoning_content and not parsed.content and not parsed.tool_calls
        if is_open and self._thought is not None and self._thought not in ids:
            # formats strip a finished reasoning: an unfinished one must be its beginning
            parsed = self._parse([*ids, self._thought], tools)
        good = [call for call in parsed.tool_calls if _is_call(call)]
        errors = [
            CallError(text=self._text_of(call, ids), reason=_reason(call))
            for call in parsed.tool_calls
            if not _is_call(call)
        ]
        reasoning, content = parsed.reasoning_content, parsed.content
        if not self._knows_reasoning:
            reasoning, content = split_thinking(content)
        turn = WrittenTurn(
            content="\n".join([*filter(None, [content]), *(e.text for e in errors)]),
            reasoning=reasoning,
            calls=tuple((str(call.name), _arguments(call) or {}) for call in good),
            call_ids=tuple(call.id for call in good),
            errors=tuple(errors),
        )
        return assistant_message(turn, np.asarray(token_ids))

    def continuation(
        self, before: IntArray, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray | None:
        """Return the tokens to append for the next turn, or None; see ports.ChatFormat.

        Earlier thinking is dropped only if there is any.
        """
        new, tools = checked_messages(messages), checked_tools(tools)
        ids = [int(i) for i in before]
        starts = self._turn_starts(ids)
        if not starts:
            return None
        thinks = any(self._parse(ids[start:], tools).reasoning_content for start in starts)
        renderer = self._renderer if thinks or self._keeping is None else self._keeping
        try:
            bridged = renderer.bridge_to_next_turn(
                ids[: starts[-1]], ids[starts[-1] :], with_objects(new), tools=list(tools) or None
            )
        except Exception as error:
            raise self._refused(new, error) from error
        if bridged is None or bridged.token_ids[: len(ids)] != ids:
            return None
        return np.asarray(bridged.token_ids[len(ids) :], np.int32)

    def answer(
        self,
        messages: Sequence[Message],
        reply: Message,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> IntArray:
        """Return the target tokens of a reply, including the end token, [answer].

        Raises DataError if the format does not write it after `opening`.
        """
        conversation, (checked,) = checked_messages(messages), checked_messages([reply])
        shown = self._ids(conversation, tools)
        full = self._ids([*conversation, checked], tools, opens_turn=False)
        ends = [i for i in range(len(shown), len(full)) if full[i] in self.stop_token_ids]
        last = full[: ends[-1] + 1] if ends else [*full, *self._end_after(checked)]
        if full[: len(shown)] != shown or last == full[: len(shown)]:
            raise DataError(
                f"the chat format {self.name} does not write this answer as a continuation of the "
                "policy's turn. Give an answer with thinking if the format begins with it."
            )
        return np.asarray(last[len(shown) :], np.int32)

    def _end_after(self, reply: Message) -> list[int]:
        """Return the end token of a turn, in a format in which the next speaker's marker ends
        it."""
        calls = reply.get("tool_calls", ())
        answers: list[Message] = [
            {
                "role": "tool",
                "content": "3",
                "tool_call_id": call.get("id", ""),
                "name": call["function"]["name"],
            }
            for call in calls
        ]
        turns = [QUESTION, reply]
        before = self._ids(turns, (), opens_turn=False)
        after = self._ids([*turns, *(answers or [QUESTION])], (), opens_turn=False)
        ends = [i for i in after[len(before) :] if i in self.stop_token_ids]
        return ends[:1]

    def _ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        *,
        opens_turn: bool = True,
    ) -> list[int]:
        written = with_objects(messages)
        if not self._knows_reasoning:
            written = [with_thinking_in_content(message) for message in written]
        try:
            ids = self._renderer.render_ids(
                written, tools=list(tools) or None, add_generation_prompt=opens_turn
            )
        except Exception as error:
            raise self._refused(messages, error) from error
        return [int(i) for i in ids]

    def _refused(self, messages: Sequence[Message], error: Exception) -> DataError:
        roles = ", ".join(dict.fromkeys(str(m["role"]) for m in messages))
        reason = f"{type(error).__name__}: {in_a_line(error)}"
        return DataError(
            f"the chat format {self.name} cannot write {len(messages)} messages of {roles}: "
            f"{reason}. Give messages that it can write, or another data.chat_format."
        )

    def _parse(self, ids: list[int], tools: Sequence[Mapping[str, object]]) -> Any:
        """Parse a turn. A turn with JSON that Python does not read, as it is nested too deep or
        has a number of too many digits, is one malformed call."""
        listed = list(tools) or None
        try:
            return self._renderer.parse_response(ids, tools=listed, prompt_ids=self._opened)
        except (ValueError, RecursionError) as error:
            base, text = _package("base"), self._tokenizer.decode_all(ids)
            status = base.ToolCallParseStatus.INVALID_JSON
            log.info("a turn of the policy cannot be parsed: %s", in_a_line(error))
            return base.ParsedResponse("", tool_calls=[base.ParsedToolCall(text, status=status)])

    def _text_of(self, call: Any, ids: list[int]) -> str:
        """Return the text of a tool call, including its marks if their position is known."""
        if call.token_span is None:
            return str(call.raw)
        start, end = call.token_span
        return self._tokenizer.decode_all(ids[start:end])

    def _turn_starts(self, ids: list[int]) -> list[int]:
        """Return the start positions of the policy's turns in a sequence."""
        header = self._header
        indices = range(len(ids) - len(header) + 1) if header else ()
        return [i + len(header) for i in indices if ids[i : i + len(header)] == header]


def _is_call(call: Any) -> bool:
    """Return True if a parsed tool call has a name and an object as arguments."""
    return call.status.value in WELL_FORMED and _arguments(call) is not None


def _arguments(call: Any) -> Mapping[str, Any] | None:
    """Return the arguments of a parsed tool call; None if they are not an object. Those with
    numbers that the package reads as infinite are read again."""
    arguments = arguments_object(call.arguments or {})
    reread = read_call(call.raw) if arguments is None else ""
    return arguments if isinstance(reread, str) else reread[1]


def _reason(call: Any) -> str:
    status = str(call.status.value)
    return "its arguments are no JSON object" if status in WELL_FORMED else status.replace("_", " ")


def matches_template(tokenizer: Tokenizer, name: str) -> bool:
    """Return True if a renderer's output matches the tokenizer's own chat template.

    Both are compared on conversations that they can write, with the renderer's own arguments.
    """
    try:
        renderer = _make(tokenizer, name, {}, None)
    except ConfigError:
        return False
    fields = sorted(type(renderer.config).template_field_names())
    arguments = {f: v for f in fields if (v := getattr(renderer.config, f)) is not None}
    compared = 0
    for messages, tools in _conversations():
        try:
            text = tokenizer.chat_text(with_objects(messages), tools, arguments=arguments)
            expected = [int(i) for i in tokenizer.encode(text)]
            ids = renderer.render_ids(
                with_objects(messages), tools=list(tools) or None, add_generation_prompt=True
            )
        except Exception as error:
            log.debug("chat format %s: one of the two refuses a conversation: %s", name, error)
            continue
        if ids != expected:
            return False
        compared += 1
    return compared > 0


def _conversations() -> list[tuple[list[Message], tuple[Mapping[str, Any], ...]]]:
    """Return conversations that distinguish formats: system prompts, tools, thinking, turns."""
    system: Message = {"role": "system", "content": "Be brief."}
    calling: Message = {"role": "assistant", "content": "", **CALLING}
    answered: Message = {
        "role": "tool",
        "content": "3",
        "tool_call_id": "call00001",
        "name": "add",
    }
    thinking: Message = {"role": "assistant", "content": "3", "reasoning_content": "1 and 2"}
    plain: Message = {"role": "assistant", "content": "3"}
    return [
        ([QUESTION], ()),
        ([system, QUESTION], ()),
        ([system, QUESTION], (TOOL,)),
        ([QUESTION, plain, QUESTION], ()),
        ([QUESTION, thinking, QUESTION], ()),
        ([system, QUESTION, calling, answered], (TOOL,)),
        ([QUESTION, calling, answered, plain, QUESTION], (TOOL,)),
    ]

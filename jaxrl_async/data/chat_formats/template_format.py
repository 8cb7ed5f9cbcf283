"""A ports.ChatFormat over the tokenizer's own chat template.

    stand-in      u: -  a: Zqsaid        render the template around a recognizable assistant
    tail                       <end> t: 3 <end> a:      turn; the text after its end is
    sequence    u: 1+2? a: [sampled] + tail             appended to the sampled tokens

A template is used to continue a sequence only if it does not rewrite earlier text. To check this, a
stand-in conversation is rendered up to the policy's turn, and again with this turn and the
following messages. The second text must begin with the first one and contain the turn's thinking;
otherwise `continuation` returns None.
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxrl_async.data.chat_formats.chat_messages import (
    checked_messages,
    checked_tools,
    json_text,
    with_objects,
)
from jaxrl_async.data.chat_formats.written_turn import (
    CALL,
    CALLED,
    THINK,
    THOUGHT,
    assistant_message,
    mark_tokens,
    read_turn,
    with_thinking_in_content,
)
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError
from jaxrl_async.ports.rollout import TurnMarks
from jaxrl_async.types import IntArray, Message

log = logging.getLogger(__name__)

QUESTION, REPLY, THOUGHT_OF, CALLED_WITH = "zqasked", "zqsaid", "zqthought", "zqcalled"
"""Words of the stand-in conversation; letters only, so no template changes them."""
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "tokenize")
"""Variables of a template that are not arguments of a conversation's format."""
STAND_IN_NAME = "zqtool"
STAND_IN_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": STAND_IN_NAME,
        "description": STAND_IN_NAME,
        "parameters": {"type": "object", "properties": {"zqx": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Border:
    """A type of boundary between the policy's turn and the next one."""

    role: str  # user if a user message follows, else the role of the first message
    thinks: bool  # the policy's turns of this context have thinking
    has_tools: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """A template's start and end of the policy's turns."""

    header: str = ""  # text at the start of the policy's turn
    opens_thinking: bool = False  # the header also opens the reasoning
    lead: tuple[Message, ...] = ()  # messages of a stand-in conversation
    ends: tuple[tuple[int, str], ...] = ()  # end tokens: id, text; its own first
    calls: Literal["marked", "bare", "none", "other"] = "marked"  # its form of tool calls


class TemplateFormat:
    """The tokenizer's own chat template. Thread-safe.

    Tool calls are read as JSON between <tool_call> and </tool_call> (Hermes' form), or as a whole
    turn in JSON if the template writes them like this. If the template has no field for reasoning
    or tool calls of earlier turns, they are written into the text in Hermes' form. White space that
    the template would strip from a turn is kept as sampled. Text in messages that is spelled like a
    special token becomes one, as in transformers' apply_chat_template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        keeps_thinking: bool = False,
    ) -> None:
        """Detect how the template begins and ends turns, and where it rewrites earlier turns.

        Args:
            tokenizer: encodes the template's text.
            template: Jinja text; None: the tokenizer's own.
            arguments: further variables of the template, such as enable_thinking.
            keeps_thinking: continue sequences even where the template would rewrite them.

        Raises:
            DataError: the template cannot render a single question.
        """
        self._tokenizer, self._template = tokenizer, template
        self._arguments, self._keeps = dict(arguments or {}), keeps_thinking
        self._knows_reasoning = True
        self._added = tokenizer.added_tokens
        marks = mark_tokens(self._added).values()
        self._dropped = {i for i, (_, special) in self._added.items() if special} - set(marks)
        self._turns = _Turns()
        self._knows_reasoning = self._learn_reasoning()
        self._turns = self._learn_turns()
        self._shows_tools = self._learn_tools()
        self.rewrites: frozenset[Border] = frozenset() if keeps_thinking else self._learn_borders()

    @property
    def marks(self) -> TurnMarks:
        """How the template writes the policy's turn; see ports.ChatFormat."""
        turns = self._turns
        thinks = self._knows_reasoning and THOUGHT not in turns.header
        return TurnMarks(
            calls=turns.calls if turns.calls in ("bare", "other") else "hermes",
            thinking="open" if turns.opens_thinking else "may" if thinks else "",
            texts=(THINK, THOUGHT) if turns.calls == "bare" else (THINK, THOUGHT, CALL),
            tokens=mark_tokens(self._added),
        )

    def takes(self, argument: str) -> bool:
        """Return True if the template reads this variable; see ports.ChatFormat."""
        template = self._template or str(self._tokenizer.hf.chat_template)
        named = re.search(rf"(?<![\w.'\"]){re.escape(argument)}\b", template)
        return argument not in OWN_VARIABLES and named is not None

    def with_arguments(self, arguments: Mapping[str, object]) -> "TemplateFormat":
        """Return the template with other values of its variables; see ports.ChatFormat."""
        return TemplateFormat(
            self._tokenizer,
            template=self._template,
            arguments={**self._arguments, **arguments},
            keeps_thinking=self._keeps,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The template's own end-of-turn token, and the tokenizer's end tokens."""
        return tuple(token_id for token_id, _ in self._turns.ends)

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray:
        """Encode a conversation up to the start of the policy's turn; see ports.ChatFormat."""
        text = self._text(checked_messages(messages), checked_tools(tools))
        if tools and not self._shows_tools:
            self._shows_tools = True  # logged once
            log.warning("the chat template shows the policy no tools: describe them in the prompt")
        return self._tokenizer.encode(text)

    def message(self, token_ids: IntArray, tools: Sequence[Mapping[str, object]]) -> Message:
        """Parse a generated turn; see ports.ChatFormat and written_turn.assistant_message."""
        length = len(token_ids)
        while length and token_ids[length - 1] in self.stop_token_ids:
            length -= 1
        ids = [i for i in token_ids[:length] if int(i) not in self._dropped]
        text = self._tokenizer.decode_all(ids)
        turns = self._turns
        turn = read_turn(text, is_thinking=turns.opens_thinking, bare_calls=turns.calls == "bare")
        return assistant_message(turn, np.asarray(token_ids))

    def continuation(
        self, before: IntArray, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray | None:
        """Return the tokens to append for the next turn, or None; see ports.ChatFormat.

        Also None if a turn ended with a token other than the template's own, if it was cut within
        its thinking, or if one of the messages is an assistant's.
        """
        new, tools = checked_messages(messages), checked_tools(tools)
        thinks, is_open = self._thinking(before)
        roles = [message["role"] for message in new]
        border = Border("user" if "user" in roles else roles[0], thinks, bool(tools))
        is_cut = is_open and not self._keeps
        if is_cut or "assistant" in roles or border in self.rewrites or not len(before):
            return None
        tail = self._tail(self._turns.lead, new, tools, thinks=thinks)
        if tail is None:
            return None
        ids, last = self._tokenizer.encode(tail), int(before[-1])
        if not len(ids) or int(ids[0]) not in self.stop_token_ids:
            return None
        if last == int(ids[0]):
            return ids[1:]
        return None if last in self.stop_token_ids else ids

    def answer(
        self,
        messages: Sequence[Message],
        reply: Message,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> IntArray:
        """Return the target tokens of a reply, including the end token, [answer].

        Plain text is encoded unchanged; thinking and tool calls as the template writes them. Raises
        DataError if it does not write them after `opening`.
        """
        (checked,) = checked_messages([reply])
        shown = self._text(checked_messages(messages), tools)
        text = checked["content"]
        if checked.keys() & {"reasoning_content", "tool_calls"}:
            full = self._text([*checked_messages(messages), checked], tools, opens_turn=False)
            if not full.startswith(shown):
                raise DataError(
                    "the chat template does not write this answer as a continuation of the "
                    "policy's turn. Give the answer without thinking and tool calls."
                )
            text = self._without_end(full[len(shown) :])
        ids = self._tokenizer.encode_after(shown, text)
        return np.concatenate([ids, np.asarray(self._trained_end(), np.int32)]).astype(np.int32)

    def _trained_end(self) -> tuple[int, ...]:
        """Return the end token to train on: the template's own if it ends all answers."""
        eos_ids = self._tokenizer.eos_ids
        own = self.stop_token_ids[:1]
        return own if not eos_ids or own[0] in eos_ids else eos_ids[:1]

    def _without_end(self, turn: str) -> str:
        """Return a turn's text up to its last end token."""
        end = max((turn.rfind(text) for _, text in self._turns.ends), default=-1)
        return turn if end < 0 else turn[:end]

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        *,
        opens_turn: bool = True,
    ) -> str:
        written = with_objects(messages)
        if self._turns.calls == "none":
            written = [_with_calls_in_content(message) for message in written]
        if not self._knows_reasoning:
            written = [with_thinking_in_content(message) for message in written]
        return self._tokenizer.chat_text(
            written,
            tools,
            opens_turn=opens_turn,
            template=self._template,
            arguments=self._arguments,
        )

    def _thinking(self, before: IntArray) -> tuple[bool, bool]:
        """Return whether the policy's turns in a sequence have thinking, and whether the last turn
        was cut within its thinking."""
        text, header = self._tokenizer.decode_all(before), self._turns.header
        turns = text.split(header)[1:] if header and header in text else [text]
        turns = [self._up_to_end(turn) for turn in turns]
        opens = self._turns.opens_thinking
        thinks = opens or any(THINK in turn or THOUGHT in turn for turn in turns)
        last = turns[-1].lstrip() if turns else ""
        is_open = (opens or last.startswith(THINK)) and THOUGHT not in last
        return thinks, is_open

    def _up_to_end(self, text: str) -> str:
        ends = [at for _, end in self._turns.ends if (at := text.find(end)) >= 0]
        return text[: min(ends, default=len(text))]

    # --- the stand-in conversation ---------------------------------------------------------------

    def _learn_reasoning(self) -> bool:
        """Return True if the template writes the reasoning field in some case."""
        user: Message = {"role": "user", "content": QUESTION}
        turns = [
            [user, _turn(0, thinks=True)],
            [user, _turn(1, thinks=True)],
            [user, _turn(1, thinks=True), *_replies(1)],
        ]
        for turn in turns:
            with contextlib.suppress(DataError):
                if THOUGHT_OF in self._text(turn, (), opens_turn=False):
                    return True
        return False

    def _learn_turns(self) -> _Turns:
        """Render one question and one answer, and detect the text around the answer."""
        user: Message = {"role": "user", "content": QUESTION}
        closed, opened = (self._text([user], (), opens_turn=opens) for opens in (False, True))
        header = opened.removeprefix(closed) if opened.startswith(closed) else ""
        system: Message = {"role": "system", "content": QUESTION}
        lead = (system, user) if self._writes([system, user]) else (user,)
        ends = list(self._tokenizer.eos_ids)
        with_answer = [*lead, _turn(0, thinks=False)]
        if self._writes(with_answer):
            rest = self._text(with_answer, (), opens_turn=False).partition(REPLY)[2]
            first = self._tokenizer.encode(rest)[:1]
            if len(first) and int(first[0]) in self._added:
                ends.insert(0, int(first[0]))
        texts = {end: self._tokenizer.decode_all([end]) for end in dict.fromkeys(ends)}
        return _Turns(
            header=header,
            opens_thinking=header.rstrip().endswith(THINK),
            lead=lead,
            ends=tuple((end, text) for end, text in texts.items() if text),
            calls=self._learn_calls(lead),
        )

    def _learn_calls(self, lead: Sequence[Message]) -> Literal["marked", "bare", "none", "other"]:
        """Render a turn with a tool call, and detect its form."""
        try:
            text = self._text([*lead, _turn(1, thinks=False)], (STAND_IN_TOOL,), opens_turn=False)
        except DataError:
            return "none"
        before, called, _ = text.partition(f"{CALLED_WITH}0z")
        if not called:
            return "none"
        turn = before[before.rfind(QUESTION) :]
        if CALL in turn:
            return "marked" if f'"name": "{STAND_IN_NAME}"' in turn else "other"
        if '"parameters"' in turn:
            return "bare"
        log.warning(
            "the chat template writes tool calls in an unsupported form; the policy's calls are "
            "read as JSON between %s and %s, unless data.chat_format is a renderer",
            CALL,
            CALLED,
        )
        return "other"

    def _learn_tools(self) -> bool:
        try:
            return STAND_IN_NAME in self._text(self._turns.lead, (STAND_IN_TOOL,))
        except DataError:
            return False

    def _learn_borders(self) -> frozenset[Border]:
        """Return the borders at which the template rewrites any of several conversations."""
        borders = [
            Border(role, thinks, has_tools)
            for role in ("user", "tool")
            for thinks in (False, True)
            if thinks or not self._turns.opens_thinking
            for has_tools in (False, True)
        ]
        rewritten = frozenset(border for border in borders if not self._is_stable(border))
        if rewritten:
            log.info(
                "the chat template rewrites earlier turns before %s: a new context begins there",
                "; ".join(sorted({_border_text(border) for border in rewritten})),
            )
        return rewritten

    def _is_stable(self, border: Border) -> bool:
        """Return True if the template does not rewrite any conversation that it can write."""
        tools = (STAND_IN_TOOL,) if border.has_tools else ()
        for lead in _leads(self._turns.lead, thinks=border.thinks):
            for new in _next_messages(border.role):
                conversation = [*lead, _turn(_num_calls(new), thinks=border.thinks), *new]
                if self._writes(conversation, tools) and not self._tail(
                    lead, new, tools, thinks=border.thinks
                ):
                    return False
        return True

    def _writes(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
    ) -> bool:
        try:
            self._text(messages, tools)
        except DataError:
            return False
        return True

    def _tail(
        self,
        lead: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        *,
        thinks: bool,
    ) -> str | None:
        """Return the text from the end of the policy's turn on, after a stand-in conversation.

        None: the template rewrites earlier text. Raises DataError if it cannot write the
        conversation.
        """
        num_calls = _num_calls(new)
        if num_calls > 1 and not self._writes([*lead, _turn(num_calls, thinks=thinks), *new]):
            num_calls = 1  # for a template that writes only one call per turn
        turn = _turn(num_calls, thinks=thinks, answered=new)
        begun, full = self._text(lead, tools), self._text([*lead, turn, *new], tools)
        mark = f"{CALLED_WITH}{num_calls - 1}z" if num_calls else REPLY
        start = len(begun) if full.startswith(begun) else -1
        if start < 0 and not self._keeps:
            return None
        at = full.find(mark, max(start, 0))
        keeps_thought = not thinks or self._keeps or THOUGHT_OF in full[start:at]
        ends = [i for _, end in self._turns.ends if (i := full.find(end, at)) >= 0]
        return full[min(ends) :] if at >= 0 and keeps_thought and ends else None


def _turn(num_calls: int, *, thinks: bool, answered: Sequence[Message] = ()) -> dict[str, Any]:
    """Return the stand-in for the policy's turn, with the calls that the tools answer."""
    message: dict[str, Any] = {"role": "assistant", "content": REPLY}
    if thinks:
        message["reasoning_content"] = THOUGHT_OF
    replies = [m for m in answered if m["role"] == "tool"]
    if num_calls:
        message["tool_calls"] = [
            {
                "id": (replies[i] if replies else {}).get("tool_call_id", f"zqcall{i:03}"),
                "type": "function",
                "function": {
                    "name": (replies[i] if replies else {}).get("name", STAND_IN_NAME),
                    "arguments": f'{{"zqx": "{CALLED_WITH}{i}z"}}',
                },
            }
            for i in range(num_calls)
        ]
    return message


def _num_calls(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "tool" for message in messages)


def _replies(count: int) -> list[Message]:
    return [
        {"role": "tool", "content": "3", "tool_call_id": f"zqcall{i:03}", "name": STAND_IN_NAME}
        for i in range(count)
    ]


def _next_messages(role: str) -> Iterator[list[Message]]:
    """Yield possible messages after the policy's turn."""
    if role == "user":
        yield [{"role": "user", "content": QUESTION}]
    else:
        yield _replies(1)
        yield _replies(2)


def _leads(lead: Sequence[Message], *, thinks: bool) -> Iterator[list[Message]]:
    """Yield conversations before the policy's turn: with and without a system prompt, with earlier
    turns, with tool calls."""
    user: Message = {"role": "user", "content": QUESTION}
    yield list(lead)
    yield [user]
    yield [*lead, _turn(0, thinks=thinks), user]
    yield [*lead, _turn(1, thinks=thinks), *_replies(1)]
    yield [*lead, _turn(2, thinks=thinks), *_replies(2)]
    yield [*lead, _turn(1, thinks=thinks), *_replies(1), _turn(0, thinks=thinks), user]


def _border_text(border: Border) -> str:
    thinking = " after thinking" if border.thinks else ""
    return f"{border.role} messages{thinking}{' with tools' if border.has_tools else ''}"


def _with_calls_in_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write tool calls into the content, for templates without a field for them."""
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [
        f"{CALL}\n{json_text({k: call[k] for k in ('name', 'arguments')})}\n{CALLED}"
        for call in calls
    ]
    if written:
        rest["content"] = "\n".join([*filter(None, [message["content"]]), *written])
    return rest

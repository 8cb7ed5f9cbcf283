"""Parse a generated turn into reasoning, text and tool calls, in Hermes' form or as bare JSON.

<think>
reasoning
</think>

text
<tool_call>
{"name": "calculator", "arguments": {"expression": "1 + 2"}}
</tool_call>

{"name": "calculator", "parameters": {"expression": "1 + 2"}}      a whole turn, as in Llama 3
"""

import contextlib
import hashlib
import json
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.data.chat_formats.chat_messages import arguments_object, json_text, parsed_json
from jaxrl_async.types import IntArray

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
BARE_CALL = re.compile(r'\s*\{\s*"name"\s*:')
"""Start of a turn that is a single call."""
CALL_ID_LENGTH, CALL_ID_DIGITS = 9, string.digits + string.ascii_letters
"""The form of a call's id that every template accepts; with 54 bits, ids do not repeat."""
MAX_CALLS = 64
"""Maximum number of tool calls in one turn; more are an error."""
WHOLE = json.JSONDecoder(parse_int=float)
"""Finds the end of a call's JSON; int() would refuse long numbers."""


def mark_tokens(added: Mapping[int, tuple[str, bool]]) -> dict[str, int]:
    """Return the id of each mark that is one of the tokens added to a tokenizer (its
    added_tokens)."""
    marks = (THINK, THOUGHT, CALL, CALLED)
    return {text: i for i, (text, _) in added.items() if text in marks}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """A malformed tool call."""

    text: str  # as generated, including marks; it also stays in the message's content
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTurn:
    """A parsed turn of the policy."""

    content: str
    reasoning: str | None = None  # None: the turn has no thinking
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # name and arguments
    call_ids: tuple[str | None, ...] = ()  # if the format writes ids; () or one per call
    errors: tuple[CallError, ...] = ()


def read_turn(text: str, *, is_thinking: bool, bare_calls: bool = False) -> WrittenTurn:
    """Parse a turn.

    Args:
        text: without its end token.
        is_thinking: the prompt has already opened the reasoning.
        bare_calls: a call is a whole turn in JSON; otherwise calls are between marks.
    """
    reasoning, rest = split_thinking(text, is_thinking=is_thinking)
    if bare_calls:
        return _read_bare(rest, reasoning)
    pieces, calls, errors = [], [], []
    for piece in _pieces(rest):
        if isinstance(piece, str):
            pieces.append(piece)
        elif isinstance(piece, CallError):
            pieces.append(piece.text)
            errors.append(piece)
        else:
            calls.append(piece)
    content = "".join(pieces)
    return WrittenTurn(
        content=content.strip() if calls else content,
        reasoning=reasoning,
        calls=tuple(calls),
        errors=tuple(errors),
    )


def _read_bare(text: str, reasoning: str | None) -> WrittenTurn:
    """Parse a turn that is a single call or text."""
    call = read_call(text) if BARE_CALL.match(text) else ""
    if not isinstance(call, str):
        return WrittenTurn(content="", reasoning=reasoning, calls=(call,))
    errors = (CallError(text=text, reason=call),) if call else ()
    return WrittenTurn(content=text, reasoning=reasoning, errors=errors)


def split_thinking(
    text: str, *, is_thinking: bool = False, reads_calls: bool = True
) -> tuple[str | None, str]:
    """Return the reasoning, or None, and the text after it.

    Thinking without its end mark extends to the first tool call, if these are read, or to the end.
    """
    begun = text.lstrip().startswith(THINK)
    if not begun and not is_thinking:
        return None, text
    inner = text.lstrip().removeprefix(THINK) if begun else text
    reasoning, mark, rest = inner.partition(THOUGHT)
    if not mark and reads_calls:
        reasoning, mark, rest = inner.partition(CALL)
        rest = mark + rest
    return reasoning.strip("\n"), rest.lstrip("\n")


def _pieces(text: str) -> Iterator[str | CallError | tuple[str, Mapping[str, Any]]]:
    """Yield the text between tool calls, tool calls, and malformed tool calls."""
    for _ in range(MAX_CALLS):
        before, mark, inner = text.partition(CALL)
        yield before
        if not mark:
            return
        body, end, text = _up_to_end(inner)
        if not end:
            yield CallError(text=mark + inner, reason=f"{CALL} without {CALLED}")
            return
        call = read_call(body)
        yield CallError(text=mark + body + end, reason=call) if isinstance(call, str) else call
    if CALL in text:
        yield CallError(text=text, reason=f"more than {MAX_CALLS} calls in one turn")
    else:
        yield text


def _up_to_end(inner: str) -> tuple[str, str, str]:
    """Split what follows the mark of a call: its body, the mark of its end, the rest. A string in
    the body's JSON may contain the mark."""
    start = len(inner) - len(inner.lstrip())
    with contextlib.suppress(ValueError, RecursionError):
        _, stop = WHOLE.raw_decode(inner, start)
        rest = inner[stop:].lstrip()
        if rest.startswith(CALLED):
            return inner[: len(inner) - len(rest)], CALLED, rest.removeprefix(CALLED)
    return inner.partition(CALLED)


def read_call(body: str) -> tuple[str, Mapping[str, Any]] | str:
    """Return the name and the arguments of a call in JSON, or the problem."""
    try:
        call = parsed_json(body)
    except RecursionError:
        return "not JSON: nested too deep"
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(call, dict):
        return "not a JSON object with name and arguments"
    if arguments_object(call) is None:
        return "NaN, Infinity or half a surrogate pair"
    name, raw = call.get("name"), call.get("arguments", call.get("parameters", {}))
    arguments = arguments_object(raw)
    if not isinstance(name, str) or not name:
        return "it has no name"
    return "its arguments are no JSON object" if arguments is None else (name, arguments)


def assistant_message(turn: WrittenTurn, token_ids: IntArray) -> dict[str, Any]:
    """Return a turn as an assistant's message.

    `tool_call_errors`, a list of {"text", "reason"}, lists malformed calls. Calls without an id get
    one that depends only on the turn's tokens and the call's position: nine letters and digits,
    which every template accepts.
    """
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        ids = turn.call_ids or (None,) * len(turn.calls)
        message["tool_calls"] = [
            {
                "id": own or call_id(token_ids, i),
                "type": "function",
                "function": {"name": name, "arguments": json_text(arguments)},
            }
            for i, (own, (name, arguments)) in enumerate(zip(ids, turn.calls, strict=True))
        ]
    if turn.errors:
        message["tool_call_errors"] = [{"text": e.text, "reason": e.reason} for e in turn.errors]
    return message


def call_id(token_ids: IntArray, index: int, extra: bytes = b"") -> str:
    """Return an id for a tool call: nine letters and digits.

    Args:
        token_ids: the turn's tokens, [sampled] int32.
        index: the call's position in the turn.
        extra: what else the id depends on, such as the tokens before the turn.
    """
    content = extra + token_ids.astype("<i4").tobytes() + index.to_bytes(4, "little")
    number = int.from_bytes(hashlib.blake2s(content).digest(), "little")
    digits = ""
    for _ in range(CALL_ID_LENGTH):
        number, digit = divmod(number, len(CALL_ID_DIGITS))
        digits += CALL_ID_DIGITS[digit]
    return digits


def with_thinking_in_content(message: Mapping[str, object]) -> dict[str, Any]:
    """Write the reasoning into the content, for templates without a field for it."""
    rest = {k: v for k, v in message.items() if k != "reasoning_content"}
    if reasoning := message.get("reasoning_content"):
        rest["content"] = f"{THINK}\n{reasoning}\n{THOUGHT}\n\n{message['content']}"
    return rest

"""Random turns that a call's constraint allows are read back as the calls and the text that they
mean, in every chat format. Written values are found by the tokens of the marks, not by the
formats."""

import itertools
import json
import math
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from chat_tokenizers import QWEN3, QWEN_TOKENS, TEMPLATES, byte_tokenizer, fitted

from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.chat_formats import renderer_format
from jaxrl_async.endpoint.answer_constraint import ToolChoice, turn_constraint
from jaxrl_async.endpoint.chat_deltas import ChatDeltas
from jaxrl_async.endpoint.http_answers import ChatAnswer, text_after_marks, visible_turn
from jaxrl_async.sampler.grammar import Grammars, unpacked_bits
from jaxrl_async.types import Constraint, LogitShaping, Request

pytestmark = pytest.mark.full
TOKENS_OF_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SPELLED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
ITEM = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 40},
        "price": {"type": "number"},
        "count": {"type": "integer"},
    },
    "required": ["item", "price"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "buy", "parameters": ITEM}},
    {"type": "function", "function": {"name": "größe_2"}},
]
TEXTS = (
    Constraint.schema(ITEM),
    Constraint(kind="regex", text=r" ?[<>/a-z_ ]{0,30}\n?"),
    Constraint.choice([" yes ", "<tool_call>{}</tool_call>", "a/b"]),
)
BARE_RENDERERS = ("qwen3", "prime-qwen3", "glm-4.5", "qwen3.5", "llama-3")


def formats() -> list[tuple[str, str]]:
    return [*((name, "template") for name in TEMPLATES if name != "characters"),
            ("no tokens", "template"), *(("fitted", name) for name in BARE_RENDERERS)]  # fmt: skip


def made(name: str, setting: str) -> tuple[Any, Any]:
    if name == "fitted":
        if not renderer_format.is_installed():
            pytest.skip("the extra [chat] is missing")
        return fitted(lambda tokenizer: chat_format(tokenizer, None, setting))
    if name == "no tokens":  # marks are text of ordinary tokens
        tokenizer = byte_tokenizer(QWEN3, tokens=(*QWEN_TOKENS, "<|other|>"))
        assert not chat_format(tokenizer, None, setting).marks.tokens
        return tokenizer, chat_format(tokenizer, None, setting)
    tokenizer = TEMPLATES[name]()
    return tokenizer, chat_format(tokenizer, None, setting)


class Walk:
    """Draws tokens that a constraint allows: now and then what ends something, now and then what
    spells a mark."""

    def __init__(self, tokenizer: Any, chat: Any) -> None:
        self.random, self.tokenizer = np.random.default_rng(0), tokenizer
        self.grammars = Grammars(tokenizer, tokenizer.vocab_size)
        self.stops = tuple(chat.stop_token_ids)
        ids = [i for i, (text, _) in tokenizer.added_tokens.items() if text in TOKENS_OF_MARKS]
        ends = [int(tokenizer.encode(text)[0]) for text in ('"', "}", ".", "e", "9", "<")]
        self.likely = {*ids, *self.stops, *ends}

    def turn(self, constraint: Constraint, longest: int = 700) -> np.ndarray | None:
        """A whole turn, with its stop token; None: it is longer."""
        request = Request(
            request_id="w",
            token_ids=np.array([1], np.int32),
            max_new_tokens=longest,
            stop_token_ids=self.stops,
            shaping=LogitShaping(constraint=constraint),
        )
        self.grammars.check(request)
        matching, ids, spelling = self.grammars.matching(request, []), list[int](), list[int]()
        while len(ids) < longest:
            matching.force()
            (mask,) = matching.masks_of(1)
            allowed = np.flatnonzero(unpacked_bits(mask))
            if not spelling and self.random.random() < 0.03:
                text = SPELLED[self.random.integers(len(SPELLED))]
                spelling = [int(i) for c in text for i in self.tokenizer.encode(c)]
            token = spelling.pop(0) if spelling else -1
            if token not in allowed:
                spelling = []
                some = [t for t in allowed.tolist() if t in self.likely]
                pool = some if some and self.random.random() < 0.3 else allowed
                token = int(pool[self.random.integers(len(pool))])
            ids.append(token)
            matching.take([token])
            if token in self.stops:
                return np.asarray(ids, np.int32)
        return None


def finite(value: Any) -> Any:
    """A value with numbers of float64: JSON has no others."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(1.7976931348623157e308, value)
    return value


def meant(walk: Walk, marks: Any, ids: list[int], tools: Any) -> tuple[list[tuple[str, Any]], str]:
    """The calls and the text that a turn's tokens mean."""
    whole = walk.tokenizer.decode_all(ids)
    if marks.thinking:
        end = marks.tokens.get("</think>")
        if end in ids:
            ids = ids[ids.index(end) + 1 :]
            whole = walk.tokenizer.decode_all(ids).lstrip("\n")
        elif end is None and (marks.thinking == "open" or whole.startswith("<think>")):
            whole = whole.partition("</think>")[2].lstrip("\n")
    begin, end = (marks.tokens.get(mark) for mark in TOKENS_OF_MARKS[2:])
    bodies = []
    if not tools:
        return [], whole
    if marks.calls == "bare":
        bodies = [whole] if re.match(r'\{\s*"name"', whole) else []
    elif begin is None:
        while whole.startswith("<tool_call>"):
            _, stop = json.JSONDecoder().raw_decode(whole, len("<tool_call>\n"))
            bodies.append(whole[len("<tool_call>\n") : stop])
            whole = re.sub(r"\A\n</tool_call>\n?", "", whole[stop:])
    else:
        while begin in ids:
            ids = ids[ids.index(begin) + 1 :]
            bodies.append(walk.tokenizer.decode_all(ids[: ids.index(end)]))
    calls = []
    for body in bodies:
        call = finite(json.loads(body))
        calls.append((call["name"], call.get("arguments", call.get("parameters"))))
    return calls, "" if calls else whole


@pytest.mark.parametrize(("name", "setting"), formats())
def test_a_turn_is_read_back_as_what_its_constraint_allowed(name, setting):
    tokenizer, chat = made(name, setting)
    marks, done, called, walk = chat.marks, 0, 0, Walk(tokenizer, chat)
    if marks.thinking == "other":
        pytest.skip("such a format is refused")
    for number in range(48):
        text = TEXTS[number % len(TEXTS)] if number % 4 else None
        tools = TOOLS if marks.calls != "other" and (text is None or number % 3) else []
        if text is None and not tools:
            continue
        choice = ToolChoice(mode="required" if text is None else "auto", parallel=number % 2 == 0)
        constraint = turn_constraint(text, tools, choice, marks)
        ids = walk.turn(constraint)
        if ids is None:
            continue
        done += 1
        calls, content = meant(walk, marks, ids[:-1].tolist(), tools)
        names = {tool["function"]["name"] for tool in tools} or None
        text_of = text_after_marks(tokenizer.decode(ids[:-1]), ids, marks)
        shown = visible_turn(chat.message(ids, tools), text_of, tools=names, exact=text is not None)
        found = [
            (c["function"]["name"], json.loads(c["function"]["arguments"]))
            for c in shown.get("tool_calls", ())
        ]
        assert found == calls, (number, tokenizer.decode_all(ids))
        assert shown["content"] == content, (number, tokenizer.decode_all(ids))
        called += len(calls)
        for tool, arguments in calls:
            jsonschema.validate(arguments, ITEM if tool == "buy" else {"type": "object"})
    assert done >= 24, done
    assert called or marks.calls == "other"


@pytest.mark.parametrize("name", BARE_RENDERERS)
def test_the_parts_of_a_streamed_reasoning_are_the_finished_one(name):
    tokenizer, chat = made("fitted", name)
    added = {text: i for i, (text, _) in tokenizer.added_tokens.items()}
    parts = [] if chat.marks.thinking == "open" else ["<think>"]
    parts += ["\n", " why", "\t", " so", "\n", "</think>", "\n\n", "1", " 2"]
    ids = [i for p in parts for i in ([added[p]] if p in added else tokenizer.encode(p))]
    turns = [np.asarray(ids[:count], np.int32) for count in range(1, len(ids) + 1)]
    deltas, reasoning, content = ChatDeltas(reads_tools=False, marks=chat.marks), "", ""
    whole = chat.message(turns[-1], ())
    answer = ChatAnswer(
        answer=None, content=whole["content"], reasoning=whole.get("reasoning_content")
    )
    given = [deltas.grow(chat.message(turn, ()), 0) for turn in turns[:-1]]
    for delta in (*itertools.chain(*given), *deltas.end(answer)):
        reasoning, content = reasoning + delta.reasoning, content + delta.content
    assert "why" in reasoning + content
    assert (reasoning, content) == (answer.reasoning or "", answer.content)

"""What an answer must match, from a call's fields to a constraint of the sampler. Pure.

response_format, structured_outputs, guided_*  ─> Constraint of the text ─┐
tool_choice, tools                             ─> form of the calls       ├─> of the whole turn
chat format                                    ─> TurnMarks               ┘
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_async.data.chat_formats.written_turn import CALL, CALLED, MAX_CALLS, THINK, THOUGHT
from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.ports.rollout import TurnMarks
from jaxrl_async.sampler.grammar import with_spaces
from jaxrl_async.types import Constraint

JSON_OBJECT = Constraint(kind="json_object")
GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""vLLM's older fields, with their names in structured_outputs."""
_BEGUN = r"\/(t(h(i(nk?)?)?)?)?"
"""What may follow "<" in "</think>", without its end."""
_OTHER = r"([^<\/]|\/([^<t]|t([^<h]|h([^<i]|i([^<n]|n([^<k]|k[^<>]))))))"
"""What follows "<" and is not a part of "</think>", up to the first other letter."""
_INNER = rf"([^<]|(<+{_BEGUN})*<+{_OTHER})*(<+{_BEGUN})*"
"""A reasoning without the mark of its end, and without the "<" before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools the answer to a call may, or must, call."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()  # only these may be called; (): all
    parallel: bool = True  # False: only the first call is kept


ANY_TOOL = ToolChoice()
"""The choice of a call that makes none."""

# ---- the text


def constraint_of(fields: BodyFields) -> tuple[str | None, Constraint | None]:
    """Return what the text of an answer must match, from OpenAI's and vLLM's fields, after the name
    of its field. Raises CallRefused."""
    inner = fields.inner("structured_outputs", {})
    constraints = [
        ("response_format", format_constraint(fields, "response_format", "json_schema")),
        *(("structured_outputs", _structured(inner, name, name)) for name in GUIDED.values()),
        *((field, _structured(fields, field, name)) for field, name in GUIDED.items()),
    ]
    inner.close(
        frozenset({"disable_any_whitespace", "whitespace_pattern", "_backend"}),
        {"disable_additional_properties": (False,), "disable_fallback": (False,)},
    )
    present = [(field, constraint) for field, constraint in constraints if constraint is not None]
    if len(present) > 1:
        raise CallRefused(
            "only one of response_format, structured_outputs and guided_* may be given",
            field="response_format",
        )
    return present[0] if present else (None, None)


def format_constraint(
    fields: BodyFields, field: str, within: str | None = None
) -> Constraint | None:
    """Return the constraint of a format with a `type`. Raises CallRefused.

    Args:
        fields: the body, or a part of it.
        field: name of the format.
        within: name of the object that has the schema; None: the format itself.
    """
    if fields.value(field) is None:
        return None
    form = fields.inner(field)
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        form.refuse("type", "'text', 'json_object' or 'json_schema'")
    if kind != "json_schema":
        return JSON_OBJECT if kind == "json_object" else None
    return _json_schema(form if within is None else form.inner(within), "schema")


def _structured(fields: BodyFields, field: str, name: str) -> Constraint | None:
    """Return the constraint of one field of structured_outputs. Raises CallRefused."""
    if name == "json":
        return None if fields.value(field) is None else _json_schema(fields, field)
    if name == "json_object":
        return JSON_OBJECT if fields.flag(field) else None
    if name == "choice":
        texts = fields.rows(field, 2**16)
        if any(not isinstance(text, str) for text in texts):
            fields.refuse(field, "a list of texts")
        return Constraint(kind="choice", text=json.dumps(texts)) if texts else None
    text = fields.text(field)
    if text is None:
        return None
    return Constraint(kind="regex" if name == "regex" else "lark", text=text)


def _json_schema(fields: BodyFields, field: str) -> Constraint:
    schema = fields.value(field)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            fields.refuse(field, "a JSON schema")
    if not isinstance(schema, dict | bool):
        fields.refuse(field, "a JSON schema")
    return Constraint(kind="json_schema", text=json.dumps(schema))


# ---- tools


def openai_tool_choice(fields: BodyFields, tools: Sequence[Mapping[str, object]]) -> ToolChoice:
    """Return the choice of tools in the form of chat completions and of responses. Raises
    CallRefused for tools that are not given.

    Args:
        fields: the body.
        tools: the call's tools, in OpenAI's form.
    """
    parallel, value = fields.flag("parallel_tool_calls", True), fields.value("tool_choice")
    if value is None or value in ("auto", "none", "required"):
        return _checked_choice(fields, tools, value or "auto", (), parallel)
    if not isinstance(value, dict):
        fields.refuse("tool_choice", "'auto', 'none', 'required' or an object that names a tool")
    choice = fields.inner("tool_choice")
    if choice.choice("type", ("function", "allowed_tools")) == "allowed_tools":
        inner = value.get("allowed_tools") or value
        allowed = BodyFields(inner, choice.name("allowed_tools"))
        mode = allowed.choice("mode", ("auto", "required")) or "auto"
        named = [_tool_name(t, allowed.name("tools")) for t in allowed.rows("tools", 2**16)]
        return _checked_choice(fields, tools, mode, named, parallel)
    return _checked_choice(fields, tools, "required", [_tool_name(value, choice.name(""))], False)


def anthropic_tool_choice(fields: BodyFields, tools: Sequence[Mapping[str, object]]) -> ToolChoice:
    """Return the choice of tools in Anthropic's form; arguments and errors as for OpenAI's."""
    choice = fields.inner("tool_choice", {})
    kind = choice.choice("type", ("auto", "any", "tool", "none")) or "auto"
    if fields.value("tool_choice") is not None and not choice.text("type"):
        choice.refuse("type", "'auto', 'any', 'tool' or 'none'")
    parallel = not choice.flag("disable_parallel_tool_use")
    named = [choice.needed_text("name")] if kind == "tool" else []
    choice.close()
    mode = "required" if kind in ("any", "tool") else kind
    return _checked_choice(fields, tools, mode, named, parallel)


def _tool_name(value: object, where: str) -> str:
    fields = BodyFields(value, where)
    inner = fields.value("function")
    return BodyFields(value if inner is None else inner, where).needed_text("name")


def _checked_choice(
    fields: BodyFields,
    tools: Sequence[Mapping[str, Any]],
    mode: Any,
    names: Sequence[str],
    parallel: bool,
) -> ToolChoice:
    known = {tool["function"]["name"] for tool in tools}
    missing = [name for name in names if name not in known]
    if missing or (mode == "required" and not tools):
        what = f"the tool {missing[0][:80]!r}" if missing else "a tool call"
        raise CallRefused(
            f"asks for {what}, but `tools` has {len(known)} tools"
            f"{': ' if known else ''}{', '.join(sorted(known))[:200]}",
            field=fields.name("tool_choice"),
        )
    return ToolChoice(mode=mode, names=tuple(names), parallel=parallel)


# ---- the whole turn


def turn_constraint(
    constraint: Constraint | None,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    marks: TurnMarks,
) -> Constraint | None:
    """Return what a whole turn must match: reasoning, then calls or the text; None: anything.

    A mark that is one token is allowed only where the turn has this mark, so formats that read
    tokens read a text that spells it as text. Formats that read text find the end of the reasoning
    and the start of calls by their spelling, so no other part of a turn may spell these.

    Args:
        constraint: of the text.
        tools: the call's tools; (): the turn has no calls.
        choice: which of them may or must be called.
        marks: how the chat format writes a turn; its calls have a known form if there are tools.

    Raises CallRefused for a grammar that cannot be a part of another one.
    """
    forced = choice.mode == "required"
    if constraint is None and not forced:
        return None
    if not tools and not marks.thinking:
        return constraint
    parts = [] if constraint is None or forced else list(_text_rules(constraint, tools, marks))
    forms = [("text", *parts)] if parts else []
    if tools:
        allowed = [t for t in tools if not choice.names or t["function"]["name"] in choice.names]
        is_json = bool(parts) and constraint is not None and constraint.kind.startswith("json")
        forms.append(("calls", *_call_rules(allowed, choice, marks, or_json=is_json)))
    lead = {"": "", "may": "think? ", "open": "rest "}[marks.thinking]
    lines = [f"start: {lead}({' | '.join(name for name, *_ in forms)})"]
    if marks.thinking == "may":
        lines.append(f"think: {_mark(THINK, marks)} rest")
    if marks.thinking:
        is_token = THOUGHT in marks.tokens
        end = rf"<*/ {_mark(THOUGHT, marks)} /\n+/?" if is_token else r"<+\/think>\n*/"
        lines.append(f"rest: /{_INNER}{end}")
    return Constraint(kind="turn", text="\n".join([*lines, *(r for _, *rs in forms for r in rs)]))


def _mark(text: str, marks: TurnMarks) -> str:
    """Return a mark in llguidance's Lark: its token, or its spelling."""
    return f"<[{marks.tokens[text]}]>" if text in marks.tokens else json.dumps(text)


def _text_rules(
    constraint: Constraint, tools: Sequence[Mapping[str, object]], marks: TurnMarks
) -> Iterator[str]:
    """Yield the rules of a text. Raises CallRefused."""
    match constraint.kind:
        case "json_object":
            yield _json_rule("text", {"type": "object"})
        case "json_schema":
            yield _json_rule("text", json.loads(constraint.text))
        case "regex" | "choice":
            lead = r"|\s*<think>(?s:.*)" if marks.thinking == "may" else ""
            call = r"|(?s:.*)<tool_call>(?s:.*)" if tools and marks.calls == "hermes" else ""
            excluded = f" & ~/{(lead + call)[1:]}/" if lead or call else ""
            yield "text: TEXT"
            yield f"TEXT: WANTED{excluded}"
            yield f"WANTED: {_terminal(constraint)}"
        case _:
            raise CallRefused(
                "a grammar cannot be combined with tools or with a chat template that opens the "
                "reasoning; give a JSON schema, a regex or a choice, or turn the thinking off "
                "(chat_template_kwargs)",
                field="structured_outputs.grammar",
            )


def _terminal(constraint: Constraint) -> str:
    """Return a pattern or a choice as a terminal of llguidance's Lark."""
    if constraint.kind == "choice":
        return " | ".join(json.dumps(text) for text in json.loads(constraint.text))
    escaped = re.sub(
        r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), constraint.text
    )
    return f"/{escaped}/"


def _json_rule(name: str, schema: object) -> str:
    return f"{name}: %json {json.dumps(with_spaces(schema))}"


def _call_rules(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, marks: TurnMarks, *, or_json: bool
) -> Iterator[str]:
    """Yield the rules of one or several calls, in Hermes' form or as a turn in bare JSON.

    or_json: the turn may also be a text in JSON. Bare calls then have JSON's grammar, too: the
    matcher takes the longest piece, and the beginning of a call as one piece would hide a text that
    begins with the same letters.
    """
    bare = marks.calls == "bare"
    several = choice.parallel and not bare
    yield f'calls: call ("\\n" call){{0,{MAX_CALLS - 1}}}' if several else "calls: call"
    names = " | ".join(f"call{i}" for i, _ in enumerate(tools))
    begin, end = _mark(CALL, marks), _mark(CALLED, marks)
    yield f"call: {names}" if bare else f'call: {begin} "\\n" ({names}) "\\n" {end}'
    key = "parameters" if bare else "arguments"
    for i, tool in enumerate(tools):
        function = tool["function"]
        arguments = function.get("parameters") or {"type": "object"}
        if bare and or_json:
            yield _json_rule(f"call{i}", _call_schema(function["name"], arguments))
            continue
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        yield f'call{i}: {json.dumps(head)} arguments{i} "}}"'
        yield _json_rule(f"arguments{i}", arguments)


def _call_schema(name: str, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the schema of a whole call in bare JSON."""
    own = {k: v for k, v in arguments.items() if k == "x-guidance"}  # is only read at the top
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": _with_moved_refs(arguments)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **own,
    }


def _with_moved_refs(schema: object) -> Any:
    """Return a schema's parts with references that find them within `_call_schema`."""
    if isinstance(schema, list):
        return [_with_moved_refs(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _with_moved_refs(part) for key, part in schema.items()}
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        moved["$ref"] = f"#/properties/parameters{ref[1:]}"
    return moved

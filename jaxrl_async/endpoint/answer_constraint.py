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

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.ports.rollout import TurnMarks
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
THINKING = rf"/([^<]|(<+{_BEGUN})*<+{_OTHER})*(<+{_BEGUN})*<+\/think>\n*/"
"""The rest of a turn's reasoning, in llguidance's Lark: anything up to the first mark of its end,
as the turn is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools the answer to a call may, or must, call."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()  # only these may be called; (): all
    parallel: bool = True  # False: only the first call is kept


ANY_TOOL = ToolChoice()
"""The choice of a call that makes none."""

# ---- the text


def constraint_of(fields: BodyFields) -> Constraint | None:
    """Return what the text of an answer must match, from OpenAI's and vLLM's fields. Raises
    CallRefused."""
    found = [format_constraint(fields, "response_format", "json_schema")]
    if (given := fields.value("structured_outputs")) is not None:
        inner = BodyFields(given, fields.name("structured_outputs"))
        found += [_structured(inner, name, name) for name in GUIDED.values()]
        inner.close(
            frozenset({"disable_any_whitespace", "whitespace_pattern", "_backend"}),
            {"disable_additional_properties": (False,), "disable_fallback": (False,)},
        )
    found += [_structured(fields, field, name) for field, name in GUIDED.items()]
    constraints = [constraint for constraint in found if constraint is not None]
    if len(constraints) > 1:
        raise CallRefused(
            "only one of response_format, structured_outputs and guided_* may be given",
            field="response_format",
        )
    return next(iter(constraints), None)


def format_constraint(
    fields: BodyFields, field: str, within: str | None = None
) -> Constraint | None:
    """Return the constraint of a format with a `type`. Raises CallRefused.

    Args:
        fields: the body, or a part of it.
        field: name of the format.
        within: name of the object that has the schema; None: the format itself.
    """
    value = fields.value(field)
    if value is None:
        return None
    form = BodyFields(value, fields.name(field))
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        form.refuse("type", "'text', 'json_object' or 'json_schema'")
    if kind != "json_schema":
        return JSON_OBJECT if kind == "json_object" else None
    inner = form if within is None else BodyFields(form.value(within), form.name(within))
    return _json_schema(inner, "schema")


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


def openai_tool_choice(fields: BodyFields, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
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
    choice = BodyFields(value, fields.name("tool_choice"))
    if choice.choice("type", ("function", "allowed_tools")) == "allowed_tools":
        inner = value.get("allowed_tools") or value
        allowed = BodyFields(inner, choice.name("allowed_tools"))
        mode = allowed.choice("mode", ("auto", "required")) or "auto"
        named = [_tool_name(t, allowed.name("tools")) for t in allowed.rows("tools", 2**16)]
        return _checked_choice(fields, tools, mode, named, parallel)
    return _checked_choice(fields, tools, "required", [_tool_name(value, choice.name(""))], False)


def anthropic_tool_choice(fields: BodyFields, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return the choice of tools in Anthropic's form; arguments and errors as for OpenAI's."""
    value = fields.value("tool_choice")
    choice = BodyFields({} if value is None else value, fields.name("tool_choice"))
    kind = choice.choice("type", ("auto", "any", "tool", "none")) or "auto"
    if value is not None and not choice.text("type"):
        choice.refuse("type", "'auto', 'any', 'tool' or 'none'")
    parallel = not choice.flag("disable_parallel_tool_use")
    named = [choice.needed_text("name")] if kind == "tool" else []
    choice.close()
    mode = "required" if kind in ("any", "tool") else kind
    return _checked_choice(fields, tools, mode, named, parallel)


def _tool_name(value: Any, where: str) -> str:
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
    parts = [] if constraint is None or forced else list(_text_rules(constraint))
    forms = [("text", *parts)] if parts else []
    if tools:
        allowed = [t for t in tools if not choice.names or t["function"]["name"] in choice.names]
        forms.append(("calls", *_call_rules(allowed, choice, bare=marks.calls == "bare")))
    lead = {"": "", "may": "think? ", "open": "rest "}[marks.thinking]
    lines = [f"start: {lead}({' | '.join(name for name, *_ in forms)})"]
    lines += {"": [], "may": [f'think: "<think>" {THINKING}'], "open": [f"rest: {THINKING}"]}[
        marks.thinking
    ]
    return Constraint(kind="lark", text="\n".join([*lines, *(r for _, *rs in forms for r in rs)]))


def _text_rules(constraint: Constraint) -> Iterator[str]:
    """Yield the rules of a text. Raises CallRefused."""
    match constraint.kind:
        case "json_object":
            yield 'text: %json {"type": "object"}'
        case "json_schema":
            yield f"text: %json {constraint.text}"
        case "regex":
            escaped = re.sub(
                r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), constraint.text
            )
            yield f"text: /{escaped}/"
        case "choice":
            yield f"text: {' | '.join(json.dumps(text) for text in json.loads(constraint.text))}"
        case _:
            raise CallRefused(
                "a grammar cannot be combined with tools or with a chat template that opens the "
                "reasoning; give a JSON schema, a regex or a choice, or turn the thinking off "
                "(chat_template_kwargs)",
                field="structured_outputs.grammar",
            )


def _call_rules(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, bare: bool
) -> Iterator[str]:
    """Yield the rules of one or several calls, in Hermes' form or as a turn in bare JSON."""
    several = choice.parallel and not bare
    yield 'calls: call ("\\n" call)*' if several else "calls: call"
    names = " | ".join(f"call{i}" for i, _ in enumerate(tools))
    yield f"call: {names}" if bare else f'call: "<tool_call>\\n" ({names}) "\\n</tool_call>"'
    key = "parameters" if bare else "arguments"
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        schema = json.dumps(function.get("parameters") or {"type": "object"})
        yield f'call{i}: {json.dumps(head)} %json {schema} "}}"'

"""Turns of a chat: from a checked call to its prompt, and from sampled tokens to its answer."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_async.data.chat_formats.written_turn import CALL, call_id
from jaxrl_async.endpoint.answer_constraint import turn_constraint
from jaxrl_async.endpoint.callers import Caller
from jaxrl_async.endpoint.conversations import PromptTokens
from jaxrl_async.endpoint.generation import GrowingAnswer
from jaxrl_async.endpoint.http_answers import (
    ChatAnswer,
    chat_answer,
    text_after_marks,
    visible_turn,
)
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.openai_chat import ChatCall
from jaxrl_async.endpoint.sampling_request import SamplingOptions
from jaxrl_async.endpoint.service import EndpointService
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.types import LogitShaping, Message

MAX_FORMATS = 16
"""Maximum number of chat formats with arguments of calls that are kept; the oldest are dropped."""


class ChatTurns:
    """Prompts and answers of chat calls of all protocols."""

    def __init__(self, service: EndpointService) -> None:
        """service: serves the calls."""
        self.service = service
        self._formats: OrderedDict[str, ChatFormat] = OrderedDict()  # by their arguments

    async def prompt(
        self, caller: Caller, call: ChatCall, *, is_long: bool = False
    ) -> PromptTokens:
        """Return a chat call's prompt as tokens; is_long: for a long body. Raises CallRefused."""
        service = self.service
        service.ignore(call.ignored)
        chat, conversations = service.chat(), caller.conversations
        variables: dict[str, Any] = {}
        for name, arguments in call.template.items():
            own = {k: v for k, v in arguments.items() if chat.takes(k)}
            if caller.terms.fixed_sampling or not own:
                service.ignore([name])
            else:
                variables = {**own, **variables}
        tokenizer = service.served.tokenizer

        def prompt_tokens() -> PromptTokens:
            written_by = self._with_arguments(chat, variables)
            prompt = conversations.prompt(written_by, call.messages, call.tools, variables)
            if not call.prefix:
                return prompt
            before = tokenizer.decode_all(prompt.token_ids)
            begun = tokenizer.encode_after(before, call.prefix)
            whole = np.concatenate([prompt.token_ids, begun]).astype(np.int32)
            return replace(prompt, token_ids=whole, prefix=len(begun))

        return await service.tokenise(caller, prompt_tokens, is_long)

    def _with_arguments(self, chat: ChatFormat, arguments: Mapping[str, object]) -> ChatFormat:
        """Return a chat format with these variables. On any thread."""
        if not arguments:
            return chat
        key = json.dumps(arguments, sort_keys=True)
        written_by = self._formats.get(key) or chat.with_arguments(arguments)
        self._formats[key] = written_by
        while len(self._formats) > MAX_FORMATS:
            self._formats.popitem(last=False)
        return written_by

    def options(self, caller: Caller, call: ChatCall, prompt: PromptTokens) -> SamplingOptions:
        """Return a chat call's options with what its whole turn must match. Raises CallRefused."""
        options, marks, tools = (
            call.options,
            prompt.chat.marks,
            call.tools if call.reads_tools else (),
        )
        shaping = options.shaping or LogitShaping()
        forced = call.choice.mode == "required"
        if shaping.constraint is None and not forced:
            if call.choice.names:  # only a constraint keeps the policy from the other tools
                self.service.ignore(["tool_choice"])
            return options
        if not caller.terms.takes_constraints or (tools and marks.calls == "other"):
            self.service.ignore(["tool_choice" if forced else "response_format"])
            rest = replace(shaping, constraint=None)
            return replace(options, shaping=None if rest == LogitShaping() else rest)
        if marks.thinking == "other":
            raise CallRefused(
                "this model's chat format writes more than the text of an answer, so its form "
                "cannot be required; ask for it in a message",
                field="response_format",
            )
        if call.prefix and marks.thinking == "may":
            marks = replace(marks, thinking="")
        whole = turn_constraint(shaping.constraint, tools, call.choice, marks)
        by = "tool_choice" if forced else options.constrained_by
        return replace(options, shaping=replace(shaping, constraint=whole), constrained_by=by)

    async def finish(
        self, caller: Caller, call: ChatCall, prompt: PromptTokens, choice: GrowingAnswer
    ) -> ChatAnswer:
        """Return a finished answer as a message, and store it."""
        answer = choice.answer
        assert answer is not None, "the answer is finished"
        message = await self.service.run(lambda: _turn(call, prompt, choice))
        reply = chat_answer(answer, message, call.choice)
        whole = reply.message()
        if not (reply.tool_calls and CALL in call.prefix):
            whole["content"] = call.prefix + whole["content"]
        caller.conversations.remember(prompt, answer.completion.token_ids, whole)
        caller.add_messages(call.messages, whole)
        return reply

    async def so_far(
        self, call: ChatCall, prompt: PromptTokens, choice: GrowingAnswer
    ) -> Mapping[str, Any]:
        """Return an unfinished answer as a message; empty while it is a call that its prefix has
        begun."""
        if CALL in call.prefix and call.reads_tools:
            return {}
        return await self.service.run(lambda: _turn(call, prompt, choice))


def _turn(call: ChatCall, prompt: PromptTokens, choice: GrowingAnswer) -> Message:
    """Return an answer as its caller sees it: without the prefix, and with ids of its calls that
    depend on the request and the tokens before it. Other answers, also of other servers, have
    other ids; the same answer of a replayed run has the same ones."""
    turn = choice.token_ids
    message = prompt.chat.message(turn, call.tools)
    if prompt.prefix:  # the prefix may have begun a call or the reasoning
        turn = np.concatenate([prompt.token_ids[-prompt.prefix :], turn]).astype(np.int32)
        whole = prompt.chat.message(turn, call.tools)
        if str(whole["content"]).startswith(call.prefix):
            message = {**whole, "content": whole["content"][len(call.prefix) :]}
        elif CALL in call.prefix and whole.get("tool_calls"):
            message = whole
        else:
            turn = choice.token_ids
    names = {tool["function"]["name"] for tool in call.tools} if call.reads_tools else None
    exact = call.options.shaping is not None and call.options.shaping.constraint is not None
    text = choice.flow.whole() if exact or names is None else ""
    text = text_after_marks(text, turn, prompt.chat.marks)
    shown = visible_turn(message, text, tools=names, exact=exact)
    if not shown.get("tool_calls"):
        return shown
    before = f"{choice.request_id}\n".encode() + prompt.token_ids.tobytes()
    calls = [
        {**call, "id": call_id(turn, i, before)} if call["id"] == call_id(turn, i) else call
        for i, call in enumerate(shown["tool_calls"])
    ]
    return {**shown, "tool_calls": calls}

"""A policy that plays a shop by its prompt: it calls a tool once, and answers with what the tool
returned. So an answer with the price shows that the whole loop of a client worked."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from endpoint_rig import Speaker

from jaxrl_async.types import Constraint, LogitShaping

PRICE = "Milk costs 3.5."
QUOTE = {"item": "milk", "price": 3.5}
THOUGHT = "The tool knows."
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo " + PRICE
ARGUMENTS = {
    "price": {"item": "milk"},
    "bash": {"command": DONE},
    "transfer_to_shop": {},
    "final_answer": {"answer": PRICE},
}
"""Arguments of the tools that clients offer; a tool of another name takes a quote."""
CODE = "final_answer(f\"Milk costs {price(item='milk')}.\")"


def scripted_text(prompt: str) -> str:
    """What the policy says after a prompt in Qwen3's format."""
    asked = prompt.rsplit("<|im_start|>user", 1)[-1]
    tools = offered(prompt)
    found = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", asked, re.DOTALL)
    found = [text for text in found if '"assistant"' not in text]  # that a call was handed over
    head = f"<think>\n{THOUGHT}\n</think>\n\n" if "Think." in prompt else ""
    if "mswea_bash_command" in prompt:
        return f"I print it.\n\n```mswea_bash_command\n{DONE}\n```"
    if '"thought"' in prompt and '"code"' in prompt:  # CodeAgent with structured outputs
        return json.dumps({"thought": "I ask.", "code": CODE})
    if "<code>" in prompt:
        return f"Thought: I ask.\n<code>\n{CODE}\n</code>"
    if "final_answer" in tools:  # smolagents gives a tool's result as a user's text
        found += re.findall(r"Observation:?\s+([\d.]+)", asked)
    if tools and not found:
        return head + called(next(t for t in tools if t != "final_answer"))
    if found and "final_answer" in tools:
        return called("final_answer")
    if found and "transfer_to_shop" not in tools:
        bought = "Bread" if '"bread"' in prompt else "Milk"
        return f"{bought} costs {found[-1]}."
    if "JSON" in prompt:
        return json.dumps(QUOTE)
    return head + PRICE


def offered(prompt: str) -> list[str]:
    """Names of the tools in a prompt."""
    found = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    lines = found[1].splitlines() if found else []
    return [json.loads(line)["function"]["name"] for line in lines]


def called(name: str) -> str:
    call = {"name": name, "arguments": ARGUMENTS.get(name, QUOTE)}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


SOON = 6.0
"""Added to the logits of what ends a string and a reasoning: a random policy may never end one."""


class Kept:
    """Keeps what a sampler was asked and what it sampled."""

    def __init__(self) -> None:
        self.requests: list = []
        self.said: dict[str, np.ndarray] = {}  # the tokens of each answer, by request

    def keep(self, requests, futures):
        """Keep the answers of requests when they come; return the futures."""
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(lambda done, name=request.request_id: self._end(name, done))
        return futures

    def _end(self, name, done):
        if not done.cancelled() and done.exception() is None:
            self.said[name] = done.result().token_ids


class Scripted(Speaker, Kept):
    """Says the script, without any model."""

    def __init__(self, tokenizer, step: int = 16) -> None:
        Kept.__init__(self)
        Speaker.__init__(self, tokenizer, [], step=step)

    def submit_many(self, requests: Sequence):
        for request in requests:
            self.texts.append(scripted_text(written(self.tokenizer, request)))
        return self.keep(requests, super().submit_many(requests))


class Dictated(Kept):
    """A sampler that a constraint holds to the script. With `free` a client's own constraint takes
    precedence, and the policy may say whatever matches it."""

    def __init__(self, sampler, tokenizer) -> None:
        super().__init__()
        self._sampler, self._tokenizer, self.free = sampler, tokenizer, False

    def submit_many(self, requests: Sequence):
        self.requests += requests
        held = [self._held(request) for request in requests]
        return self.keep(held, self._sampler.submit_many(held))

    def _held(self, request):
        if not self.free or request.constraint is None:
            return dictated(request, self._tokenizer)
        ends = (int(self._tokenizer.encode(text)[0]) for text in ('"', "</think>"))
        shaping = replace(request.shaping, bias=tuple((end, SOON) for end in ends))
        return replace(request, shaping=shaping)

    def __getattr__(self, name):
        return getattr(self._sampler, name)


def written(tokenizer, request) -> str:
    """A request's prompt with its special tokens."""
    return tokenizer.hf.decode(request.token_ids)


def dictated(request, tokenizer, script=scripted_text):
    """A request whose answer can only be what the script says, or one of the texts it gives."""
    said = script(written(tokenizer, request))
    texts = [said] if isinstance(said, str) else said
    choice = Constraint(kind="choice", text=json.dumps(texts))
    shaping = replace(request.shaping or LogitShaping(), constraint=choice)
    return replace(request, shaping=shaping)

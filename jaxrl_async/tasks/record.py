"""Types of tasks: records and messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_async.types import Message

TaskRecord = Mapping[str, Any]
"""One record of the data, by column. The package itself reads these columns if they exist:
`messages` (the conversation so far), or else `prompt` or `question`; `answer` (the reference of
rewards); `worked` (a demonstration: a complete conversation, for the supervised warm start)."""
Said = str | Message | Sequence[Message] | None
"""A message of an environment or a game: a text in the user's role, a message, several, or none."""

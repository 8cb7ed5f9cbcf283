"""What tasks speak of: records, and what is said."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_async.types import Message

TaskRecord = Mapping[str, Any]
"""One record of the data, by column. What the package itself reads, where it is there: `messages`
(the conversation so far), else `prompt` or `question`; `answer` (the reference of rewards);
`worked` (a whole conversation as it should go, for the supervised warm start)."""
Said = str | Message | Sequence[Message] | None
"""What an environment or a game says: a text of the user's role, a message, several, or nothing."""

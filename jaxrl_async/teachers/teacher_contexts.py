"""What a teacher reads in place of a record's prompt: a column with a text or messages, or the
prompt's own text or messages as the teacher's tokenizer writes them.

Self-distillation from demonstrations compares a policy that sees the question alone with one that
also sees a demonstration: Shenfeld et al. 2026 (SDFT, arXiv:2601.19897).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_async.data.chat_formats.chat_messages import as_messages
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import BadEndpoint, DataError
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.types import IntArray, Message, Prompt


class TeacherContexts:
    """Converts a column of records, or their prompts, to tokens, as prompts are converted."""

    def __init__(
        self,
        setting: str,
        column: str | None,
        *,
        template: str | None,
        tokenizer: Tokenizer,
        chat: Callable[[], ChatFormat | None],
    ) -> None:
        """Convert nothing yet.

        Args:
            setting: name of the setting, with its value, for messages.
            column: of a record; None: the prompt.
            template: of a prompt's text (Tokenizer.encode_prompt).
            tokenizer: of the teacher.
            chat: returns its chat format; None: it has none.
        """
        self._setting, self._column, self._template = setting, column, template
        self._tokenizer, self._make_chat = tokenizer, chat
        self._chat: ChatFormat | None = None

    def __call__(self, prompt: Prompt, opened: Sequence[Message] = ()) -> IntArray:
        """Return the tokens of a record's context, [length] int32. Raises BadEndpoint.

        opened: what an environment wrote before the policy's first turn; (): the prompt's.
        """
        content: Any
        if self._column is None:
            content = list(opened or prompt.messages) or prompt.text
        else:
            content = prompt.columns.get(self._column)
        where = f"{self._setting}: prompt {prompt.prompt_id}"
        try:
            if isinstance(content, str) and content:
                return self._tokenizer.encode_prompt(content, self._template)
            messages: Any = as_messages(content)
            if not messages or isinstance(messages, str):
                raise BadEndpoint(
                    f"{where} has {str(content)[:60]!r} there, not a text or messages. Correct the "
                    "record or the setting."
                )
            self._chat = self._chat or self._make_chat()
            if self._chat is None:
                raise BadEndpoint(
                    f"{where} has messages, and the teacher's tokenizer no chat template. Choose "
                    "a teacher with one, or give a text (teachers.NAME.context)."
                )
            return self._chat.opening(messages, ())
        except DataError as error:
            raise BadEndpoint(f"{where}: {error}") from error

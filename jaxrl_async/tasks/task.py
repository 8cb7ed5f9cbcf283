"""The interface of tasks: a task, and the environment that plays its episodes in messages.

    record ──reset──> messages ──> the policy's message ──step──> Step ──> ... ──> score

An environment may be sync (it runs in a thread) or async (it is awaited). rollout/chat_env.py plays
it in tokens.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jaxrl_async.data.chat_formats.chat_messages import as_messages
from jaxrl_async.types import Constraint, Message

if TYPE_CHECKING:
    from jaxrl_async.tasks.game import Game

TaskRecord = Mapping[str, Any]
"""One record of the data, by column. The package itself reads these columns if they exist:
`messages` (the conversation so far), or else `prompt` or `question`; `answer` (the reference of
rewards); `worked` (a demonstration: a complete conversation, for the supervised warm start)."""
Said = str | Message | Sequence[Message] | None
"""A message of an environment or a game: a text in the user's role, a message, several, or none."""

Records = Sequence[TaskRecord] | Callable[[str], Sequence[TaskRecord]]
"""Records, or a function of the split ("train" or "eval") that returns them."""
Tool = Callable[..., Any]
"""A Python function with type hints and a docstring; it may be async. The policy gets its
exceptions as text. A call is retried, twice and within 20 s, only if its service did not accept it:
after a refused connection, HTTP 429 or 503, or a `ConnectionError` that it raises itself. It is
never retried after a timeout or a broken connection, since it may have taken effect."""
TeacherChoice = str | Sequence[str] | Mapping[str, float] | None
"""The teachers of a record by name (teachers): one, several, or several with weights; None or
empty: none."""
QUESTIONS = ("prompt", "question")
"""Columns that may hold the question of a record without messages; the first one that exists
does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one turn of the policy."""

    messages: Said = None  # None: the episode is over
    reward: float | None = None  # for the turn that this answers; None: the sum of its parts
    parts: Mapping[str, float] = field(default_factory=dict)  # named components
    done: bool = False  # True: the episode is over, even with messages


class RunsTools(Protocol):
    """Runs the tool calls of a message."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools that may be called, as OpenAI's function tools."""

    async def __call__(self, message: Message) -> list[Message]:
        """Return one message of the role tool for each call, in order, and a message of the user
        about calls that could not be parsed."""


class Environment:
    """One episode of a task: created for each episode, used once.

    Override the methods that the task needs, as `async def`, or as `def`, which runs in a thread.
    In a resumed run an unfinished episode starts over, unless the environment also has

        def state(self) -> Any             plain values, lists, mappings with text keys, arrays
        def restore(self, state) -> None   instead of reset
    """

    tools: Sequence[Tool | str] = ()
    """Functions that the policy may call; a text names a method of the environment."""
    repeatable: ClassVar[bool] = False
    """Whether `step` may be called again after it raised (env.retries)."""
    run_tools: RunsTools
    """Set before `reset`: runs the tool calls of a message; for async methods."""

    def reset(self, record: TaskRecord) -> Said | Awaitable[Said]:
        """Begin the episode; return the conversation so far. By default the record's `messages`,
        or else its `prompt` or `question` as the user's message."""
        if messages := conversation_of(record):
            return messages
        return next((str(record[name]) for name in QUESTIONS if name in record), None)

    def step(self, message: Message) -> Step | Said | Awaitable[Step | Said]:
        """Answer the policy's message; None or no messages: the episode is over. By default, run
        its tool calls, and end if it has none."""
        called = message.get("tool_calls") or message.get("tool_call_errors")
        return self.run_tools(message) if called and self.run_tools.schemas else None

    def score(self) -> float | Mapping[str, float] | Awaitable[Any]:
        """Return what the episode earned in addition to its steps' rewards: a number, or named
        parts that are added up. Also called if a limit cut it off."""
        return 0.0

    def close(self) -> Awaitable[None] | None:
        """Release the environment's resources. Called once, however the episode ended."""
        return None


def conversation_of(record: TaskRecord) -> list[Message]:
    """Return a record's messages, from `messages` or instead of its question; []: no messages."""
    columns = [as_messages(record.get(name)) for name in ("messages", *QUESTIONS)]
    if columns[0]:
        return list(columns[0])
    return next((list(c) for c in columns[1:] if isinstance(c, list | tuple)), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Data, environment and reward together, or any of these."""

    records: Records | None = None  # to train on; None: the configuration's data
    # to evaluate on; None: records("eval"), or the last tenth of the records, at most 64
    held_out: Records | None = None
    environment: Callable[[], Environment] | None = None  # a class or a function that creates one
    game: "Callable[[], Game] | None" = None  # for several seats, instead of an environment
    # plays a whole episode through an endpoint: an async function, or a command as a list
    program: Callable[..., Awaitable[Any]] | Sequence[str] | None = None
    # as in reward.function, or several, which are added up; added to the environment's rewards
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    tools: Sequence[Tool] = ()  # in addition to the environment's own
    system_prompt: str | None = None  # put before conversations without one
    # what each answer of the policy must match: one for all records, or a function that returns a
    # record's (None: no constraint); not for a program, whose calls ask for theirs
    constraint: Constraint | Callable[[TaskRecord], Constraint | None] | None = None
    # for teacher.source=teachers: the teacher of all records, or a function that returns a
    # record's: a name, names, or names with weights; a record's own column comes first
    teacher: TeacherChoice | Callable[[TaskRecord], TeacherChoice] = None
    # Each text is one token of a tokenizer that is created for the task if neither data.tokenizer
    # nor model.path names one: for tiny models that learn the task from scratch
    words: Sequence[str] = ()

    @property
    def plays(self) -> bool:
        """Whether episodes are conversations: the task has records, an environment, a program or
        tools."""
        parts = (self.records, self.environment, self.game, self.program, self.system_prompt)
        return bool(self.tools) or any(one is not None for one in parts)

    @property
    def judges(self) -> bool:
        """Whether the task has an environment, game or program, which gives rewards."""
        return any(one is not None for one in (self.environment, self.game, self.program))

    @property
    def rewards(self) -> tuple[Callable[..., Any], ...]:
        """The task's reward functions."""
        if self.reward is None:
            return ()
        return (self.reward,) if callable(self.reward) else tuple(self.reward)


NO_TASK = Task()
"""The task of a run without the setting `task`: the configuration has records and rewards."""

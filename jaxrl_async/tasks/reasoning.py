"""Tasks of the library reasoning-gym: generated questions, and a score for each answer.

task: {reasoning_gym:spell_backward: {max_word_len: 4, examples: 1}}

The arguments are the dataset's own, except for `eval_size` and `examples`.
"""

import logging
from collections.abc import Sequence
from typing import Any

from jaxrl_async.errors import ConfigError, extra_module
from jaxrl_async.tasks.task import Task, TaskRecord
from jaxrl_async.types import CORRECT, Message

log = logging.getLogger(__name__)

LIBRARY = "reasoning_gym"
TRAINING_SIZE = 100_000
"""Number of training questions, unless the arguments have a size."""
SHOWN = 256
"""Number of questions from which the words of the task's own tokenizer are taken."""


class ReasoningQuestions(Sequence[TaskRecord]):
    """Questions of a dataset by index, as plain records."""

    def __init__(
        self, dataset: Any, first: int, size: int, examples: Sequence[Message] = ()
    ) -> None:
        """Read nothing yet.

        Args:
            dataset: a reasoning-gym dataset.
            first: index of the first question in the dataset.
            size: number of questions.
            examples: messages before each question; if given, records hold messages.
        """
        self._dataset, self._first, self._size = dataset, first, size
        self._examples = tuple(examples)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return question and answer, and the index by which the dataset scores."""
        number = self._first + range(self._size)[index]
        entry = self._dataset[number]
        question = str(entry["question"])
        record: TaskRecord = {"question": question}
        if self._examples:
            record = {"messages": [*self._examples, {"role": "user", "content": question}]}
        return {**record, "answer": str(entry["answer"]), "index": number}


class ReasoningScore:
    """A reward function: the dataset's own score, from 0 to 1."""

    def __init__(self, dataset: Any, extract: Any) -> None:
        """extract: finds the text between <answer> and </answer>, if any."""
        self._dataset, self._extract = dataset, extract
        self.__name__ = "reasoning_gym"

    def __call__(self, completion: str, index: int) -> dict[str, float]:
        """Score an answer: its text between <answer> and </answer>, or else all of it; 0 if the
        dataset cannot parse it."""
        answer = self._extract(completion)
        answer = completion.strip() if answer is None else answer
        try:
            score = float(self._dataset.score_answer(answer, self._dataset[index]))
        except Exception as error:  # some raise for text that is not a number
            log.debug("%.80r scores 0: %s: %s", answer, type(error).__name__, error)
            score = 0.0
        return {CORRECT: min(max(score, 0.0), 1.0)}


def reasoning_task(name: str, *, eval_size: int = 128, examples: int = 0, **arguments: Any) -> Task:
    """Return the task of this name.

    Args:
        name: of a reasoning-gym dataset.
        eval_size: number of held-out questions, generated after the training ones.
        examples: number of questions with answers before each question, as a conversation; the
            same ones each time, generated after the held-out ones. Without examples a small
            model answers in sentences. They need a chat format.
        arguments: of the dataset; `size` is the number of training questions.

    Raises ConfigError for an unknown name or argument, MissingExtraError without the library.
    """
    gym, factory, utils = (_module(part) for part in ("", ".factory", ".utils"))
    size = arguments.pop("size", TRAINING_SIZE)
    if not all(isinstance(n, int) and n > 0 for n in (size, eval_size)):
        raise ConfigError(f"size ({size}) and eval_size ({eval_size}) must be whole numbers > 0.")
    if not isinstance(examples, int) or examples < 0:
        raise ConfigError(f"examples ({examples}) must be a whole number >= 0.")
    if name not in factory.DATASETS:
        raise ConfigError(
            f"reasoning-gym has no dataset {name!r}. It has {len(factory.DATASETS)}, such as "
            f"{', '.join(sorted(factory.DATASETS)[:5])}."
        )
    settings = {"seed": 0, **arguments, "size": size + eval_size + examples}
    dataset = gym.create_dataset(name, **settings)
    shown = _as_conversation(ReasoningQuestions(dataset, size + eval_size, examples))
    return Task(
        records=ReasoningQuestions(dataset, 0, size, shown),
        held_out=ReasoningQuestions(dataset, size, eval_size, shown),
        reward=ReasoningScore(dataset, utils.extract_answer),
        words=words_of(ReasoningQuestions(dataset, 0, min(size, SHOWN))),
    )


def _as_conversation(questions: Sequence[TaskRecord]) -> list[Message]:
    """Return questions and answers as messages."""
    return [
        {"role": role, "content": str(record[field])}
        for record in questions
        for role, field in (("user", "question"), ("assistant", "answer"))
    ]


def words_of(questions: Sequence[TaskRecord]) -> tuple[str, ...]:
    """Return the characters of some questions and answers, and the common prefix of all questions
    as one word."""
    prompts = [str(record["question"]) for record in questions]
    common = _common_beginning(min(prompts), max(prompts))
    texts = [text[len(common) :] for text in prompts] + [str(r["answer"]) for r in questions]
    characters = sorted({character for text in texts for character in text})
    return (*([common] if len(common) > 1 else ()), *characters)


def _common_beginning(first: str, last: str) -> str:
    """Return the common prefix of two texts; "" if they are equal."""
    differing = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(differing, 0)]


def _module(part: str) -> Any:
    needs = "task reasoning_gym:NAME needs reasoning-gym"
    return extra_module(f"{LIBRARY}{part}", "reasoning_gym", needs)

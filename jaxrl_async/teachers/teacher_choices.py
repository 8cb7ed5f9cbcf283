"""Which teachers an episode has, by its record's column, its task, or because there is only one.

Pure. A choice is a name, a list of names, a mapping from names to weights, or nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import BadEndpoint
from jaxrl_async.rollout.chat_env import record_of
from jaxrl_async.tasks.task import TaskRecord, TeacherChoice
from jaxrl_async.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherChoices:
    """The teachers of a run, and how its records name them."""

    weights: Mapping[str, float]  # of each teacher by name (teachers.NAME.weight)
    column: str  # of a record (teacher.column)
    of_task: TeacherChoice | Callable[[TaskRecord], TeacherChoice] = None

    def of(self, prompt: Prompt) -> dict[str, float]:
        """Return the weights of a prompt's teachers by name; empty: none, as in a run without.

        Raises BadEndpoint for an unknown name, a weight that is no number above 0, a record that
        could have any of several teachers, or a task's function that raises.
        """
        where = f"prompt {prompt.prompt_id}, column {self.column!r}"
        if not self.weights:
            return {}
        if self.column in prompt.columns:
            choice = prompt.columns[self.column]
        elif callable(self.of_task):
            choice, where = self._of_record(prompt), f"prompt {prompt.prompt_id}, the task"
        elif self.of_task is not None:
            choice, where = self.of_task, "the task"
        elif len(self.weights) == 1:
            choice = next(iter(self.weights))
        else:
            raise BadEndpoint(
                f"prompt {prompt.prompt_id} does not say which of the teachers "
                f"{self._names} it has: its record has no column {self.column!r} (teacher.column), "
                "and the task has no `teacher`. Add one of them; an empty value means none."
            )
        return self._checked(choice, where)

    def check(self, prompt: Prompt) -> None:
        """Raise BadEndpoint as `of`, without a call of the task's function."""
        if self.column in prompt.columns or not callable(self.of_task):
            self.of(prompt)

    def _of_record(self, prompt: Prompt) -> TeacherChoice:
        """Return what the task's function returns for a prompt's record. Raises BadEndpoint."""
        assert callable(self.of_task)
        try:
            return self.of_task(record_of(prompt))
        except Exception as error:
            raise BadEndpoint(
                f"Task.teacher raised {type(error).__name__} for the record of prompt "
                f"{prompt.prompt_id}: {error}. Correct it."
            ) from error

    @property
    def _names(self) -> str:
        return ", ".join(self.weights)

    def _checked(self, choice: Any, where: str) -> dict[str, float]:
        """Return a choice as weights by name. Raises BadEndpoint."""
        if choice is None or choice == "":
            return {}
        weights: Any
        if isinstance(choice, str):
            weights = {choice: self.weights.get(choice)}
        elif isinstance(choice, Mapping):  # a table's file gives every record all keys
            weights = {name: weight for name, weight in choice.items() if weight is not None}
        else:
            try:
                weights = {name: self.weights.get(name) for name in choice}
            except TypeError:
                weights = {choice: None}
        for name, weight in weights.items():
            if name not in self.weights:
                raise BadEndpoint(
                    f"{where} names the teacher {name!r}, and teachers has {self._names}. Correct "
                    "the name, add it to teachers, or read another column (teacher.column)."
                )
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not 0 < weight < math.inf:
                raise BadEndpoint(
                    f"{where} gives the teacher {name} the weight {weight!r}. It must be a finite "
                    "number above 0."
                )
        return {name: float(weight) for name, weight in weights.items()}

"""Which teachers an episode has, by its record's column, its task, or because there is only one.

Pure. A choice is a name, a list of names, a mapping from names to weights, or nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import EndpointMisset
from jaxrl_async.tasks.task import TaskRecord, TeacherChoice
from jaxrl_async.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherChoices:
    """The teachers of a run, and how its records name them."""

    weights: Mapping[str, float]  # of each teacher by name (teachers.NAME.weight)
    column: str  # of a record (teacher.column)
    of_task: TeacherChoice | Callable[[TaskRecord], TeacherChoice] = None

    def of(self, prompt: Prompt) -> dict[str, float]:
        """Return the weights of a prompt's teachers by name; empty: none.

        Raises EndpointMisset for an unknown name, a weight that is no number above 0, or a record
        that could have any of several teachers.
        """
        where = f"prompt {prompt.prompt_id}, column {self.column!r}"
        if self.column in prompt.columns:
            choice = prompt.columns[self.column]
        elif callable(self.of_task):
            choice, where = self.of_task(prompt.columns), f"prompt {prompt.prompt_id}, the task"
        elif self.of_task is not None:
            choice, where = self.of_task, "the task"
        elif len(self.weights) == 1:
            choice = next(iter(self.weights))
        else:
            raise EndpointMisset(
                f"prompt {prompt.prompt_id} does not say which of the teachers "
                f"{self._names} it has: its record has no column {self.column!r} (teacher.column), "
                "and the task has no `teacher`. Add one of them; an empty value means none."
            )
        return self._checked(choice, where)

    @property
    def _names(self) -> str:
        return ", ".join(self.weights)

    def _checked(self, choice: Any, where: str) -> dict[str, float]:
        """Return a choice as weights by name. Raises EndpointMisset."""
        if choice is None or choice == "":
            return {}
        given: Any
        if isinstance(choice, str):
            given = {choice: self.weights.get(choice)}
        elif isinstance(choice, Mapping):  # a table's file gives every record all keys
            given = {name: weight for name, weight in choice.items() if weight is not None}
        else:
            try:
                given = {name: self.weights.get(name) for name in choice}
            except TypeError:
                given = {choice: None}
        for name, weight in given.items():
            if name not in self.weights:
                raise EndpointMisset(
                    f"{where} names the teacher {name!r}, and teachers has {self._names}. Correct "
                    "the name, or add it to teachers."
                )
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
                raise EndpointMisset(
                    f"{where} gives the teacher {name} the weight {weight!r}. It must be a number "
                    "above 0."
                )
        return {name: float(weight) for name, weight in given.items()}

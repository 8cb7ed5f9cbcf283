"""A registered function with its arguments, as a configuration names it. Needs no JAX."""

from typing import Any

Choice = str | dict[str, dict[str, Any]]
"""A registered function by name, or {name: {argument: value}}."""
Choices = Choice | list[Choice]
"""One choice, or a list of them."""


def name_of(choice: Choice) -> str:
    """Return the function's name in a choice."""
    return choice if isinstance(choice, str) else next(iter(choice), "")


def each_of(choices: Choices | tuple[Choice, ...] | None) -> list[Choice]:
    """Return one choice, several of them or None as a list."""
    if choices is None:
        return []
    return list(choices) if isinstance(choices, list | tuple) else [choices]


def arguments_of(choice: Choice) -> dict[str, Any]:
    """Return the function's arguments in a choice."""
    return {} if isinstance(choice, str) else next(iter(choice.values()), {})

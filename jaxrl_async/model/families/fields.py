"""A config.json's values, checked as they are read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import CheckpointError

MAX_SIZE = 2**31 - 1
"""Largest size or token id in a config.json."""
MAX_LAYERS = 10_000
NO_IDS: tuple[Any, ...] = (None, -1, [-1], [])
"""What stands in a config.json for a special token that there is not."""
MAX_NUMBER = 1e30
"""Upper bound of the other numbers in a config.json."""
COPY_AGAIN = "Copy the file again, or correct it."


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The values of one JSON object of a config.json; null counts as missing. What is wrong raises
    CheckpointError with the file and the key."""

    values: Mapping[str, Any]
    where: str  # the file

    def has(self, key: str) -> bool:
        """Return whether the file says something about a key."""
        return self.values.get(key) is not None

    def said(self, key: str, default: Any = None) -> Any:
        """Return a value as it stands there, unchecked."""
        return self.values[key] if self.has(key) else default

    def whole(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Return a size."""
        value = self.said(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.said(key, default)
        if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
            raise self.wrong(key, f"a number above 0 and below {MAX_NUMBER:g}")
        return float(value)

    def positive_or_none(self, key: str, default: float) -> float:
        """Return a positive number; 0 where the file says null, the default where it says
        nothing."""
        if key in self.values and self.values[key] is None:
            return 0.0
        return self.number(key, default) if default or self.has(key) else 0.0

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a switch."""
        return bool(self.said(key, default))

    def ids(self, key: str) -> tuple[int, ...]:
        """Return token ids: none, one or several. Old files say -1 for none, in lists too."""
        value = self.said(key)
        ids = [i for i in (value if isinstance(value, list) else [value]) if i not in NO_IDS]
        if any(type(i) is not int or not 0 <= i <= MAX_SIZE for i in ids):
            raise self.wrong(key, "a token id, a list of them or null")
        return tuple(ids)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        value = self.said(key)
        good = isinstance(value, list) and all(
            type(x) in (int, float) and 0 < x < MAX_NUMBER for x in value
        )
        if not good or not value:
            raise self.wrong(key, "a list of numbers above 0")
        return tuple(float(x) for x in value)

    def names(self, key: str, known: tuple[str, ...], count: int) -> tuple[str, ...]:
        """Return a list of so many known words."""
        value = self.said(key)
        if not isinstance(value, list) or len(value) < count:
            raise self.wrong(key, f"a list of {count} of {', '.join(known)}")
        for word in value[:count]:
            if word not in known:
                raise CheckpointError(
                    f"{self.where}: {key} names {shown(word)}, which is not supported, only "
                    f"{' and '.join(known)}."
                )
        return tuple(value[:count])

    def part(self, key: str) -> "ConfigFields":
        """Return a JSON object within this one; empty if it is missing."""
        value = self.said(key, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {key} must be a JSON object. {COPY_AGAIN}")
        return ConfigFields(value, self.where)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """Return the error of a value that must be something else."""
        known = key in self.values
        said = f"{key} = {shown(self.values[key])}" if known else f"{key} is missing; it"
        return CheckpointError(f"{self.where}: {said} must be {wanted}. {COPY_AGAIN}")

    def refuse(self, what: str) -> None:
        """Raise CheckpointError for something that the decoder does not have."""
        raise CheckpointError(f"{self.where}: {what}")


def shown(value: Any) -> str:
    """Return a JSON value as text, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."

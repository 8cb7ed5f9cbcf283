"""The values of a config.json, validated on access."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import CheckpointError

MAX_SIZE = 2**31 - 1
"""Maximum size or token id in a config.json."""
MAX_LAYERS = 10_000
NO_IDS: tuple[Any, ...] = (None, -1, [-1], [])
"""Values in a config.json for a missing special token."""
MAX_NUMBER = 1e30
"""Upper bound of other numbers in a config.json."""
COPY_AGAIN = "Copy the file again, or correct it."


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The values of one JSON object of a config.json; null counts as missing. An invalid value
    raises CheckpointError with the file and the key."""

    values: Mapping[str, Any]
    where: str  # the file

    def has(self, key: str) -> bool:
        """Return whether the file has a value for a key."""
        return self.values.get(key) is not None

    def get(self, key: str, default: object = None) -> Any:
        """Return a value without validation."""
        return self.values[key] if self.has(key) else default

    def whole(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Return a size."""
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
            raise self.wrong(key, f"a number above 0 and below {MAX_NUMBER:g}")
        return float(value)

    def positive_or_none(self, key: str, default: float) -> float:
        """Return a positive number; 0 if the file says null, the default if the key is missing."""
        if key in self.values and self.values[key] is None:
            return 0.0
        return self.number(key, default) if default or self.has(key) else 0.0

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a switch."""
        return bool(self.get(key, default))

    def ids(self, key: str) -> tuple[int, ...]:
        """Return token ids: none, one or several. Old files use -1 for none, also in lists."""
        value = self.get(key)
        ids = [i for i in (value if isinstance(value, list) else [value]) if i not in NO_IDS]
        if any(type(i) is not int or not 0 <= i <= MAX_SIZE for i in ids):
            raise self.wrong(key, "a token id, a list of them or null")
        return tuple(ids)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        value = self.get(key)
        good = isinstance(value, list) and all(
            type(x) in (int, float) and 0 < x < MAX_NUMBER for x in value
        )
        if not good or not value:
            raise self.wrong(key, "a list of numbers above 0")
        return tuple(float(x) for x in value)

    def names(self, key: str, known: tuple[str, ...], count: int) -> tuple[str, ...]:
        """Return a list of `count` words, each one of `known`."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) < count:
            raise self.wrong(key, f"a list of {count} of {', '.join(known)}")
        for word in value[:count]:
            if word not in known:
                raise CheckpointError(
                    f"{self.where}: {key} contains {shown(word)}, which is not supported, only "
                    f"{' and '.join(known)}."
                )
        return tuple(value[:count])

    def part(self, key: str) -> "ConfigFields":
        """Return a JSON object within this one; empty if it is missing."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {key} must be a JSON object. {COPY_AGAIN}")
        return ConfigFields(value, self.where)

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """Return the error for an invalid value."""
        known = key in self.values
        found = f"{key} = {shown(self.values[key])}" if known else f"{key} is missing; it"
        return CheckpointError(f"{self.where}: {found} must be {expected}. {COPY_AGAIN}")

    def refuse(self, what: str) -> None:
        """Raise CheckpointError for an unsupported feature."""
        raise CheckpointError(f"{self.where}: {what}")


def shown(value: object) -> str:
    """Return a JSON value as text, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."

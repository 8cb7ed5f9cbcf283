"""Typed access to the fields of a JSON object from the network. Pure.

A field that was not read is rejected by name: no field is silently ignored.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

from jaxrl_async.endpoint.http_errors import UNSUPPORTED, CallRefused
from jaxrl_async.endpoint.json_shape import MAX_PARTS, check_shape
from jaxrl_async.endpoint.request_fields import FieldRule, FieldUse
from jaxrl_async.errors import in_a_line

SHOWN_NAME = 80
"""Maximum number of characters of a field's name in messages."""


class BodyFields:
    """One JSON object of a body, and the fields that were read. A null counts as absent."""

    def __init__(self, record: object, where: str = "") -> None:
        """Wrap an object; `where` is its path in the body, for errors. Raises CallRefused for
        anything else."""
        self._where = where
        if not isinstance(record, dict):
            raise CallRefused(f"must be an object, not {quoted(record)}", field=where or None)
        self._record: dict[str, Any] = record
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """Return a field's path in the whole body."""
        shown = field if len(field) <= SHOWN_NAME else f"{field[:SHOWN_NAME]}..."
        return f"{self._where}.{shown}" if self._where else shown

    def refuse(self, field: str, wanted: str) -> NoReturn:
        """Raise CallRefused: this field must be what `wanted` says."""
        value = quoted(self._record.get(field))
        raise CallRefused(f"must be {wanted}, not {value}", field=self.name(field))

    def value(self, field: str) -> Any:
        """Return a field's raw value; None: absent."""
        self._read.add(field)
        return self._record.get(field)

    def text(self, field: str, default: str | None = None) -> str | None:
        """Return a text; default: absent."""
        value = self.value(field)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(field, "a text")
        return value

    def needed_text(self, field: str) -> str:
        """Return a required text."""
        value = self.text(field)
        if value is None:
            self.refuse(field, "a text")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.value(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(field, "true or false")
        return value

    def whole(self, field: str, least: int, most: int | None = None) -> int | None:
        """Return a whole number within limits; None: absent."""
        value = self.value(field)
        if value is None:
            return None
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            self.refuse(field, f"a whole number {limits}")
        return int(value)

    def number(self, field: str, least: float, most: float) -> float | None:
        """Return a number within limits; None: absent."""
        value = self.value(field)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # also rejects NaN
            self.refuse(field, f"a number from {least:g} to {most:g}")
        return float(value)

    def choice(self, field: str, allowed: Sequence[str]) -> str | None:
        """Return one of a few allowed words; None: absent."""
        value = self.value(field)
        if value is not None and value not in allowed:
            self.refuse(field, " or ".join(repr(word) for word in allowed))
        return None if value is None else str(value)

    def rows(self, field: str, most: int) -> list[Any]:
        """Return a list of at most `most` values; []: absent."""
        value = self.value(field)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(field, "a list")
        if len(value) > most:
            raise CallRefused(
                f"has {len(value)} entries; at most {most} are allowed", field=self.name(field)
            )
        return value

    def inner(self, field: str, default: object = None) -> "BodyFields":
        """Return the object of a field; default: absent. Without one it is required."""
        value = self.value(field)
        return BodyFields(default if value is None else value, self.name(field))

    def objects(self, field: str, most: int = MAX_PARTS) -> "Iterator[BodyFields]":
        """Yield the objects of a list of at most `most`; none: absent."""
        for i, value in enumerate(self.rows(field, most)):
            yield BodyFields(value, f"{self.name(field)}[{i}]")

    def token_ids(self, field: str, most: int) -> list[int]:
        """Return a list of token ids; []: absent. The vocabulary is checked later."""
        value = self.rows(field, most)
        wrong = [i for i in value if type(i) is not int or not 0 <= i < 2**31]
        if wrong:
            raise CallRefused(
                f"must hold token ids, but contains {quoted(wrong[0])}",
                field=self.name(field),
            )
        return value

    def close(
        self, harmless: Set[str] = frozenset(), neutral: Mapping[str, Any] | None = None
    ) -> None:
        """Raise CallRefused for a field that affects the answer but was not read.

        Args:
            harmless: fields that do not affect the answer, such as the client's own labels.
            neutral: unsupported fields, with the values that have no effect.
        """
        for field, value in self._record.items():
            if value is None or field in self._read or field in harmless:
                continue
            if neutral is not None and field in neutral and value in neutral[field]:
                continue
            raise self._unsupported(field)

    def _unsupported(self, field: str, why: str = "") -> CallRefused:
        value = quoted(self._record[field])
        message = f"is not supported{why} (its value is {value}); remove it"
        return CallRefused(message, field=self.name(field), code=UNSUPPORTED)

    def settle(self, rules: Mapping[str, FieldRule]) -> tuple[str, ...]:
        """Return the fields that are accepted without effect. Raises CallRefused for a field
        without a rule, and for one that is refused.

        rules: what each field means.
        """
        counted = []
        for field, value in self._record.items():
            rule = rules.get(field)
            known = rule is not None and any(_equal(value, neutral) for neutral in rule.neutral)
            if value is None or known:
                continue
            if rule is None or rule.use is FieldUse.REFUSED:
                raise self._unsupported(field, "" if rule is None else f": {rule.note}")
            if rule.use is FieldUse.COUNTED:
                counted.append(self.name(field))
            assert rule.use in (FieldUse.COUNTED, FieldUse.LABEL) or field in self._read, field
        return tuple(counted)


def _equal(value: object, neutral: object) -> bool:
    """Return whether two values of JSON are equal: 1 is 1.0, but not true."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def quoted(value: object) -> str:
    """Return a value of a body as a short text."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        names = [repr(name[:SHOWN_NAME]) for name in itertools.islice(value, 4)]
        return f"an object with {', '.join(names) or 'nothing'}"
    text = json.dumps(value[:80] if isinstance(value, str) else value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parsed_json(body: bytes) -> Any:
    """Parse a body's JSON. Raises CallRefused for invalid JSON, for NaN and infinity, and for
    values that are nested too deeply or have too many parts."""

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    check_shape(body)
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        reason = in_a_line(error)
        raise CallRefused(f"the body is not JSON in UTF-8: {reason}", code="invalid_json") from None
    if any(half in body for half in (b"\\ud", b"\\uD")) and not _is_unicode(value):
        raise CallRefused("the body has half a surrogate pair", code="invalid_json")
    return value


def _is_unicode(value: object) -> bool:
    """Return whether all texts of a value can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True

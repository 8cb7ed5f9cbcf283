"""The base of all sections of the configuration: frozen, with help from docstrings. No JAX.

A section itself knows what its settings must keep to together (`check`), and which of them are read
only with certain values of another one (`ReadWith`). What several sections must keep to is in
config/rules.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

MAX_WHOLE = 2**31 - 1
"""Largest integer of a setting."""
Positive = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Count = Annotated[int, Field(ge=1, le=65_536)]
"""Number of things that are created one by one."""

Method = TypeVar("Method", bound=Callable[[Any], Iterator[str]])


@dataclass(frozen=True, slots=True)
class ReadWith:
    """Marks a setting that has an effect only with certain values of another one in its section.

    when_too_old: Literal["wait", "drop"] = "wait"
    overcommit: Annotated[float, ReadWith("when_too_old", ("drop",))] = 1.5
    """

    setting: str  # the other one, or a property of the section
    values: tuple[Any, ...] = ()  # (): any but null if that is its default, else but false and 0
    needs: str | None = None  # what gives it an effect, in words; None: made from the two above
    # settings that turn the feature on and off; None: `setting`
    switches: tuple[str, ...] | None = None


class Unread(NamedTuple):
    """A setting that differs from its default without an effect."""

    key: str  # dotted
    value: Any
    needs: str  # what would give it an effect, in words
    off: str | None  # the switch that explicitly turns its feature off, with its value


def check(method: Method) -> Method:
    """Mark a method of a section as a check of the section's settings.

    It yields a sentence for each way in which they break it: the settings, the reason, and the
    remedy.
    """
    method.__dict__["is_check"] = True
    return method


class Section(BaseModel):
    """Base of all sections: frozen, refuses unknown keys, takes help texts from docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def is_set(self, name: str) -> bool:
        """Return whether a setting differs from its default, even if that is written down."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)

    @classmethod
    def checks(cls) -> dict[str, Callable[[Any], Iterator[str]]]:
        """Return the checks of this section by name."""
        methods = {
            name: method for kind in reversed(cls.__mro__) for name, method in vars(kind).items()
        }
        return {name: m for name, m in methods.items() if getattr(m, "is_check", False)}

    def inner(self, path: str = "") -> Iterator[tuple[str, "Section"]]:
        """Yield this section and those in it that are not null, by name and in lists, too, with
        their dotted paths."""
        yield path, self
        for name in type(self).model_fields:
            value, inner = getattr(self, name), f"{path}.{name}".lstrip(".")
            by_path = {inner: value}
            if isinstance(value, dict):
                by_path = {f"{inner}.{key}": item for key, item in value.items()}
            elif isinstance(value, list):
                by_path = {f"{inner}[{i}]": item for i, item in enumerate(value)}
            for section_path, section in by_path.items():
                if isinstance(section, Section):
                    yield from section.inner(section_path)

    def unread(self, path: str) -> Iterator[Unread]:
        """Yield the settings without an effect, as another one of this section is not set so.

        path: of this section.
        """
        for name, target in type(self).model_fields.items():
            for mark in target.metadata:
                if isinstance(mark, ReadWith) and self.is_set(name) and not self._is_read(mark):
                    fields = (mark.setting,) if mark.switches is None else mark.switches
                    needs, key = mark.needs or self._needs_text(mark, path), f"{path}.{name}"
                    off = self.given(fields, path)
                    yield Unread(key.lstrip("."), getattr(self, name), needs, off)

    def given(self, names: Iterable[str], path: str) -> str | None:
        """Return the first of these settings that was written down, even with its default, with its
        value: "algorithm.kl_coefficient is 0.0"; None: none was."""
        for name in (name for name in names if name in self.model_fields_set):
            value = getattr(self, name)
            text = "given" if isinstance(value, list | tuple | dict | Section) else as_text(value)
            return f"{path}.{name} is {text}".lstrip(".")
        return None

    def _is_read(self, mark: ReadWith) -> bool:
        value = getattr(self, mark.setting)
        if mark.values:
            return value in mark.values
        target = type(self).model_fields.get(mark.setting)  # None: a property
        is_optional = target is not None and target.default is None
        return value is not None if is_optional else bool(value)

    def _needs_text(self, mark: ReadWith, path: str) -> str:
        """Return what gives a setting an effect: `staleness.when_too_old=drop`."""
        value, setting = getattr(self, mark.setting), f"{path}.{mark.setting}".lstrip(".")
        if mark.values:
            *most, last = map(str, mark.values)
            return f"{setting}={', '.join(most) + ' or ' * bool(most) + last}"
        plain = {bool: "=true", int: " above 0", float: " above 0"}
        return f"{setting}{plain.get(type(value), '')}"


def as_text(value: object) -> str:
    """Return a value for a sentence; integers may be too long for Python to print."""
    try:
        return str(value)
    except ValueError:
        return "a very long number"

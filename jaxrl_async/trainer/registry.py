"""Names for functions: what a configuration can choose from, and what a contract test runs over."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from jaxrl_async.config.schema import Choice
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind and one signature, by name; used as the decorator that registers them.

    Keyword-only arguments are a function's settings: `resolve({"ppo_clip": {"clip_high": 0.28}})`
    gives the function with them bound. Iterating gives the names.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def __call__(self, function: F) -> F:
        name = function.__name__
        assert name not in self._functions, f"{self.kind} {name!r} is registered twice"
        self._functions[name] = function
        return function

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, name: str) -> F:
        """The function of this name, or FILE.py:FUNCTION of a user's file.

        ConfigError with the nearest name where there is none.
        """
        if is_own(name):
            return load_function(name, self.kind)  # type: ignore[return-value]
        if name not in self._functions:
            known = ", ".join(sorted(self._functions))
            raise ConfigError(
                f"unknown {self.kind} {name!r}{_nearest(name, self)} (known: {known}; or "
                "your own as FILE.py:FUNCTION)."
            )
        return self._functions[name]

    def resolve(self, choice: Choice) -> F:
        """The chosen function with settings bound. ConfigError on an unknown name or argument."""
        name, arguments = _parse(self.kind, choice)
        function = self[name]
        self._check(name, function, arguments)
        return functools.partial(function, **arguments) if arguments else function  # type: ignore[return-value]

    def _check(self, name: str, function: F, arguments: dict[str, Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        settings = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
        for key, value in arguments.items():
            if key not in settings:
                known = ", ".join(settings) or "none"
                raise ConfigError(
                    f"{self.kind} {name!r} has no argument {key!r}{_nearest(key, settings)} "
                    f"(it takes: {known})."
                )
            if not _fits(value, settings[key].annotation):
                wanted = settings[key].annotation.__name__
                given = "a very long number" if _is_long(value) else repr(value)
                raise ConfigError(f"{self.kind} {name!r}: {key} must be {wanted}, not {given}.")
        missing = [k for k, p in settings.items() if p.default is p.empty and k not in arguments]
        if missing:
            example = ", ".join(f"{k}: ..." for k in missing)
            raise ConfigError(
                f"{self.kind} {name!r} needs {', '.join(missing)}: write {{{name}: {{{example}}}}}."
            )


def _parse(kind: str, choice: Choice) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a choice: `name` or `{name: {argument: value}}`."""
    if isinstance(choice, str):
        return choice, {}
    if len(choice) != 1:
        raise ConfigError(
            f"a {kind} is one name or {{name: {{argument: value}}}}, not {sorted(choice)}: "
            "keep one."
        )
    ((name, arguments),) = choice.items()
    return name, dict(arguments or {})


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value from a configuration can be this argument; only numbers are checked."""
    if annotation is float:
        return (type(value) is float and not math.isnan(value)) or _is_whole(value)
    return _is_whole(value) if annotation is int else True


def _is_whole(value: Any) -> bool:
    return type(value) is int and not _is_long(value)


def _is_long(value: Any) -> bool:
    """Whether a whole number has more than 64 bits."""
    return isinstance(value, int) and abs(value) >= 2**63


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

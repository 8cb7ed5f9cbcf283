"""Registries of named functions: the choices of a configuration and the cases of contract tests.

A function's keyword-only arguments are its settings, with their ranges in their types. A rule
states a condition on several of them. Facts declare properties that the rest of the code needs:

    @shaping
    @rule("low must be below high", lambda low, high: low < high)
    def cap(shaped: Shaped, *, low: Finite, high: Finite) -> Shaped: ...

    @token_loss(needs=("covariance_rank",))
    def kl_cov(x: TokenInputs, *, share: UpTo1 = 2e-3, penalty: Above0 = 1.0) -> TokenLoss: ...

A user's own function may omit all of these, and types too. It declares facts with `declare`:

    @declare(level="token", needs=("values",))
    def my_advantage(data: StepData) -> StepAdvantages: ...
"""

import difflib
import functools
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from jaxrl_async.config.schema import Choice, name_of
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
Facts = TypeVar("Facts")

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""Any finite number, also below 0."""
Share = Annotated[float, Field(ge=0, le=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
AtLeast1 = Annotated[float, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0)]
Whole = Annotated[int, Field(ge=1)]
UpTo1 = Annotated[float, Field(gt=0, le=1)]
"""Above 0 and at most 1."""


class Rule(NamedTuple):
    """A condition on several arguments of a function, or on these and the run's settings."""

    says: str
    holds: Callable[..., bool]  # takes arguments and settings such as group_size, by name

    def needs(self) -> list[str]:
        """Return the names of the parameters of `holds`."""
        return list(inspect.signature(self.holds).parameters)


def rule(says: str, holds: Callable[..., bool]) -> Callable[[F], F]:
    """Attach a rule to the function below.

    `Registry.resolve` checks it if all its parameters are known.
    """

    def attach(function: F) -> F:
        function.__dict__["rules"] = [*rules_of(function), Rule(says, holds)]
        return function

    return attach


def rules_of(function: Callable[..., object]) -> list[Rule]:
    """Return the rules attached to a function."""
    return list(getattr(function, "rules", ()))


def declare(**facts: object) -> Callable[[F], F]:
    """Attach facts to the function below: fields of its registry's record of facts."""

    def attach(function: F) -> F:
        function.__dict__["facts"] = facts
        return function

    return attach


def is_absent(choice: Choice) -> bool:
    """Return whether a choice names a function in a user's file missing on this machine."""
    name = name_of(choice)
    return is_own(name) and not Path(name.rpartition(":")[0]).is_file()


class NoFacts(NamedTuple):
    """The facts of a function that declares none."""


class Registry(Generic[F, Facts]):
    """Functions of one kind and one signature, by name; used as the decorator that registers them.

    A function's keyword-only arguments are its settings, and `resolve({"ppo_clip": {"clip_high":
    0.28}})` returns the function with these bound. Iteration yields the names.
    """

    def __init__(
        self, kind: str, setting: str, facts: Callable[..., Facts], assumed: Facts | None = None
    ) -> None:
        """Make an empty registry.

        Args:
            kind: name of this kind of function in messages.
            setting: key of the configuration that chooses a function.
            facts: record of the facts that a function declares; each has a default.
            assumed: facts of a user's function that declares none. None: the defaults.
        """
        self.kind, self.setting = kind, setting
        self._make_facts = facts
        self._assumed = facts() if assumed is None else assumed
        self._functions: dict[str, F] = {}

    @overload
    def __call__(self, function: F) -> F: ...

    @overload
    def __call__(self, **facts: Any) -> Callable[[F], F]: ...

    def __call__(self, function: F | None = None, **facts: Any) -> F | Callable[[F], F]:
        """Register the function below, as `@registry` or, with its facts, `@registry(...)`."""

        def register(function: F) -> F:
            name = function.__name__
            assert name not in self._functions, f"{self.kind} {name!r} is registered twice"
            self._functions[name] = declare(**facts)(function)
            self.facts(name)  # raises ConfigError on an unknown fact
            return function

        return register if function is None else register(function)

    def facts(self, choice: Choice) -> Facts:
        """Return the facts of the chosen function.

        Facts that a user's function does not declare are assumed; all are if its file is missing
        on this machine. Raise ConfigError on an unknown name or fact.
        """
        return self._assumed if is_absent(choice) else self.facts_of(self[name_of(choice)])

    def facts_of(self, function: F) -> Facts:
        """Return the facts of a function, with or without settings bound; see `facts`."""
        bare = getattr(function, "func", function)
        declared = getattr(bare, "facts", None)
        if declared is None:
            return self._assumed
        known = list(inspect.signature(self._make_facts).parameters)
        if wrong := [fact for fact in declared if fact not in known]:
            raise ConfigError(
                f"{self.setting}: {self.kind} {bare.__name__!r} declares {wrong[0]!r}"
                f"{_nearest(wrong[0], known)} (it can declare: {', '.join(known) or 'nothing'})."
            )
        if self._functions.get(bare.__name__) is bare:
            return self._make_facts(**declared)
        types = get_type_hints(self._make_facts)
        for fact, value in declared.items():
            if not _is_of(types[fact], value):
                raise ConfigError(
                    f"{self.setting}: {self.kind} {bare.__name__!r} declares {fact}={value!r}, "
                    f"which must be {range_of(types[fact])}."
                )
        return self._assumed._replace(**declared)  # type: ignore[attr-defined]

    def check_known(self, names: Collection[str], fact: Callable[[Facts], bool]) -> None:
        """Raise TypeError unless the fact holds for exactly these registered functions."""
        declared = {name for name in self if fact(self.facts(name))}
        if declared != set(names):
            differing = sorted(declared ^ set(names))
            raise TypeError(
                f"{self.kind}: config/function_facts.py and the registrations disagree on "
                f"{differing}"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, name: str) -> F:
        """Return the function of this name, or FILE.py:FUNCTION from a user's file.

        Raise ConfigError with the nearest name if the name is unknown.
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

    def resolve(self, choice: Choice, **run_settings: object) -> F:
        """Return the chosen function with its settings bound.

        Raise ConfigError on an unknown name or argument, a value out of range, or a broken rule.

        Args:
            choice: a name, or {name: {argument: value}}.
            run_settings: settings of the run that rules may use, by name.
        """
        name, arguments = _parse(self.kind, choice)
        function = self[name]
        arguments = self._fitted(name, function, arguments)
        self._check_rules(name, function, run_settings | defaults_of(function) | arguments)
        return functools.partial(function, **arguments) if arguments else function  # type: ignore[return-value]

    def _fitted(self, name: str, function: F, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Convert the arguments to the function's types. Raise ConfigError if one does not fit."""
        settings, types, fitted = settings_of(function), types_of(function), dict[str, Any]()
        for key, value in arguments.items():
            if key not in settings:
                known = ", ".join(settings) or "none"
                raise ConfigError(
                    f"{self.kind} {name!r} has no argument {key!r}{_nearest(key, settings)} "
                    f"(it takes: {known})."
                )
            try:
                fitted[key] = _as(types[key], value)
            except ValueError:
                given = "a very long number" if _is_long(value) else repr(value)
                raise ConfigError(
                    f"{self.setting}: {self.kind} {name!r}: {key} must be "
                    f"{range_of(types[key])}, not {given}."
                ) from None
        missing = [k for k, p in settings.items() if p.default is p.empty and k not in arguments]
        if missing:
            example = ", ".join(f"{k}: ..." for k in missing)
            raise ConfigError(
                f"{self.kind} {name!r} needs {', '.join(missing)}: write {{{name}: {{{example}}}}}."
            )
        return fitted

    def _check_rules(self, name: str, function: F, known: Mapping[str, object]) -> None:
        """Raise ConfigError if a rule is broken; skip rules with unknown parameters."""
        for one in rules_of(function):
            seen = {key: known[key] for key in one.needs() if key in known}
            if len(seen) == len(one.needs()) and not one.holds(**seen):
                values = ", ".join(f"{key} is {value}" for key, value in seen.items())
                raise ConfigError(f"{self.setting}: {self.kind} {name!r}: {one.says}; {values}.")


def settings_of(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the arguments that a configuration can set."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def defaults_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return the defaults of the settings that have one."""
    return {k: p.default for k, p in settings_of(function).items() if p.default is not p.empty}


def types_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return the types of a function's settings, with ranges; Any for an unreadable annotation."""
    settings = settings_of(function)
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, SyntaxError, AttributeError):
        signature = inspect.signature(function)
    of_all = {k: p.annotation for k, p in signature.parameters.items()}
    return {k: Any if of_all[k] is inspect.Parameter.empty else of_all[k] for k in settings}


def range_of(kind: Any) -> str:
    """Describe a type and its range: "float > 0 and <= 1"; a tuple as "[float, float]"."""
    if get_origin(kind) is Annotated:
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [limit for note in kind.__metadata__ for limit in _limits(note)]
        bounds = [f"{signs[k]} {getattr(x, k)}" for x in limits for k in signs if hasattr(x, k)]
        return " ".join([range_of(get_args(kind)[0]), " and ".join(bounds)]).strip()
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Mapping, dict):
        return f"{{name: {range_of(get_args(kind)[1])}}}"
    if get_origin(kind) in (tuple, list, Sequence, set, frozenset):
        several = [*get_args(kind), *([] if get_origin(kind) is tuple else [...])]
        return f"[{', '.join('...' if k is ... else range_of(k) for k in several)}]"
    if get_args(kind):
        return " or ".join(map(range_of, get_args(kind)))
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _limits(note: object) -> list[Any]:
    return list(note.metadata) if isinstance(note, FieldInfo) else [note]


def _parse(kind: str, choice: Choice) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a choice: `name` or `{name: {argument: value}}`."""
    if isinstance(choice, str):
        return choice, {}
    if len(choice) != 1:
        raise ConfigError(
            f"a {kind} is one name or {{name: {{argument: value}}}}, not {sorted(choice)}: "
            "keep one."
        )
    ((name, arguments),) = choice.items()
    return name, dict(arguments or {})


def _as(kind: object, value: object) -> Any:
    """Convert a configuration's value to this type, such as a list to a tuple or a text to a path.

    Types that pydantic does not know are not checked. Raise ValueError if the value does not fit.
    """
    if _is_long(value) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError
    if kind is Any:
        return value
    try:
        converted = _adapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except PydanticUserError:
        return value
    return value if isinstance(value, int | float) else converted


def _is_of(kind: Any, value: Any) -> bool:
    """Return whether a Python value is of a type."""
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def _is_long(value: object) -> bool:
    """Return whether this is a whole number of more than 64 bits."""
    return isinstance(value, int) and abs(value) >= 2**63


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

"""Names for functions: what a configuration can choose from, and what a contract test runs over.

A function's keyword-only arguments are its settings. Each has its range in its type. A rule states
what must hold between several of them, and facts state what the rest of the code must know:

    @shaping
    @rule("low must be below high", lambda low, high: low < high)
    def cap(shaped: Shaped, *, low: Finite, high: Finite) -> Shaped: ...

    @token_loss(needs=("covariance_rank",))
    def kl_cov(x: TokenInputs, *, share: UpTo1 = 2e-3, penalty: Above0 = 1.0) -> TokenLoss: ...

A user's own function may leave out all of these, and types too. It states facts with `declare`:

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
    overload,
)

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from jaxrl_async.config.schema import Choice, name_of
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
Facts = TypeVar("Facts")

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""Any number: below 0, too."""
Share = Annotated[float, Field(ge=0, le=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
AtLeast1 = Annotated[float, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0)]
Whole = Annotated[int, Field(ge=1)]
UpTo1 = Annotated[float, Field(gt=0, le=1)]
"""Above 0 and at most 1."""


class Rule(NamedTuple):
    """What must hold between several arguments of a function, or with the run's settings."""

    says: str
    holds: Callable[..., bool]  # of arguments, and of settings such as group_size, by their names

    def needs(self) -> list[str]:
        """Names of what it looks at."""
        return list(inspect.signature(self.holds).parameters)


def rule(says: str, holds: Callable[..., bool]) -> Callable[[F], F]:
    """Attach a rule to the function below; `Registry.resolve` checks it where all is known."""

    def attach(function: F) -> F:
        function.__dict__["rules"] = [*rules_of(function), Rule(says, holds)]
        return function

    return attach


def rules_of(function: Callable[..., Any]) -> list[Rule]:
    """The function's rules."""
    return list(getattr(function, "rules", ()))


def declare(**facts: Any) -> Callable[[F], F]:
    """Attach facts to the function below; which there are says the record of its registry."""

    def attach(function: F) -> F:
        function.__dict__["facts"] = facts
        return function

    return attach


def is_absent(choice: Choice) -> bool:
    """Whether a choice names a function of a user's file that is not on this machine."""
    name = name_of(choice)
    return is_own(name) and not Path(name.rpartition(":")[0]).is_file()


class NoFacts(NamedTuple):
    """Facts about functions of which nothing has to be known."""


class Registry(Generic[F, Facts]):
    """Functions of one kind and one signature, by name; used as the decorator that registers them.

    Keyword-only arguments are a function's settings: `resolve({"ppo_clip": {"clip_high": 0.28}})`
    gives the function with them bound. Iterating gives the names.
    """

    def __init__(
        self, kind: str, setting: str, facts: Callable[..., Facts], assumed: Facts | None = None
    ) -> None:
        """Make an empty registry.

        Args:
            kind: what one such function is called.
            setting: the key that chooses it.
            facts: the record of what a function declares; each fact has a default.
            assumed: the facts of a user's function that declares none. None: the defaults.
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
        """Return what the chosen function declares.

        For a user's function that declares nothing, or whose file is on another machine, return
        what is assumed of one. Raise ConfigError on an unknown name or fact.
        """
        return self._assumed if is_absent(choice) else self.facts_of(self[name_of(choice)])

    def facts_of(self, function: F) -> Facts:
        """Return what a function declares, be it with settings bound; as `facts`."""
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
        return self._make_facts(**declared)

    def check_known(self, names: Collection[str], fact: Callable[[Facts], bool]) -> None:
        """Raise TypeError unless the fact holds for exactly these of the registered functions."""
        declared = {name for name in self if fact(self.facts(name))}
        if declared != set(names):
            differing = sorted(declared ^ set(names))
            raise TypeError(
                f"{self.kind}: config/function_facts.py says otherwise of {differing} than where "
                "they are registered"
            )

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

    def resolve(self, choice: Choice, **facts: Any) -> F:
        """The chosen function with settings bound.

        facts: settings of the run that a rule may look at, by name. ConfigError on an unknown name
        or argument, one outside its range, and a broken rule.
        """
        name, arguments = _parse(self.kind, choice)
        function = self[name]
        arguments = self._fitted(name, function, arguments)
        self._check_rules(name, function, facts | defaults_of(function) | arguments)
        return functools.partial(function, **arguments) if arguments else function  # type: ignore[return-value]

    def _fitted(self, name: str, function: F, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments in the types that the function asks for."""
        settings, found = settings_of(function), dict[str, Any]()
        types = types_of(function)
        for key, value in arguments.items():
            if key not in settings:
                known = ", ".join(settings) or "none"
                raise ConfigError(
                    f"{self.kind} {name!r} has no argument {key!r}{_nearest(key, settings)} "
                    f"(it takes: {known})."
                )
            try:
                found[key] = _as(types[key], value)
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
        return found

    def _check_rules(self, name: str, function: F, known: dict[str, Any]) -> None:
        for one in rules_of(function):
            seen = {key: known[key] for key in one.needs() if key in known}
            if len(seen) == len(one.needs()) and not one.holds(**seen):
                told = ", ".join(f"{key} is {value}" for key, value in seen.items())
                raise ConfigError(f"{self.setting}: {self.kind} {name!r}: {one.says}; {told}.")


def settings_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments that a configuration can set."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Those of them that have a default."""
    return {k: p.default for k, p in settings_of(function).items() if p.default is not p.empty}


def types_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Their types, with ranges; Any where a user's function has none that can be read."""
    settings = settings_of(function)
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, SyntaxError, AttributeError):
        signature = inspect.signature(function)
    of_all = {k: p.annotation for k, p in signature.parameters.items()}
    return {k: Any if of_all[k] is inspect.Parameter.empty else of_all[k] for k in settings}


def range_of(kind: Any) -> str:
    """A type with its range in words: "float > 0 and <= 1"; a tuple as "[float, float]"."""
    if get_origin(kind) is Annotated:
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [limit for note in kind.__metadata__ for limit in _limits(note)]
        told = [f"{signs[k]} {getattr(x, k)}" for x in limits for k in signs if hasattr(x, k)]
        return " ".join([range_of(get_args(kind)[0]), " and ".join(told)]).strip()
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


def has_range(kind: Any) -> bool:
    """Whether a type says which of its values are meant: a number needs a range for it."""
    if get_origin(kind) is Annotated:
        return any(_limits(note) for note in kind.__metadata__)
    inner = [k for k in get_args(kind) if k is not ...]
    if get_origin(kind) is Literal or not inner:
        return get_origin(kind) is Literal or kind in (bool, str, type(None))
    return all(has_range(k) for k in inner)


def _limits(note: Any) -> list[Any]:
    return list(note.metadata) if isinstance(note, FieldInfo) else [note]


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


def _as(kind: Any, value: Any) -> Any:
    """A value of a configuration as an argument of this type: a list as the tuple, a text as the
    path that is asked for. Types that pydantic does not know are not checked. ValueError."""
    if _is_long(value) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError
    if kind is Any:
        return value
    try:
        found = _adapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except PydanticUserError:
        return value
    return value if isinstance(value, int | float) else found


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def _is_long(value: Any) -> bool:
    """Whether a whole number has more than 64 bits."""
    return isinstance(value, int) and abs(value) >= 2**63


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

"""Help about the fields of a configuration, as --help prints it. Needs no JAX."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxrl_async.config.draft import KeyPath
from jaxrl_async.config.load import unknown_setting
from jaxrl_async.config.renamed_settings import NAMES, current_name
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import Section
from jaxrl_async.config.setting_fields import (
    all_paths,
    allowed_text,
    default_text,
    field_at,
    named_section,
)
from jaxrl_async.config.several import section_of
from jaxrl_async.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FieldHelp:
    """Help of a setting, or of a section, whose default is None."""

    path: str  # "algorithm.learning_rate"
    about: str
    default: str | None = None  # as YAML
    allowed: str = ""  # type and range in words: "a whole number >= 1 or null"
    is_null: bool = False  # whether it is a section that is null by default


TOP_SECTIONS = frozenset(filter(None, map(section_of, Config.model_fields.values())))
"""The sections of a configuration."""


def help_of_fields(section: type[Section] = Config, path: KeyPath = ()) -> Iterator[FieldHelp]:
    """Yield every section and setting, a section before its settings."""
    for name, target in section.model_fields.items():
        name_path = ".".join((*path, name))
        inner = section_of(target)
        about = target.description or ("" if inner is None else inner.__doc__) or ""
        about = " ".join(about.split())
        named = named_section(target)
        if inner is None:
            yield FieldHelp(name_path, about, default_text(target), allowed_text(target))
            if named is not None:
                yield FieldHelp(f"{name_path}.NAME", " ".join((named.__doc__ or "").split()))
                yield from help_of_fields(named, (*path, name, "NAME"))
        else:
            is_null = target.get_default(call_default_factory=True) is None
            yield FieldHelp(name_path, about, is_null=is_null)
            if not path or inner not in TOP_SECTIONS:  # `about` says which section it repeats
                yield from help_of_fields(inner, (*path, name))


def help_text(prefix: str = "") -> str:
    """List every field: key path, default, type and range, help text.

    prefix: only this section or setting; "": all. Raises ConfigError.
    """
    current = current_name(prefix)
    if current is not None and prefix not in NAMES:
        raise ConfigError(f"{prefix} is now written {current}.")
    lines = [] if current is None else [f"{prefix} is now called {current}:"]
    prefix = current or prefix
    path = tuple(prefix.split(".")) if prefix else ()
    target = field_at(path) if path else None
    if path and target is None:
        raise ConfigError(unknown_setting(path))
    outer = field_at(path[:-1])
    around = Config if outer is None else section_of(outer)
    if around is not None:
        helps = list(help_of_fields(around, path[:-1]))
    else:  # a section by a name of the user's
        assert target is not None
        named = section_of(target)
        assert named is not None
        helps = list(help_of_fields(named, path))
    helps = [one for one in helps if not path or f"{one.path}.".startswith(f"{prefix}.")]
    for one in helps:
        if one.default is None:
            null = " = null" if one.is_null else ""
            lines += ["", f"{one.path}{null}{':  ' + one.about if one.about else ''}"]
        else:
            lines += [f"  {one.path} = {one.default}    ({one.allowed})", f"      {one.about}"]
    return "\n".join(lines)


def setting_names() -> list[str]:
    """Return the key path of every setting, such as algorithm.learning_rate."""
    return [".".join(path) for path, is_section in all_paths(Config, ()) if not is_section]

"""Loads a Config from a YAML file and overrides, or raises one ConfigError with every problem.

    text --yaml--> tree + line of each key --overrides--> tree --known keys, types, rules--> Config

A problem names its source (file and line, or command line), the key path, the value, and the
allowed values. Needs no JAX.
"""

import importlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxrl_async.config.draft import (
    COMMAND_LINE,
    MAX_INTEGER,
    Draft,
    KeyPath,
    Tree,
    parse_yaml,
    read_draft,
    shown,
)
from jaxrl_async.config.recipes import PREFIX, recipe_file, with_own_paths
from jaxrl_async.config.renamed_settings import (
    NAMES,
    REPLACED,
    SWITCHED_SECTIONS,
    VALUES,
    ReplacedSetting,
    current_name,
    rename_settings,
    turn_off,
    turns_off,
)
from jaxrl_async.config.rules import RULES
from jaxrl_async.config.schema import RUN_NAME, Config
from jaxrl_async.config.section import MAX_WHOLE, Section
from jaxrl_async.config.setting_fields import (
    all_paths,
    allowed_text,
    alternatives,
    field_at,
    is_below_choice,
    is_choice,
    is_in_named,
    is_section,
    is_text,
    known_prefix,
    may_be_null,
    named_section,
)
from jaxrl_async.config.several import differences, is_optional, merged, section_of
from jaxrl_async.config.unused import (
    sections_of_defaults,
    warnings_of_unused,
    without_unread_sections,
)
from jaxrl_async.errors import ConfigError

NO_VALUE: Any = object()
log = logging.getLogger(__name__)

MAX_PROBLEMS = 20
"""Maximum number of problems reported for one configuration."""
MAX_FORMER = 4
"""Maximum number of former names in one source that are each logged."""


RESTARTED = ("run.resume_or_start=true", "run.overwrite=false")
"""Overrides of a run that a launcher restarts automatically; an example's overwrite is for runs
that are started by hand."""


def load(
    source: str | Path | Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    where: str = "settings",
) -> Config:
    """Load a configuration and apply overrides `section.key=value` in order. Raises ConfigError.

    Values are YAML, and text fields take them verbatim. Below a choice,
    `algorithm.loss.ppo_clip.clip_high=0.3` sets an argument; the prefix `runs.NAME.` sets a setting
    of one of several runs.

    Args:
        source: a YAML file, recipe:NAME, or the sections as mappings.
        overrides: see above.
        where: name of mappings in messages.
    """
    config = load_to_change(source, overrides, {}, where=where)
    return config if config.runs else _without_unread(config)


def load_to_change(
    source: str | Path | Mapping[str, object],
    overrides: Sequence[str],
    switched_off: dict[KeyPath, Tree],
    *,
    where: str = "settings",
) -> Config:
    """Load a configuration whose settings will be changed; otherwise as `load`.

    The settings of sections that a former switch made null are put into `switched_off`; sections
    that nothing reads yet are kept, without a warning.
    """
    if isinstance(source, Mapping):
        draft = Draft(file=where, tree=_plain_copy(source))
    elif str(source).startswith(PREFIX):
        draft = read_draft(recipe_file(str(source).removeprefix(PREFIX)))
        draft.tree = with_own_paths(draft.tree)
    else:
        draft = read_draft(Path(source))
    runs, run_overrides = draft.tree.pop("runs", None), []
    _rename_settings(draft)
    switched_off |= deepcopy(draft.switched_off)
    for text in overrides:
        if text.strip().startswith(("runs.", "runs=")):
            run_overrides.append(text)
        else:
            _apply(draft, text)
    config = _checked(draft)
    if runs not in (None, {}) or run_overrides:
        return _several_runs(draft, config, runs, run_overrides)
    return config


def _without_unread(config: Config, where: str = "") -> Config:
    """Return a configuration without the sections that nothing reads, and log its settings without
    an effect; `where` precedes them."""
    for warning in warnings_of_unused(config):
        log.warning("%s%s", where, warning)
    return without_unread_sections(config)


def _checked(draft: Draft) -> Config:
    """Return a draft as a configuration that keeps the rules. Raises ConfigError with all
    problems."""
    draft = replace(draft, tree=_plain_copy(draft.tree))  # without sections that are turned off
    if draft.tree.get("task") is not None and draft.tree.get("endpoint") is None:
        _restore_sections(draft, {"endpoint": {}})  # for the task's program, which needs no switch
    replaced = turn_off(draft.tree)
    known = _keep_known(draft, draft.tree, Config, ())
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        _log_replaced(draft, replaced)
        draft.problems.extend(_translate(draft, error))
        _check_other_sections(draft, known, error)
    else:
        for name, needs in sections_of_defaults(config).items():
            if needs is not None and not draft.problems:
                warning = f"{name}, which nothing reads without {needs}, is now written {name}=null"
                replaced.append(ReplacedSetting(name, name, warning))
            config = config.model_copy(update={name: None})
        _log_replaced(draft, replaced)
        for violation in RULES.violations(config):
            draft.add_problem(violation.section, violation.sentence)
        if not draft.problems:
            return config
    raise ConfigError(_listed(list(dict.fromkeys(draft.problems))))


def _rename_settings(draft: Draft) -> None:
    """Write former names and values in a draft as they are now."""
    before = {path: deepcopy(_at(draft.tree, path)) for path in SWITCHED_SECTIONS}
    replaced = rename_settings(draft.tree)
    for path, settings in before.items():
        if isinstance(settings, dict) and _at(draft.tree, path) is None:
            switch = {name.rpartition(".")[2] for name in REPLACED}
            draft.switched_off[path] = {k: v for k, v in settings.items() if k not in switch}
    _log_replaced(draft, replaced)
    for setting in replaced:
        written = tuple(setting.written.split("."))
        if written in draft.lines:
            draft.lines.setdefault(tuple(setting.current.split(".")), draft.lines[written])


def _at(tree: object, path: KeyPath) -> Any:
    """Return what nested sections have at a key path; None: nothing."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _restore_sections(draft: Draft, settings: Tree) -> None:
    """Before these settings are written into a draft: give each section that a former switch made
    null, and that they have, the settings that it had."""
    for path in [path for path in draft.switched_off if isinstance(_at(settings, path), dict)]:
        outer = _at(draft.tree, path[:-1])
        if isinstance(outer, dict) and outer.get(path[-1]) is None:
            outer[path[-1]] = deepcopy(draft.switched_off[path])


def _log_replaced(draft: Draft, replaced: Iterable[ReplacedSetting]) -> None:
    """Log former ways to write settings, each once; of many, as a run of 0.3 has, the first."""
    new = [setting for setting in replaced if setting.warning not in draft.warned]
    draft.warned |= {setting.warning for setting in new}
    for setting in new[: 1 if len(new) > MAX_FORMER else None]:
        log.warning("%s: %s", draft.where(tuple(setting.written.split("."))), setting.warning)
    if len(new) > MAX_FORMER:
        log.warning("and %d more; --print-config prints how all are written now", len(new) - 1)


def _several_runs(
    shared: Draft, config: Config, listed: object, overrides: Sequence[str]
) -> Config:
    """Return the configuration of several runs, each as its differences from the shared one. Raises
    ConfigError.

    Args:
        shared: all settings except `runs`.
        config: made from it.
        listed: the setting `runs`: settings, or a file of them, by name.
        overrides: overrides of runs.NAME.
    """
    if not listed or not isinstance(listed, dict) or any(type(name) is not str for name in listed):
        text = f"runs = {shown(listed)} must be {{name: settings or a file}}; write it in the file."
        shared.add_problem(("runs",), text)
        raise ConfigError(_listed(shared.problems))
    config, runs = without_unread_sections(config), dict[str, Any]()
    by_run = [(text, _run_of(text, listed)) for text in overrides]
    for name, own in listed.items():
        draft = _draft_of_run(shared, name, own)
        for text in (text.strip() for text, run in by_run if run == name):
            _apply(draft, text.removeprefix(f"runs.{name}."))
        try:
            alone = _checked(draft)
        except ConfigError as error:
            raise ConfigError(f"runs.{name}: {error}") from None
        alone = _without_unread(alone, f"runs.{name}: ")
        runs[name] = differences(config.model_dump(), alone.model_dump())
    for text, run in by_run:
        if run is None:
            shared.problems.append(
                f"{COMMAND_LINE}: {shown(text)}: no run has this name. Write runs.NAME.SECTION.KEY="
                f"VALUE, of {', '.join(listed)}."
            )
    return _checked_several(shared, config, runs)


def _run_of(override: str, names: Iterable[str]) -> str | None:
    """Return the run of an override runs.NAME.SECTION.KEY=VALUE; names may contain dots. None: no
    run has this name."""
    key = override.strip().partition("=")[0]
    matching = (name for name in names if key.startswith(f"runs.{name}."))
    return max(matching, key=len, default=None)


def _checked_several(shared: Draft, config: Config, runs: Tree) -> Config:
    """Return the configuration with its runs. Raises ConfigError."""
    for name in runs:
        if not re.fullmatch(RUN_NAME, name):
            text = f"runs: {shown(name)} cannot name a run; a name must be like {RUN_NAME}."
            shared.add_problem(("runs",), text)
    if not shared.problems:
        several = Config.model_validate({**config.model_dump(), "runs": runs})
        for violation in RULES.violations(several):
            shared.add_problem(violation.section, violation.sentence)
        if not shared.problems:
            return several
    raise ConfigError(_listed(shared.problems))


def _draft_of_run(shared: Draft, name: str, own: object) -> Draft:
    """Return the draft of one of several runs: its own settings merged into the shared ones. Raises
    ConfigError."""
    if isinstance(own, str):
        draft, lines = read_draft(Path(own)), dict[KeyPath, int]()
    elif not isinstance(own, dict):
        shared.add_problem(
            ("runs", name), f"runs.{name} = {shown(own)} must be settings by section, or a file."
        )
        raise ConfigError(_listed(shared.problems))
    else:
        prefix, lines = ("runs", name), shared.lines
        own_lines = {path[2:]: line for path, line in lines.items() if path[:2] == prefix}
        draft = Draft(file=shared.file, tree=_plain_copy(own), lines=own_lines)
    _rename_settings(draft)
    base = replace(shared, tree=deepcopy(shared.tree))
    _restore_sections(base, draft.tree)
    return Draft(
        file=draft.file,
        tree=merged(base.tree, draft.tree),
        lines={**lines, **{path: line for path, line in draft.lines.items() if path}},
        overridden=shared.overridden - draft.lines.keys(),
        warned=shared.warned,
        switched_off=shared.switched_off | draft.switched_off,
    )


def _plain_copy(tree: Mapping[str, object]) -> Tree:
    """Return mappings of any kind as new dicts."""
    return {
        key: _plain_copy(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }


def _check_other_sections(draft: Draft, known: Tree, error: ValidationError) -> None:
    """Add the broken rules of single sections if fields of other sections are wrong."""
    wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
    try:
        config = Config.model_validate({k: v for k, v in known.items() if k not in wrong})
    except ValidationError:
        return
    for violation in RULES.violations(config):
        section = violation.section
        if section and section[0] not in wrong:
            draft.add_problem(section, violation.sentence)


def _listed(problems: list[str]) -> str:
    lines = "\n  ".join(problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        return f"more than {MAX_PROBLEMS} problems:\n  {lines}"
    return lines if len(problems) == 1 else f"{len(problems)} problems:\n  {lines}"


def dump(config: Config) -> str:
    """Return the complete configuration as YAML, from which `load` makes an equal Config."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True, width=100)


def flattened(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# --- overrides ---------------------------------------------------------------------------------


def _apply(draft: Draft, text: str) -> None:
    """Write one `section.key=value` into the draft's tree."""
    dotted, equals, raw = text.partition("=")
    name = ".".join(part.strip() for part in dotted.split("."))
    path = tuple(name.split("."))
    if not equals or not all(path):
        draft.problems.append(
            f"{COMMAND_LINE}: {shown(text)} is not an override. Write section.key=value."
        )
        return
    target = field_at(tuple(NAMES.get(name, name).split(".")))
    if target is None and not is_below_choice(path) and current_name(name) is None:
        draft.overridden.add(path)
        if is_in_named(path):
            draft.add_problem(path, _unknown_in(path, field_at(path[:-1])))
        else:
            draft.add_problem(path, unknown_setting(path, _value_of_unknown(raw), draft.tree))
        return
    try:
        value = _override_value(raw.strip(), target, name)
    except ConfigError as error:
        draft.problems.append(f"{COMMAND_LINE}: {name}: {error}")
        return
    tree = value
    for key in reversed(path):
        tree = {key: tree}
    if not (is_section(target) or current_name(name) or name in VALUES):
        _restore_sections(draft, tree)
        _store(draft, path, value)
        return
    _rename_settings(own := Draft(file=COMMAND_LINE, tree=tree))
    _restore_sections(draft, own.tree)
    _store_section(draft, own.tree, (), path)


def _store_section(draft: Draft, settings: Tree, path: KeyPath, override_path: KeyPath) -> None:
    """Write settings of a section into the draft's tree; {} keeps the settings that are there.

    override_path: it and the sections on the way to it are merged, and what is deeper is replaced.
    """
    if path and not settings:
        _store(draft, path, {}, replaces=False)
    for key, value in settings.items():
        inner_path = (*path, str(key))
        target = field_at(inner_path)
        named = isinstance(target, FieldInfo) and named_section(target) is not None
        has_settings = (is_section(target) or named) and isinstance(value, dict)
        if has_settings and (len(inner_path) <= len(override_path) or not value):
            _store_section(draft, value, inner_path, override_path)
        else:
            _store(draft, inner_path, value)


def _store(draft: Draft, path: KeyPath, value: object, *, replaces: bool = True) -> None:
    """Write one value into the draft's tree.

    replaces: False: a section that has settings keeps them.
    """
    draft.overridden.add(path)
    tree: Any = draft.tree
    for depth, key in enumerate(path[:-1]):
        inner = tree.get(key)
        if isinstance(inner, list) and is_choice(field_at(path[: depth + 1])):
            inner = {}  # a list of choices is replaced by the choice with the argument
        if inner is None or (
            isinstance(inner, str) and not is_section(field_at(path[: depth + 1]))
        ):
            inner = (
                {inner: {}} if inner == path[depth + 1] else {}
            )  # `loss: ppo_clip` takes an argument
        if isinstance(inner, str):
            inner = _settings_of_word(inner, field_at(path[: depth + 1]))
        if not isinstance(inner, dict):
            return  # the section itself is wrong, and is reported
        if is_choice(field_at(path[: depth + 1])) and path[depth + 1] not in inner:
            inner = {}  # another function is chosen
        tree[key] = inner
        tree = inner
    if replaces or not isinstance(tree.get(path[-1]), dict):
        tree[path[-1]] = value


def _settings_of_word(word: str, target: FieldInfo | None) -> Tree | None:
    """Return the settings for which a word stands, such as a seat's `initial`; None: for none."""
    section = None if target is None else section_of(target)
    if section is None:
        return None
    try:
        return section.model_validate(word).model_dump(exclude_unset=True)
    except ValidationError:
        return None


def _override_value(raw: str, target: Any, name: str) -> Any:
    """Return the value of `raw` for a field of this name: verbatim for text fields, else parsed as
    YAML."""
    if isinstance(target, FieldInfo):
        is_null = raw in ("null", "~")
        if is_null and (may_be_null(target.annotation) or turns_off(name, None)):
            return None
        if is_text(target.annotation) and raw[:1] not in ("'", '"'):
            return raw
    value = parse_yaml(raw, f"{shown(raw)} on the command line")
    return raw if is_choice(target) and not isinstance(value, dict | list) else value


# --- checking ----------------------------------------------------------------------------------


def _keep_known(
    draft: Draft, tree: Mapping[Any, object], section: type[Section], path: KeyPath
) -> Tree:
    """Return the part of `tree` that the schema knows, and add the rest to the problems."""
    known: Tree = {}
    for key, value in tree.items():
        if len(draft.problems) > MAX_PROBLEMS:
            break
        inner_path = (*path, str(key))
        target = section.model_fields.get(key) if isinstance(key, str) else None
        if target is None:
            draft.add_problem(inner_path, unknown_setting(inner_path, value, draft.tree))
            continue
        inner = section_of(target)
        if inner is not None and isinstance(value, dict):
            known[key] = _keep_known(draft, value, inner, inner_path)
        elif inner is not None and not (value is None and is_optional(target)):
            draft.add_problem(inner_path, _not_a_section(inner_path, value))
        elif _has_wrong_kind(value, target):
            draft.add_problem(inner_path, _not_allowed(inner_path, value, target))
        else:
            known[key] = value
    return known


def _has_wrong_kind(value: object, target: FieldInfo) -> bool:
    """Return whether a value is of a kind that pydantic would accept but that is not allowed.

    Examples: true for 1, bytes or NUL for text, and huge integers.
    """
    kinds = alternatives(target.annotation)
    if isinstance(value, bool) or bool in kinds:
        return not (type(value) in kinds or (value is None and type(None) in kinds))
    if isinstance(value, int):
        return abs(value) >= MAX_INTEGER
    if is_choice(target) and isinstance(value, dict):
        return len(value) != 1
    return isinstance(value, bytes) or (isinstance(value, str) and not _is_encodable(value))


def _is_encodable(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8 and used as a file name."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _translate(draft: Draft, error: ValidationError) -> Iterator[str]:
    """Translate pydantic's errors into plain sentences, one per key."""
    for detail in error.errors(include_url=False):
        whole = tuple(str(part) for part in detail["loc"])
        path = known_prefix(whole)
        target = field_at(path)
        if isinstance(target, FieldInfo) and named_section(target) and len(whole) > len(path):
            yield f"{draft.where(whole)}: {'.'.join(whole)}: {detail['msg']}. Correct it."
        elif detail["type"] == "model_type":
            yield f"{draft.where(path)}: {_not_a_section(path, detail['input'])}"
        elif detail["type"] == "string_pattern_mismatch" and whole[-1] == "[key]":
            like = f"a name must be like {detail['ctx']['pattern']}"
            yield f"{draft.where(path)}: {path[0]}: {shown(path[-1])} cannot be a name; {like}."
        elif detail["type"] == "extra_forbidden" and len(whole) > len(path):
            yield f"{draft.where(whole)}: {_unknown_in(whole, target)}"
        elif isinstance(target, FieldInfo) and detail["type"] == "missing" and whole == path:
            yield f"{draft.where(path)}: {_missing(path, target)}"
        elif isinstance(target, FieldInfo) and section_of(target) is None:
            value = draft.tree
            for key in path:
                value = value[key]
            yield f"{draft.where(path)}: {_not_allowed(path, value, target)}"
        else:
            yield f"{draft.where(path)}: {'.'.join(path) or 'the configuration'}: {detail['msg']}."


def _not_a_section(path: KeyPath, value: object) -> str:
    """Return what is wrong with a value that is given as a section."""
    return f"{'.'.join(path)} = {shown(value)} must be a section: keys and values."


def _unknown_in(path: KeyPath, target: FieldInfo | None) -> str:
    """Return what is wrong with a key of a section that the user named, and what may be meant."""
    inner = None if target is None else section_of(target)
    known: dict[str, KeyPath] = {} if inner is None else {n: (n,) for n in inner.model_fields}
    near = _most_similar(path[-1], known, 0.7)
    hint = f"did you mean {'.'.join((*path[:-1], *near))}?" if near else "--help lists all keys."
    return f"{'.'.join(path)} is not a setting; {hint}"


def _missing(path: KeyPath, target: FieldInfo) -> str:
    section = ".".join(path[:-1])
    return (
        f"{section} is given without {path[-1]}. Set {'.'.join(path)} ({allowed_text(target)}), or "
        f"{section}=null."
    )


def _not_allowed(path: KeyPath, value: object, target: FieldInfo) -> str:
    allowed = allowed_text(target)
    if isinstance(value, int) and value > MAX_WHOLE and "<=" not in allowed:
        allowed += f" and at most {MAX_WHOLE}"
    return f"{'.'.join(path)} = {shown(value)} is not allowed; it must be {allowed}."


def unknown_setting(
    path: KeyPath, value: object = NO_VALUE, settings: Mapping[str, object] | None = None
) -> str:
    """Return what is wrong with a setting that does not exist, and what may be meant.

    Args:
        path: its key path.
        value: its value, which is converted if another library has a setting of this name.
        settings: everything that is written, by section.
    """
    hints = importlib.import_module("jaxrl_async.config.peers.peer_hints")  # only where it is wrong
    value = hints.NO_VALUE if value is NO_VALUE else value
    dotted = ".".join(path)
    if hint := hints.peer_hint(dotted, value, settings, whole_name=True):
        return f"{dotted} is not a setting; {hint}."
    path = path[: len(known_prefix(path)) + 1]
    has_namesake = any(known[-1] == path[-1] for known, _ in all_paths(Config, ()))
    near = _nearest(path) if has_namesake else []
    if not near and (hint := hints.peer_hint(dotted, value, settings)):
        return f"{dotted} is not a setting; {hint}."
    if hint := hints.usual_hint(dotted, value):
        others = [name for name in near if name not in hint]
        hint += f", or did you mean {' or '.join(others)}?" if others else "."
        return f"{dotted} is not a setting; {hint}"
    near = near or _nearest(path)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all keys."
    return f"{'.'.join(path)} is not a setting; {hint}"


def _value_of_unknown(raw: str) -> Any:
    try:
        return parse_yaml(raw.strip(), COMMAND_LINE)
    except ConfigError:
        return raw.strip()


def _nearest(path: KeyPath) -> list[str]:
    """Find similar key paths: in another section, misspelt in the same section, or just similar."""
    parent, name, dotted = path[:-1], path[-1], ".".join(path)
    known = dict(all_paths(Config, ()))
    siblings = [c for c in known if c[:-1] == parent]
    namesakes = sorted(c for c in known if c[-1] == name)
    if namesakes:
        return [".".join(c) for c in namesakes[:3]]
    best = _most_similar(name, {c[-1]: c for c in siblings}, 0.7)
    if best is not None:
        return [".".join(best)]
    best = _most_similar(
        dotted, {".".join(c): c for c, is_section in known.items() if not is_section}, 0.8
    )
    return [".".join(best)] if best is not None else []


def _most_similar(word: str, candidates: Mapping[str, KeyPath], least: float) -> KeyPath | None:
    """Return the candidate most similar to the word; None if difflib's ratio is below `least`."""
    matches = get_close_matches(word[:100], candidates, n=1, cutoff=least)
    return candidates[matches[0]] if matches else None

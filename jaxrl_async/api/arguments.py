"""The arguments of `jaxrl_async.train` as a configuration, and as a task for what is a function.

model     DIR | Policy          model.path
data      list | dataset | path    records of the task, or data.jsonl.path
reward    function | name | list   the task's reward, reward.function
task      Task | class | name      task
tools     list of functions        the task's tools
**settings    learning_rate=..., sampler={...}    as in a file
"""

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_async.config.load import load, load_to_change
from jaxrl_async.config.peers.peer_hints import peer_hint, usual_hint
from jaxrl_async.config.renamed_settings import ReplacedSetting, current_name, rename_settings
from jaxrl_async.config.schema import Config
from jaxrl_async.config.several import section_of
from jaxrl_async.data.chat_formats.chat_messages import without_nulls
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.folder import given_folder
from jaxrl_async.tasks.game import Game
from jaxrl_async.tasks.named_tasks import HANDED_OVER
from jaxrl_async.tasks.task import Environment, Task, Tool
from jaxrl_async.tasks.toolbox import tool_schema

log = logging.getLogger(__name__)

FLAT = (
    "run",
    "algorithm",
    "sampler",
    "staleness",
    "trainer",
    "data",
    "eval",
    "mesh",
    "checkpoint",
    "metrics",
    "model",
    "data.jsonl",
)
"""Sections whose settings may be given by their own names, such as learning_rate=1e-5; the first
that has the name is meant. All others are given as a section: warm_start={"steps": 100}."""

AMBIGUOUS = ("epsilon",)
"""Settings of these sections that have the name of another setting in TRL or Tunix: of the clip
range there, and of AdamW here. They are only accepted in their section."""
MANY = 3
"""Settings of another library from which on its whole configuration is better converted."""
QUESTIONS = ("question", "prompt", "messages")
"""Columns in which a record's question is looked for."""
COLUMNS = {"prompt": "prompt_field", "messages": "messages_field", "answer": "answer_field"}
"""Columns that a task looks for, and the settings of data.jsonl that say what they are called."""
Reward = str | Mapping[str, object] | Callable[..., Any]
"""A built-in reward or FILE.py:FUNCTION by name, perhaps with arguments, or a function."""
Data = str | Path | Iterable[object]
"""A file or folder of records, or the records: mappings, texts (prompts), or a table of them."""
TaskLike = str | Mapping[str, object] | Task | type | None
"""A task by name, its section, a Task, or a class of environments or games."""
ConfigLike = str | Path | Mapping[str, object] | Config | None
"""What settings change: a file, recipe:NAME, sections, or a Config; None: the defaults."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """What a caller gives in addition to settings; see jaxrl_async.train. A mapping is the section
    of the same name."""

    model: str | Path | Policy | Mapping[str, object] | None = None
    data: Data | Mapping[str, object] | None = None
    eval_data: Data | None = None
    reward: Reward | Sequence[Reward] | None = None
    task: TaskLike = None
    tools: Sequence[Tool] = ()


def configured(
    inputs: TrainInputs, config: ConfigLike, settings: Mapping[str, object]
) -> tuple[Config, Task | None]:
    """Return the configuration of a call, and its task if that is an object.

    Args:
        inputs: model, data, rewards and task.
        config: what the settings change: a file, sections, or a Config.
        settings: sections as mappings, or settings of FLAT by their own names.

    Raises ConfigError and DataError.
    """
    tree = _tree_of(config, settings)
    replaces = None if _continues(tree) else tree.get("run", {}).pop("overwrite", None)
    inputs, sections = _without_sections(inputs)
    for replaced in _put_all(tree, {**sections, **settings}):
        log.warning("train: %s", replaced.warning)
    run = tree.setdefault("run", {})
    if not _continues(tree):  # the config.yaml of a run that is continued says how it began
        run.setdefault("overwrite", replaces is not False)
    job = run.get("job", "rl")
    folder = given_folder(load({"run": run}, where="train").run)
    if inputs.model is not None:
        tree.setdefault("model", {})["path"] = _model_folder(inputs.model, folder)
    functions, named = _rewards_of(inputs.reward)
    if named:
        tree.setdefault("reward", {})["function"] = named[0] if len(named) == 1 else named
    task = _with_tools(_task_of(inputs.task), inputs.tools)
    if isinstance(task, str | Mapping) and not functions:
        tree["task"], task = task, None
    elif isinstance(task, str | Mapping):
        raise ConfigError(
            "train: a task by name has its own rewards, and cannot take further functions. "
            "Give reward=FILE.py:FUNCTION, or the task as an object."
        )
    if isinstance(inputs.data, str | Path) or job != "rl":
        _put_files(tree, inputs, folder)
    elif inputs.data is not None:
        task = _with_records(task or Task(), inputs, _taken_columns(tree))
    elif inputs.eval_data is not None:
        raise ConfigError("train: eval_data is given without data. Give both.")
    if functions:
        if task is not None and task.reward is not None:
            raise ConfigError("train: the task has a reward, and reward gives another. Leave one.")
        task = dataclasses.replace(task or Task(), reward=functions)
    if task is not None:
        tree["task"] = HANDED_OVER
    return load(tree, where="train"), task


def _continues(tree: Mapping[str, Any]) -> bool:
    """Return whether settings continue a run that exists."""
    run = tree.get("run") or {}
    return bool(run.get("resume") or run.get("resume_or_start"))


def require_inputs(inputs: TrainInputs, config: ConfigLike, settings: Mapping[str, object]) -> None:
    """Require data and a model that were asked for: by an argument, or by name in the
    configuration. The defaults would train random weights on the embedded task. Arguments as
    configured's. Raises ConfigError."""
    tree = config.model_dump(exclude_unset=True) if isinstance(config, Config) else _tree_of(config)
    inputs, sections = _without_sections(inputs)
    _put_all(tree, {**sections, **settings})
    data, model = tree.get("data") or {}, tree.get("model") or {}
    named = bool(tree.get("task") or tree.get("tasks"))
    has_data = inputs.data is not None or inputs.task is not None or named
    reads = bool((data.get("jsonl") or {}).get("path"))
    configured_data = reads or data.get("addition") is not None or bool(tree.get("runs"))
    if not (has_data or configured_data):
        raise ConfigError(
            "train: there is no data. Give records (data=[{'question': ..., 'answer': ...}]), a "
            "file of them, or a task; data={'addition': {}} or config='recipe:addition' "
            "trains on the embedded one."
        )
    if inputs.model is None and not {"architecture", "path", "decoder"} & model.keys():
        raise ConfigError(
            "train: there is no model. Give model=DIRECTORY, a name on the hub, a Policy, or "
            "model={'architecture': {'layers': 2}} for random weights."
        )


def _without_sections(inputs: TrainInputs) -> tuple[TrainInputs, dict[str, Mapping[str, Any]]]:
    """Return what is given as objects, and what is given as sections."""
    values = {"model": inputs.model, "data": inputs.data, "reward": inputs.reward}
    sections = {
        name: value
        for name, value in values.items()
        if isinstance(value, Mapping)
        and all(key in _names_in(name) or current_name(f"{name}.{key}") for key in value)
    }
    rest: dict[str, Any] = dict.fromkeys(sections)
    return dataclasses.replace(inputs, **rest), sections


def _names_in(section: str) -> set[str]:
    """Return the names of a section's settings; a section within another is written with a dot."""
    kind: Any = Config
    for name in section.split("."):
        kind = section_of(kind.model_fields[name])
    return set() if kind is None else set(kind.model_fields)


def _tree_of(
    config: ConfigLike,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the sections that a configuration writes down, or all of a Config. A section that a
    file turned off has its settings again if `settings` turn it on."""
    if config is None:
        return {}
    if isinstance(config, Config):
        return config.model_dump()
    if isinstance(config, Mapping):
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in config.items()}
    switched_off: dict[tuple[str, ...], dict[str, Any]] = {}
    tree = load_to_change(config, (), switched_off).model_dump(exclude_unset=True)
    for (name, *inner), own in switched_off.items():
        if not inner and isinstance(settings.get(name), Mapping):
            tree[name] = own
    return tree


def _put_all(tree: dict[str, object], settings: Mapping[str, object]) -> list[ReplacedSetting]:
    """Write settings over those of the tree; return what both wrote in a former way. Raises
    ConfigError."""
    replaced = rename_settings(tree)
    _check_names(settings)
    for name, value in settings.items():
        own: dict[str, Any] = {}
        _put(own, name, value)
        replaced += rename_settings(own)
        for section, inner in own.items():
            _put(tree, section, inner)
    return replaced


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Write a setting that has this name into the tree."""
    if name in Config.model_fields:
        if isinstance(value, Mapping) and isinstance(tree.get(name), Mapping):
            tree[name] = _joined(tree[name], value)
        else:
            tree[name] = dict(value) if isinstance(value, Mapping) else value
        return
    section = _section_of(name)
    assert section is not None, "names were checked"
    outer, _, inner = section.partition(".")
    settings = {inner: {name: value}} if inner else {name: value}
    tree[outer] = _joined(tree.get(outer) or {}, settings)


def _section_of(name: str) -> str | None:
    """Return the section of FLAT that a setting by its own name is in; None: it is in none."""
    within = (s for s in FLAT if name in _names_in(s) or current_name(f"{s}.{name}"))
    return next(within, None)


def _check_names(settings: Mapping[str, object]) -> None:
    """Raise ConfigError with all names that are not settings, or that mean something else in
    another library."""
    wrong = {
        name: value
        for name, value in settings.items()
        if name in AMBIGUOUS or (name not in Config.model_fields and _section_of(name) is None)
    }
    if wrong:
        hints = [f"train: {_hint(name, value, settings)}" for name, value in wrong.items()]
        if sum(" here" in hint for hint in hints) >= MANY:
            hints.append("jaxrl_async.from_trl(args, ...) converts a whole GRPOConfig.")
        raise ConfigError("\n  ".join(hints))


def _hint(name: str, value: object, settings: Mapping[str, object]) -> str:
    """Return what may be meant by a name that is not a setting."""
    if hint := peer_hint(name, value, settings, _as_argument):
        if section := _section_of(name):
            return (
                f"{name} means two things: {hint}; of the section {section} it is "
                f"{section}={{{name!r}: ...}}."
            )
        return f"{name} is not a setting; {hint}."
    if hint := usual_hint(name, value, _as_argument):
        return f"{name} is not a setting; {hint}."
    of_section = [
        f"{section}={{{name[len(section) + 1 :]!r}: ...}}"
        for section in Config.model_fields
        if name.startswith(f"{section}_") and name[len(section) + 1 :] in _names_in(section)
    ]
    known = {*Config.model_fields, *(n for section in FLAT for n in _names_in(section))}
    near = of_section or get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "jaxrl_async.train takes all settings of a file."
    return f"{name} is not a setting; {hint}"


def _as_argument(path: str, value: object) -> str:
    """Return a setting as an argument of train: of the innermost name that may stand alone."""
    parts = path.split(".")
    first = max(i for i, p in enumerate(parts) if i == 0 or _section_of(p) == ".".join(parts[:i]))
    for part in reversed(parts[first + 1 :]):
        value = {part: value}
    return f"{parts[first]}={value!r}"


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one; where both have a value the new one counts."""
    joined = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(joined.get(key), Mapping)
        joined[key] = _joined(joined[key], value) if both else value
    return joined


def _model_folder(model: object, folder: Path) -> str:
    """Return the directory of a model; a policy is written to one. Raises ConfigError."""
    if isinstance(model, str | Path):
        return str(model)
    if not isinstance(model, Policy):
        raise ConfigError(
            f"train: model is a {type(model).__name__}. Give a directory, a Policy, or settings of "
            f"the section model ({', '.join(sorted(_names_in('model')))})."
        )
    if model.tokenizer is None:
        raise ConfigError(
            "train: the policy has no tokenizer. Give Policy(..., tokenizer=...), or load it from "
            "a directory that has one."
        )
    model.merged().save_pretrained(folder / "model")
    return str(folder / "model")


def _rewards_of(
    reward: Reward | Sequence[Reward] | None,
) -> tuple[tuple[Callable[..., Any], ...], list[Any]]:
    """Return the rewards that are functions, and those that are names."""
    if reward is None:
        return (), []
    single = isinstance(reward, str | Mapping) or callable(reward)
    each: list[Any] = list(reward) if isinstance(reward, Sequence) and not single else [reward]
    wrong = [r for r in each if not (isinstance(r, str | Mapping) or callable(r))]
    if wrong:
        raise ConfigError(
            f"train: reward has a {type(wrong[0]).__name__}. Give functions or names, or a list."
        )
    return tuple(r for r in each if callable(r)), [r for r in each if not callable(r)]


def _task_of(task: object) -> str | Mapping[str, Any] | Task | None:
    """Return a task, or the name of one; a class of environments or games becomes a task."""
    if task is None or isinstance(task, str | Mapping | Task):
        return task
    if inspect.isclass(task) and issubclass(task, Environment):
        return Task(environment=task)
    if inspect.isclass(task) and issubclass(task, Game):
        return Task(game=task)
    raise ConfigError(
        f"train: task is a {type(task).__name__}. Give a Task, an Environment or Game class, or a "
        "name as in a configuration."
    )


def _with_tools(task: Any, tools: Sequence[Tool]) -> Any:
    """Return a task, or a new one, with these tools in addition. Raises ConfigError."""
    if callable(tools) or isinstance(tools, str):
        raise ConfigError(f"train: tools is a {type(tools).__name__}. Give a list of functions.")
    if not tools:
        return task
    for tool in tools:
        tool_schema(tool)  # refuses what is no tool
    if isinstance(task, str | Mapping):
        raise ConfigError(
            "train: a task by name has its own tools, and takes no others. Give the task as an "
            "object, or leave tools out."
        )
    task = task or Task()
    if task.program is not None or task.game is not None:
        raise ConfigError("train: a program or a game calls no tools. Leave tools out.")
    return dataclasses.replace(task, tools=(*task.tools, *tools))


def _with_records(task: Task, inputs: TrainInputs, columns: Mapping[str, str]) -> Task:
    if task.records is not None:
        raise ConfigError("train: the task has records, and data gives others. Leave one out.")
    asks = not (task.environment or task.game or task.program)  # otherwise they ask the question
    train = _renamed(_records(inputs.data, "data", plain=asks), columns, "data", asks=asks)
    held_out = None
    if inputs.eval_data is not None:
        held_out = _records(inputs.eval_data, "eval_data", plain=asks)
        held_out = _renamed(held_out, columns, "eval_data", asks=asks)
    return dataclasses.replace(task, records=train, held_out=held_out)


def _taken_columns(tree: dict[str, Any]) -> dict[str, str]:
    """Take the names of columns out of data.jsonl, which a task's records do not read: return the
    column that a task looks for, and the records' own name of it."""
    data = tree.get("data") or {}
    jsonl = dict(data.get("jsonl") or {})
    columns = {
        column: jsonl.pop(setting)
        for column, setting in COLUMNS.items()
        if isinstance(jsonl.get(setting), str)
    }
    if columns:
        tree["data"] = {**data, "jsonl": jsonl or None}
    return columns


def _renamed(
    records: Sequence[Mapping[str, object]], columns: Mapping[str, str], name: str, *, asks: bool
) -> list[dict[str, Any]]:
    """Return records with the columns that a task reads, in addition to their own; asks: each
    needs a question. Raises DataError."""
    named = [columns[c] for c in ("prompt", "messages") if c in columns]
    usual = QUESTIONS if asks else ()
    renamed = []
    for index, record in enumerate(records):
        values = {column: record[own] for column, own in columns.items() if own in record}
        question = next((c for c in ("prompt", "messages") if c in values), None)
        missing = [] if question or not named else named
        if not question and not named and usual and all(record.get(c) is None for c in usual):
            missing = list(usual)
        if "answer" in columns and "answer" not in values:
            missing = [*missing, columns["answer"]]
        if missing:
            raise DataError(
                f"train: {name}[{index}] has no column {' or '.join(map(repr, missing))}, only "
                f"{', '.join(map(str, record))}. Correct it, or prompt_field, messages_field or "
                "answer_field."
            )
        if question == "prompt":  # what is named counts before messages
            record = {key: value for key, value in record.items() if key != "messages"}
            values.pop("messages", None)
        renamed.append({**record, **values})
    return renamed


def _records(data: object, name: str, *, plain: bool = True) -> list[dict[str, Any]]:
    """Return records as dicts; a text is a prompt. plain: without columns of bytes and durations,
    which no checkpoint can hold. Raises DataError."""
    if isinstance(data, Mapping):
        raise DataError(
            f"train: {name} is a mapping of {', '.join(map(repr, data))}. Give a list of records; "
            f"of a data set with splits give one of them, such as {name}['train']."
        )
    is_table = hasattr(data, "column_names") or hasattr(data, "columns")
    data = _rows_of_table(data)
    if not isinstance(data, Iterable):
        raise DataError(
            f"train: {name} is a {type(data).__name__}. Give records in a list, a dataset, or the "
            "path of a file."
        )
    records: list[dict[str, Any]] = []
    for index, record in enumerate(data):
        if isinstance(record, str):
            record = {"prompt": record}
        if not isinstance(record, Mapping):
            raise DataError(
                f"train: {name}[{index}] is a {type(record).__name__}. Give a mapping, such as "
                '{"question": ..., "answer": ...}, or a text.'
            )
        tidy = without_nulls if is_table else lambda value: value
        records.append({name: tidy(value) for name, value in record.items()})
    if not records:
        raise DataError(f"train: {name} is empty. Give at least two records.")
    return _without_bytes(records, name) if plain else records


def _without_bytes(records: list[dict[str, object]], name: str) -> list[dict[str, Any]]:
    """Return records without the columns of bytes or durations, which are logged."""
    strange = {key for record in records for key, value in record.items() if _holds_bytes(value)}
    if not strange:
        return records
    log.warning(
        "train: %s: left out the columns %s: they hold bytes or durations. Write them as text or "
        "numbers if something asks for them.",
        name,
        ", ".join(map(repr, sorted(map(str, strange)))),
    )
    return [{k: v for k, v in record.items() if k not in strange} for record in records]


def _holds_bytes(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_bytes, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "OSVm" and any(map(_holds_bytes, value.ravel().tolist()))
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes | bytearray | memoryview | timedelta)


def _rows_of_table(data: object) -> Any:
    """Return the rows of a data frame (pandas, polars) or an Arrow table, which iterate over their
    columns; all else as it is. An empty cell is None, which pandas writes as not a number."""
    if hasattr(data, "columns") and hasattr(data, "to_dicts"):
        return data.to_dicts()
    if hasattr(data, "columns") and hasattr(data, "to_dict"):
        return _rows_of_frame(data)
    if hasattr(data, "column_names") and hasattr(data, "to_pylist"):
        names = list(data.column_names)
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(
                f"train: two columns of the table are named {twice[0]!r}. Rename or drop one."
            )
        return data.to_pylist()
    return data


def _rows_of_frame(data: Any) -> list[dict[str, Any]]:
    """Return the rows of a pandas data frame. A whole number next to an empty cell, for which
    pandas makes the column one of floats, is a whole number again. Raises DataError."""
    if not data.columns.is_unique:
        twice = data.columns[data.columns.duplicated()][0]
        raise DataError(
            f"train: two columns of the data frame are named {twice!r}. Rename or drop one."
        )
    filled, columns = data.notna(), {}
    for name in data.columns:
        is_float = getattr(data[name].dtype, "kind", "") == "f"
        cells = [v if ok else None for v, ok in zip(data[name].tolist(), filled[name], strict=True)]
        present = [cell for cell in cells if cell is not None]
        if is_float and len(present) < len(cells) and all(float(v).is_integer() for v in present):
            cells = [None if cell is None else int(cell) for cell in cells]
        columns[name] = cells
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _put_files(tree: dict[str, Any], inputs: TrainInputs, folder: Path) -> None:
    """Have the configuration read data from files; records are written to some."""
    if inputs.data is None:
        return
    data = tree.setdefault("data", {})
    jsonl = data["jsonl"] = dict(data.get("jsonl") or {})
    data["addition"] = None
    for name, key, records in (
        ("data", "path", inputs.data),
        ("eval_data", "eval_path", inputs.eval_data),
    ):
        if isinstance(records, str | Path):
            jsonl[key] = str(records)
        elif records is not None:
            file = folder / f"{name}.jsonl"
            _write_records(file, _records(records, name), name)
            jsonl[key] = str(file)


def _write_records(file: Path, records: Sequence[Mapping[str, object]], name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    except (TypeError, ValueError) as error:
        raise DataError(f"train: {name} cannot be written as JSON lines: {error}.") from None
    file.write_text("".join(lines), encoding="utf-8")

"""The model card of a trained policy for the Hugging Face hub, made from the run's folder.

config.yaml     settings that differ from the defaults, names of the base and of the records
metrics.jsonl   rewards and accuracy over the steps
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async import __version__
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config, name_of
from jaxrl_async.config.several import differences
from jaxrl_async.data.hub import hub_name_of, hub_records, is_hub_name
from jaxrl_async.host import version_of
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.folder import Paths

ROWS = 9
"""Maximum number of rows of the table of results."""
SHOWN = ("eval/reward", "eval/accuracy", "reward/mean", "eval/loss", "train/loss")
"""Metrics in the table, if a run has them."""
PACKAGES = ("jax", "flax", "optax", "transformers")
PRIVATE = (
    *("dir", "key", "certificate", "authority", "url", "urls", "uri", "host", "server"),
    *("advertise", "listen", "coordinator", "prometheus"),
)
"""Words in the names of settings whose values are specific to one machine: left out."""
ADDRESS_LIKE = re.compile(r"\S*://\S*")
"""Addresses, also as openenv:http://...: left out as well, since they may contain a password."""


def model_card(paths: Paths, *, step: int | None = None, adapter: bool = False) -> str:
    """Return the card, README.md with its front matter. Raises ConfigError for a configuration that
    cannot be read.

    Args:
        paths: paths of the run.
        step: step of the checkpoint; None: the end of the run.
        adapter: whether the card is for the adapter alone.
    """
    config, lines = load(paths.config), read_lines(paths.metrics)
    lines = [x for x in lines if step is None or x["step"] <= step]
    front = yaml.safe_dump(_front(config, adapter=adapter), sort_keys=False, allow_unicode=True)
    settings = yaml.safe_dump(_own_settings(config), sort_keys=False, allow_unicode=True)
    made = lines[-1]["step"] if lines else 0
    parts = [
        f"---\n{front}---\n",
        f"# {config.run.name}\n",
        f"{_kind(config, adapter=adapter)}: {made} updates by jaxrl_async {__version__}.\n",
        "## Results\n",
        _table(lines),
        "## Settings that differ from the defaults\n",
        f"```yaml\n{settings}```\n",
        "## Versions\n",
        ", ".join(f"{name} {found}" for name in PACKAGES if (found := version_of(name))) + ".\n",
    ]
    return "\n".join(parts)


def _front(config: Config, *, adapter: bool) -> dict[str, Any]:
    base = _base(config)
    paths = (one.data.records_path or "" for one in config.by_task.values())
    records = [found.name for path in paths if (found := hub_records(path)) is not None]
    how = {"rl": "reinforcement-learning", "preference": "preference-optimization"}
    return {
        **({"base_model": base} if base else {}),
        **({"datasets": [*dict.fromkeys(records)]} if records else {}),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["jaxrl_async", how.get(config.run.job, config.run.job), *_recipe(config)],
    }


def _base(config: Config) -> str | None:
    """Return the hub's name of the model that was trained, if it has one."""
    path = config.model.path
    name = None if path is None else hub_name_of(path)
    return name if name is not None and (name != path or is_hub_name(name)) else None


def _recipe(config: Config) -> list[str]:
    """Return the names of the algorithms of the training."""
    if config.run.job == "preference":
        return [name_of(config.preference.loss)]
    if config.run.job != "rl":
        return []
    names = [name_of(c) for c in (config.algorithm.advantage, config.algorithm.loss)]
    return [n for n in names if "/" not in n and ".py" not in n]


def _kind(config: Config, *, adapter: bool) -> str:
    base = _base(config)
    of_base = f" of [{base}](https://huggingface.co/{base})" if base else ""
    what = f"An adapter{of_base}" if adapter else f"A policy{of_base}"
    job = {"rl": "trained by reinforcement learning", "sft": "fine-tuned on answers"}
    return f"{what}, {job.get(config.run.job, f'trained by run.job={config.run.job}')}"


def _table(lines: Sequence[Mapping[str, object]]) -> str:
    """Return a table of ROWS steps, the first and the last among them."""
    names = [n for n in SHOWN if any(n in line for line in lines)]
    held_out = [x for x in lines if any(n.startswith("eval/") and n in x for n in names)]
    rows = held_out or [x for x in lines if any(n in x for n in names)]
    if not rows:
        return "Nothing was measured.\n"
    chosen = sorted({round(i * (len(rows) - 1) / (ROWS - 1)) for i in range(ROWS)})
    head = f"| step | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}\n"
    body = "".join(
        f"| {rows[i]['step']} | {' | '.join(_number(rows[i].get(n)) for n in names)} |\n"
        for i in chosen
    )
    return head + body


def _number(value: object) -> str:
    return "" if value is None else f"{value:.4g}"


def _own_settings(config: Config) -> dict[str, Any]:
    """Return settings that differ from the defaults, without those specific to one machine."""
    own = config.model_copy(update={"runs": {}})
    changed = json.loads(json.dumps(differences(Config().model_dump(), own.model_dump())))
    base = _base(config)
    if base is not None:
        changed["model"]["path"] = base
    shown = _public(changed)
    return shown if isinstance(shown, dict) else {}


def _public(value: object) -> Any:
    """Return settings without those specific to one machine and without addresses; absolute paths
    are cut to their last part."""
    if isinstance(value, dict):
        shown = {k: v for k, v in value.items() if not (_is_private(k) or _is_address(v))}
        kept = {_public(k): _public(v) for k, v in shown.items()}
        return {k: v for k, v in kept.items() if v != {}}
    if isinstance(value, list):
        return [_public(each) for each in value if not _is_address(each)]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _is_private(name: str) -> bool:
    return bool(set(name.split("_")) & set(PRIVATE)) or _is_address(name)


def _is_address(value: object) -> bool:
    return isinstance(value, str) and ADDRESS_LIKE.fullmatch(value) is not None

"""Plan a run from Python: what `jaxrl-async plan` prints and writes, as an object.

The compilers for TPUs and for NVIDIA cards run in a separate process, however this one uses JAX.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_async.config.load import dump, load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, JaxrlError

log = logging.getLogger(__name__)

PACKAGES = Path(__file__).parents[2]
"""Where jaxrl_async is imported from."""
BAD_CONFIGURATION = 2
"""Exit code of the command line for a ConfigError."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The plan of a run; printed, it is the text."""

    text: str
    """The plan for people, and what to change where it does not fit."""
    numbers: Mapping[str, Any] = field(repr=False)
    """All of its numbers, in SI units and bytes, as `jaxrl-async plan --json` writes them."""

    @property
    def fits(self) -> bool:
        """Whether the compiler accepts every program and both sides' memory is enough."""
        return bool(self.numbers["fits"])

    def __str__(self) -> str:
        return self.text


def plan(
    config: str | Path | Mapping[str, object] | Config,
    topology: str,
    *,
    overrides: Sequence[str] = (),
    sampler_topology: str | None = None,
    lengths: str | Path | Sequence[int] | Mapping[int, float] | None = None,
    cache: str | Path | None = None,
) -> PlannedRun:
    """Compile a run's programs for TPU slices, or NVIDIA cards, that need not exist, and return its
    plan. Blocks for minutes unless they are cached. Needs libtpu, or JAX's CUDA plugin, and no
    accelerator.

    Args:
        config: a YAML file, recipe:NAME, sections, or a Config.
        topology: the trainer's slice ("v5e-64", "v5e:8x8") or cards ("h100-8"), shared with the
            samplers unless these are elsewhere (mesh.samplers_in).
        overrides: settings, as `section.key=value`.
        sampler_topology: chips of all samplers together, if they are elsewhere; None: as mesh says.
        lengths: of answers, tokens: a list, {length: weight}, or a run's folder or JSON file of
            these; None: a long-tailed distribution.
        cache: folder of compiled results; None: the usual one.

    Raises ConfigError if no plan can be made of the configuration on these slices, JaxrlError for
    other failures.
    """
    resolved = _resolved(config, overrides)
    with tempfile.TemporaryDirectory(prefix="jaxrl-plan-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump(resolved), encoding="utf-8")
        args = [str(folder / "config.yaml"), "--topology", topology]
        args += ["--json", str(folder / "plan.json")]
        if sampler_topology is not None:
            args += ["--sampler-topology", sampler_topology]
        if cache is not None:
            args += ["--cache", str(cache)]
        if lengths is not None:
            args += ["--lengths", _lengths_file(lengths, folder / "lengths.json")]
        code, text, errors = _command(args, folder / "stdout")
        if (folder / "plan.json").is_file():
            numbers = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
            return PlannedRun(text, numbers)
    if code == BAD_CONFIGURATION:
        raise ConfigError(f"plan: {errors.partition('config error: ')[2] or errors}")
    raise JaxrlError(f"plan: {errors or f'the command ended with exit code {code}'}")


def _resolved(
    config: str | Path | Mapping[str, object] | Config, overrides: Sequence[str]
) -> Config:
    if isinstance(config, Config):
        return load(config.model_dump(), overrides, where="plan") if overrides else config
    return load(config, overrides, where="plan")


def _lengths_file(lengths: Any, file: Path) -> str:
    """Return the path of a file or folder of lengths; those in memory are written to `file`."""
    if isinstance(lengths, str | Path):
        return str(lengths)
    whole = dict(lengths) if isinstance(lengths, Mapping) else list(lengths)
    file.write_text(json.dumps(whole), encoding="utf-8")
    return str(file)


def _command(args: Sequence[str], out: Path) -> tuple[int, str, str]:
    """Run the command line of the plan, its progress logged; return its exit code, what it printed,
    and the end of its output on stderr."""
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    last: list[str] = []
    with out.open("w+", encoding="utf-8") as printed:
        with subprocess.Popen(
            [sys.executable, "-m", "jaxrl_async.plan", *args],
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                log.info("%s", line.rstrip())
                last = [*last[-19:], line]
        return process.returncode, out.read_text(encoding="utf-8").rstrip(), "".join(last).strip()

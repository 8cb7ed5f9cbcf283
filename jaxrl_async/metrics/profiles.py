"""Location of the traces of JAX's profiler (run.profile) in a run's folder, in XProf's layout.

profile/plugins/profile/step_3/trainer.xplane.pb        xprof --logdir RUN/profile
                               trainer.trace.json.gz    https://ui.perfetto.dev
                               sampler-0.xplane.pb      a host of the same session for XProf
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = "profile"
"""Folder to open with XProf and TensorBoard, in the run's folder."""
SESSIONS = f"{FOLDER}/plugins/profile"
"""Folder of the sessions, one for each step, in which both tools look."""
SUFFIXES = (".xplane.pb", ".trace.json.gz")
"""Suffixes of a trace's two files; their names begin with the name of the process."""
_STEP = re.compile(r"step_(\d{1,18})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def write_trace(root: Path, step: int, process: str, files: Mapping[str, bytes]) -> None:
    """Write the trace of a process during a step into a run's folder. Raises OSError.

    files: their content, by SUFFIXES.
    """
    folder = root / SESSIONS / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    name = _file_name(process)
    for suffix in SUFFIXES:
        part = folder / f".{name}{suffix}"
        part.write_bytes(files[suffix])
        os.replace(part, folder / f"{name}{suffix}")


def sampler_process(name: str) -> str:
    """Return the name of a sampler's traces: the sampler's own name, unless that could be the
    trainer's
    (trainer, trainer-0, trainer-update), or the new name of another such sampler."""
    own = _file_name(name)
    return f"sampler-{own}" if re.match(r"(sampler-)*trainer", own) else own


def _file_name(process: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", process).lstrip(".")[:100] or "process"


def traces_of(root: Path) -> list[tuple[int, str, int]]:
    """Return the step, the path relative to the run's folder, and the size in bytes of each trace
    for Perfetto, by step and process."""
    found = []
    for path in root.glob(f"{SESSIONS}/*/*{SUFFIXES[1]}"):
        step = _STEP.fullmatch(path.parent.name)
        if step and _NAME.fullmatch(path.name) and path.is_file():
            found.append((int(step[1]), path.relative_to(root).as_posix(), path.stat().st_size))
    return sorted(found)

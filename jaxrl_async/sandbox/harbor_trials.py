"""Plays trials of Harbor for a run, with Harbor's own package. Harbor's Python runs it as a script.

    run ──{id, config, environ}──> this process, which has imported Harbor ──fork──> one trial
        <──{id, rewards, error}──                                               <──file──┘

Requests and replies are lines of JSON on stdin and stdout. Each trial is a process of its own, so
that it has its session's variables, and ends with all it has started. {id, cancel} ends a trial.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CANCEL_S = 20.0
"""Time for a cancelled trial to remove its environment, seconds; then it is killed."""
LOOK_S = 0.2
CALM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0", "DO_NOT_TRACK": "1"}
"""Variables that keep LiteLLM and Harbor from calling their own servers."""


def find_package() -> None:
    """Make jaxrl_async importable without the packages of the run's Python."""
    folder = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location(
        "jaxrl_async", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, "the package is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules["jaxrl_async"] = module
    spec.loader.exec_module(module)


def preload() -> None:
    """Import what every trial needs."""
    import harbor.agents.terminus_2
    import harbor.trial.single_step
    import harbor.trial.trial  # noqa: F401

    import jaxrl_async.sandbox.harbor_environment  # noqa: F401


async def run_trial(config: Mapping[str, object]) -> dict[str, Any]:
    """Play a trial; return what the run needs of its result."""
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    trial = await Trial.create(TrialConfig.model_validate(config))
    work = asyncio.ensure_future(trial.run())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    result = await work
    errors = [
        {"type": e.exception_type, "message": e.exception_message}
        for e in result.recorded_exceptions()
    ]
    rewards = None if result.verifier_result is None else result.verifier_result.rewards
    return {"rewards": rewards, "errors": errors}


def play(request: dict[str, Any], file: str) -> None:
    """Play a trial in this process, and leave its result in a file. Never returns."""
    os.setsid()
    log = os.open(file + ".log", os.O_CREAT | os.O_WRONLY, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(request["environ"])
        try:
            result = asyncio.run(run_trial(request["config"]))
        except BaseException as error:
            result = {
                "rewards": None,
                "errors": [{"type": type(error).__name__, "message": str(error)}],
            }
        Path(file + ".new").write_text(json.dumps(result))
        os.replace(file + ".new", file)
        code = 0
    finally:
        os._exit(code)


class Trials:
    """The trials that are played."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.running: dict[int, tuple[int, str]] = {}  # by process: the request's id, its file
        self.killed_at: dict[int, float] = {}

    def start(self, request: dict[str, Any]) -> None:
        """Start a trial."""
        file = os.path.join(self.folder, str(request["id"]))
        pid = os.fork()
        if pid == 0:
            play(request, file)
        self.running[pid] = (request["id"], file)

    def cancel(self, number: int) -> None:
        """Terminate a trial."""
        for pid, (other, _) in self.running.items():
            if other == number:
                self.killed_at.setdefault(pid, time.monotonic() + CANCEL_S)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def look(self) -> None:
        """Kill trials that were cancelled long ago; reply for those that have ended."""
        for pid, at in list(self.killed_at.items()):
            if time.monotonic() > at:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in self.running:
                    self.reply(*ended)

    def reply(self, pid: int, status: int) -> None:
        """Send a trial's reply."""
        number, file = self.running.pop(pid)
        self.killed_at.pop(pid, None)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it left behind
        try:
            reply = json.loads(Path(file).read_text())
        except (OSError, ValueError):
            tail = ""
            with contextlib.suppress(OSError):  # it may have ended before it had a log
                tail = Path(file + ".log").read_bytes()[-400:].decode(errors="replace")
            message = f"its process ended with status {status}: {tail}"
            reply = {"rewards": None, "errors": [{"type": "TrialProcessError", "message": message}]}
        for path in (file, file + ".log"):
            with contextlib.suppress(OSError):
                os.unlink(path)
        send({"id": number, **reply})


def send(message: Mapping[str, object]) -> None:
    """Send a message to the run."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the run closes its end."""
    os.environ.update(CALM)
    find_package()
    preload()
    import harbor

    folder = tempfile.mkdtemp(prefix="jaxrl-harbor-")
    trials, arrived = Trials(folder), b""
    send({"ready": getattr(harbor, "__version__", "")})
    try:
        while True:
            if select.select([0], [], [], LOOK_S if trials.running else None)[0]:
                data = os.read(0, 1 << 20)
                if not data:
                    return
                *lines, arrived = (arrived + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if request.get("cancel"):
                        trials.cancel(request["id"])
                    else:
                        trials.start(request)
            trials.look()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""MLflow's own server on this machine, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 120.0


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Serve a store in `folder`; give its address. Skips the test where the server's parts are not
    installed."""
    for part in ("mlflow", "flask", "flask_cors", "uvicorn"):
        pytest.importorskip(part, reason=f"the server of MLflow needs {part}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{folder / 'served.db'}"]
    at = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *at],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it starts processes, which end with it
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}", folder / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(server: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server of MLflow does not answer: {log.read_text()[-1500:]}")

"""A server of Google Cloud Storage's interface on this machine, which gcsfs reads and writes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

BUCKET = "gs://runs"
START_S = 60.0
SERVER = """
import sys
from gcp_storage_emulator.handlers import objects

answered = objects.download

def download(request, response, storage, *args, **kwargs):
    answered(request, response, storage, *args, **kwargs)
    if response.status < 300:
        params = request.params
        found = storage.get_file_obj(params["bucket_name"], params["object_id"])
        response["x-goog-generation"] = found["generation"]

objects.download = download
from gcp_storage_emulator.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""The server. It says which generation of an object it sends, as Google does: without that
TensorStore cannot write an object again that it has read, which it does under load."""


@contextmanager
def object_store() -> Iterator[Mapping[str, str]]:
    """Serve the empty bucket BUCKET; give the environment in which gs:// leads there. Skips the
    test where the server (gcp-storage-emulator) or gcsfs is not installed."""
    pytest.importorskip("gcsfs", reason="gs:// needs: pip install gcsfs")
    pytest.importorskip(
        "gcp_storage_emulator", reason="a server of gs://: pip install gcp-storage-emulator"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = ["--host", "127.0.0.1", "--port", str(port), "--default-bucket", "runs"]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, "start", "-q", "-M", *at],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(server, port)
        yield {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",  # orbax writes by it
            "GCE_METADATA_ROOT": "127.0.0.1:9",  # asks for no token
            "FSSPEC_GS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks Google itself
        }
    finally:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail("the server does not listen")


def environment(store: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with that of the store."""
    return {**os.environ, **store}

"""A small HTTP server that answers as vLLM's does, and fails as a test says."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from safetensors import safe_open

FACTS = {
    "model": "/nowhere",
    "max_model_len": 64,
    "dtype": "torch.float32",
    "logprobs_mode": "processed_logprobs",
}
"""What it says of its model, where a test says nothing else."""


class FakeVllm:
    """Draws the tokens 3, 4, 5, ... of its vocabulary, with log-prob -1/2; the lm_head of the
    weights that it has loaded last says how they are labelled, and nothing else."""

    def __init__(self, *, vocab: int = 24, token_s: float = 0.0, port: int = 0) -> None:
        """token_s: seconds between two tokens of a request."""
        self.vocab, self.token_s = vocab, token_s
        self.facts: dict[str, Any] = dict(FACTS)
        self.device = "cuda"
        self.faults: list[str] = []  # of the next answers
        self.label, self.loaded = "default", list[str]()
        self.probe: Sequence[float] = ()
        self.bodies: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.pauses: list[str] = []
        self.healthy = True
        self.connections: list[socket.socket] = []
        self._running, self._aborted = threading.Event(), 0
        self._running.set()
        self._lock = threading.Lock()
        self.on_load: Callable[[Path], None] = lambda path: None
        fake = self

        class Handler(_Handler):
            server_of = fake

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop listening, and break the connections."""
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the JSON for a call."""
        url = urlsplit(path)
        words = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/inference/v1/generate":
            return self._generate(body)
        if url.path == "/health":
            return (200, {}) if self.healthy else (503, {})
        if url.path == "/version":
            return 200, {"version": "0.32.0"}
        if url.path == "/weight_info":
            return 200, {"weight_version": self.label}
        if url.path == "/server_info":
            device = {"device": self.device}
            return 200, {"vllm_config": {"model_config": self.facts, "device_config": device}}
        if url.path == "/pause":
            return self._pause(words["mode"])
        if url.path == "/resume":
            self._running.set()
            return 200, {"status": "resumed"}
        if url.path == "/collective_rpc" and body["method"] == "reload_weights":
            return self._load(Path(body["kwargs"]["weights_path"]))
        if url.path == "/update_weight_version":
            assert not self._running.is_set(), "labels change only while it is paused"
            self.label = body["new_version"]
            return 200, {"success": True}
        return 404, {"detail": "Not Found"}

    def _pause(self, mode: str) -> tuple[int, Any]:
        self.pauses.append(mode)
        if mode == "abort":
            self._aborted += 1
        while mode == "wait" and self.at_once:
            time.sleep(0.002)
        self._running.clear()
        return 200, {"status": "paused"}

    def _load(self, path: Path) -> tuple[int, Any]:
        if not (path / "model.safetensors").exists():
            return 500, {"error": {"message": f"Worker failed with error 'no {path}'"}}
        with safe_open(path / "model.safetensors", framework="numpy") as file:
            assert "lm_head.weight" in file.keys()  # noqa: SIM118
        self.on_load(path)
        self.loaded.append(path.name)
        return 200, {"results": [None]}

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        params = body["sampling_params"]
        if wrong := [t for t in params.get("stop_token_ids", ()) if t >= self.vocab]:
            message = f"stop_token_ids {wrong} ... Vocabulary size: {self.vocab}"
            return 400, {"error": {"message": message}}
        if "prompt_logprobs" in params:
            pairs = zip(body["token_ids"][1:], self.probe, strict=True)
            entries = [{str(t): {"logprob": p}} for t, p in pairs]
            return 200, {"prompt_logprobs": [None, *entries], "choices": []}
        with self._lock:
            self.bodies.append(body)
            fault = self.faults.pop(0) if self.faults else ""
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self._draw(body, fault)
        finally:
            with self._lock:
                self.at_once -= 1

    def _draw(self, body: dict[str, Any], fault: str) -> tuple[int, Any]:
        if fault.isdigit():
            return int(fault), {"error": {"message": f"as the test says: {fault}"}}
        params, tokens, labels, aborted = body["sampling_params"], [], [], self._aborted
        if fault == "slow":
            time.sleep(2.0)
        while len(tokens) < params["max_tokens"] and aborted == self._aborted:
            time.sleep(self.token_s)
            self._running.wait()
            if aborted != self._aborted:
                break
            tokens.append(3 + len(tokens) % (self.vocab - 3))
            labels.append(self.label)
            if tokens[-1] in params["stop_token_ids"]:
                break
        starts = [i for i, each in enumerate(labels) if i == 0 or each != labels[i - 1]]
        ends = [*starts[1:], len(labels)][: len(starts)]
        spans = [
            {"version": labels[s], "start": s, "end": e} for s, e in zip(starts, ends, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": "abort" if aborted != self._aborted else "length",
            "token_ids": tokens,
            "weight_versions": spans,
            "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in tokens]},
        }
        return 200, {"choices": [self._spoilt(choice, fault)]}

    def _spoilt(self, choice: dict[str, Any], fault: str) -> dict[str, Any]:
        content = choice["logprobs"]["content"]
        if fault == "short":
            content.pop()
        elif fault == "early":
            content.pop()
            choice["token_ids"].pop()
            choice["weight_versions"][-1]["end"] -= 1
        elif fault == "more":
            choice["token_ids"].append(3)
            content.append({"token_id": 3, "logprob": -0.5})
            choice["weight_versions"][-1]["end"] += 1
        elif fault == "nan":
            content[0]["logprob"] = -9999.0
        elif fault == "null":
            content[0]["logprob"] = None
        elif fault == "other token":
            content[0]["token_id"] += 1
        elif fault == "foreign":
            choice["weight_versions"][0]["version"] = "default"
        elif fault == "unlabelled":
            choice["weight_versions"] = None
        elif fault == "huge":
            choice["padding"] = "x" * 2**20
        return choice


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: FakeVllm

    def setup(self) -> None:
        super().setup()
        self.server_of.connections.append(self.connection)

    def do_GET(self) -> None:
        self._answer("GET", None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._answer("POST", json.loads(self.rfile.read(length)) if length else None)

    def _answer(self, method: str, body: Any) -> None:
        fake = self.server_of
        dies = self.path.endswith("generate") and fake.faults[:1] == ["dies"]
        garbage = self.path.endswith("generate") and fake.faults[:1] == ["garbage"]
        status, content = fake.answer(method, self.path, body)
        data = b"<html>" if garbage else json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if dies else data)
            if dies:
                self.close_connection = True
        except OSError:
            self.close_connection = True  # the client has gone

    def log_message(self, *args: Any) -> None:
        """Stay quiet."""

"""A small HTTP server that knows the log-probs of any prompt's tokens, and fails as a test says.

Its model is a table: the next token depends on the last one alone. With a port it can be started
again where another one was closed.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

Body = dict[str, Any]


class FakeTeacher:
    """Answers /v1/completions, /inference/v1/generate and /tokenize as vLLM does."""

    def __init__(self, vocab: int, seed: int, *, port: int = 0) -> None:
        logits = np.random.default_rng(seed).normal(size=(vocab, vocab)) * 2
        self.table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # [last, next] float64
        self.faults: list[str] = []  # of the next answers: a status, hang, garbage or short
        self.bodies: list[tuple[str, Body, str | None]] = []  # path, body, key
        self.at_once = self.most_at_once = 0
        self.pause_s = 0.0
        self.tokenize: Callable[[str], list[int]] | None = None  # None: it has no such route
        self.closing = threading.Event()
        self._lock = threading.Lock()
        fake = self

        class Handler(_Handler):
            server_of = fake

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> "FakeTeacher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def logprobs(self, token_ids: Any) -> np.ndarray:
        """Return the log-prob of each token but the first, [n - 1] float64."""
        ids = np.asarray(token_ids)
        return self.table[ids[:-1], ids[1:]]

    def positions(self, ids: list[int], k: int) -> list[Body | None]:
        """Return vLLM's prompt_logprobs: the k likeliest tokens and the token itself."""
        found: list[Body | None] = [None]
        for last, own in itertools.pairwise(ids):
            order = np.argsort(-self.table[last], kind="stable")
            ranks = {int(token): rank for rank, token in enumerate(order, 1)}
            found.append(
                {
                    str(token): {"logprob": self.table[last, token], "rank": ranks[token]}
                    for token in {own, *(int(t) for t in order[:k])}
                }
            )
        return found


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeTeacher
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        fake = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake._lock:
            fake.bodies.append((self.path, body, self.headers.get("Authorization")))
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
            fault = fake.faults.pop(0) if fake.faults else ""
        time.sleep(fake.pause_s)
        if fault == "hang":
            fake.closing.wait(10)
        with fake._lock:
            fake.at_once -= 1
        with contextlib.suppress(OSError):  # the caller has gone
            self._answer(fault, body)

    def _answer(self, fault: str, body: Body) -> None:
        fake = self.server_of
        if fault.isdigit():
            self._send(int(fault), {"error": {"message": "not now"}})
        elif fault == "garbage":
            self._send(200, {"choices": [{"text": "hm"}]})
        elif self.path == "/tokenize":
            if fake.tokenize is None:
                self._send(404, {"error": "no such route"})
            else:
                self._send(200, {"tokens": fake.tokenize(body["prompt"])})
        elif self.path == "/inference/v1/generate":
            k = body["sampling_params"]["prompt_logprobs"]
            self._send(200, {"prompt_logprobs": fake.positions(body["token_ids"], k)})
        elif body.get("echo"):
            found = [None, *fake.logprobs(body["prompt"]).tolist(), -0.5]
            self._send(200, {"choices": [{"logprobs": {"token_logprobs": found}}]})
        else:
            k = body["prompt_logprobs"] - (fault == "short")
            found = fake.positions(body["prompt"], k)
            self._send(200, {"choices": [{"prompt_logprobs": found}]})

    def _send(self, status: int, content: Body) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

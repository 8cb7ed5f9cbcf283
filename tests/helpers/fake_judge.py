"""A small HTTP server that answers as an OpenAI-compatible endpoint, and fails as a test says."""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


class FakeJudge:
    """Gives each answer as many points as it has letters `a`, by the form that it is asked for."""

    def __init__(self) -> None:
        self.faults: list[str] = []  # of the next answers: a status, slow, hang, garbage, half, ...
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.retry_after = "0.05"
        self.pause_s = 0.0  # before each answer
        self.judge: Callable[[str], float] = lambda text: float(text.count("a"))
        self.closing = threading.Event()
        self._lock = threading.Lock()
        fake = self

        class Handler(_Handler):
            server_of = fake

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> "FakeJudge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_fault(self, body: Body, key: str | None) -> str:
        """Take note of a call; return what goes wrong with it, empty: nothing."""
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            return self.faults.pop(0) if self.faults else ""

    def done(self) -> None:
        """Take note of a call's end."""
        with self._lock:
            self.at_once -= 1

    def reply(self, body: Body) -> str:
        """Return what a judge says that keeps to the form."""
        system, user = (message["content"] for message in body["messages"][:2])
        blocks = re.findall(r"<(?:answer|step)-[\w-]+>\n(.*?)\n</", user, re.DOTALL)
        if "a number alone" in system:
            return f"Let me see.\n{self.judge(blocks[0])}"
        names = re.findall(r"^- (\w+): ", system, re.MULTILINE)
        rows = [dict.fromkeys(names, self.judge(b)) if names else self.judge(b) for b in blocks]
        many = '"1":' in system
        given = {str(i): row for i, row in enumerate(rows, 1)} if many else rows[0]
        return f"First I reason {{so}}.\n```json\n{json.dumps(given)}\n```"


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeJudge
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        fake = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = fake.next_fault(body, self.headers.get("Authorization"))
        time.sleep(fake.pause_s)
        fake.done()  # before the caller can know it
        with contextlib.suppress(OSError):  # the caller has gone
            self._answer(fault, body)

    def _answer(self, fault: str, body: Body) -> None:
        fake = self.server_of
        if fault == "hang":
            fake.closing.wait(10)
        if fault == "slow":
            time.sleep(0.6)
        if fault.isdigit():
            headers = {"Retry-After": fake.retry_after} if fault == "429" else {}
            self._send(int(fault), b'{"error": {"message": "not now"}}', headers)
            return
        text = {"words": "I like it.", "many": '{"right": 11}'}.get(fault) or fake.reply(body)
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        finish = "length" if fault == "cut" else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        content = json.dumps({"choices": [choice], "usage": usage}).encode()
        if fault == "garbage":
            content = b"<html>gateway</html>"
        self._send(200, content[: len(content) // 2] if fault == "half" else content, {}, content)

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], whole: bytes | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(whole or content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()
        if whole is not None and len(whole) > len(content):
            self.close_connection = True

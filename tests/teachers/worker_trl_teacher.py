"""TRL's own teacher client against a server. Run with TRL's interpreter:

    worker_trl_teacher.py ADDRESS TOP_K PROMPT_IDS COMPLETION_IDS

Prints {version, model, ids, logprobs} as JSON: what the rollout worker of AsyncDistillationTrainer
reads. The worker is made without its constructor, which wants a dataset and vLLM; its requests,
retries and reading of answers are TRL's code. Where aiohttp is not installed, a stand-in sends the
requests, with the key of the address as aiohttp does.
"""

import asyncio
import base64
import json
import sys
import urllib.parse
import urllib.request
from typing import Any

import trl
from accelerate import PartialState
from trl.experimental.async_distillation import async_rollout_worker as worker


class Answer:
    """A response as aiohttp's."""

    def __init__(self, url: str, body: Any = None) -> None:
        parts = urllib.parse.urlsplit(url)
        plain = parts._replace(netloc=f"{parts.hostname}:{parts.port}").geturl()
        data = None if body is None else json.dumps(body).encode()
        password = urllib.parse.unquote(parts.password or "")
        login = base64.b64encode(f"{parts.username}:{password}".encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
        self.request = urllib.request.Request(plain, data, headers)
        self.content = b""

    async def __aenter__(self) -> "Answer":
        with urllib.request.urlopen(self.request) as reply:  # raises for a status of 400 and more
            self.content = reply.read()
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def raise_for_status(self) -> None: ...

    async def json(self) -> Any:
        return json.loads(self.content)


class Session:
    """Stands where aiohttp's session would."""

    def get(self, url: str, timeout: Any = None) -> Answer:
        return Answer(url)

    def post(self, url: str, json: Any, timeout: Any = None) -> Answer:
        return Answer(url, json)


class Http:
    """Stands where the module aiohttp would."""

    @staticmethod
    def ClientTimeout(total: float) -> None: ...


async def main(address: str, top_k: int, prompt: list[int], completion: list[int]) -> None:
    one = object.__new__(worker._AsyncRolloutLoop)
    one.teacher_server_urls = {"default": address}
    one.teacher_model_names = {}
    one.teacher_top_k, one.teacher_temperature, one.request_timeout = top_k, 1.0, 60
    has_aiohttp = hasattr(worker, "aiohttp")
    if not has_aiohttp:
        worker.aiohttp = Http
    one.session = worker.aiohttp.ClientSession() if has_aiohttp else Session()
    await one._resolve_teacher_model_names()
    model = one.teacher_model_names["default"]
    ids, logprobs = await one._score_with_teacher(prompt, completion, address, model)
    if has_aiohttp:
        await one.session.close()
    found = {"version": trl.__version__, "model": model, "ids": ids, "logprobs": logprobs}
    print(json.dumps(found))


if __name__ == "__main__":
    address, top_k, *both = sys.argv[1:]
    PartialState(cpu=True)  # for its log
    asyncio.run(main(address, int(top_k), *map(json.loads, both)))

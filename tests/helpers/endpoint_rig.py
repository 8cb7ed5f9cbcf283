"""An endpoint and its clients, for tests; and a sampler that says what it is told."""

import asyncio
from dataclasses import dataclass, replace

import anthropic
import httpx
import jax
import numpy as np
import openai
from chat_tokenizers import CHATML, byte_tokenizer

from jaxrl_async.config import schema
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.http_server import Endpoint
from jaxrl_async.endpoint.sampling_request import CallerLimits
from jaxrl_async.endpoint.service import EndpointLimits, EndpointService, Served
from jaxrl_async.endpoint.sessions import Sessions
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import (
    Completion,
    Partial,
    PositionLogprobs,
    Request,
    SamplingParams,
    StopReason,
)

KEY = "a guest's key"
SECTION = schema.SamplerSection(slots=4, max_length=128, max_new_tokens=96, block=4, page_tokens=16)
SHAPE = schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=32)


@dataclass
class Rig:
    """A server and what is behind it."""

    endpoint: Endpoint
    service: EndpointService
    sampler: Sampler
    tokenizer: Tokenizer
    sessions: Sessions
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    http: httpx.Client

    def chat(self, **wishes):
        """The answer to one chat call; vLLM's token ids and log-probs are asked for, too."""
        wishes = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12} | wishes
        more = {"return_token_ids": True, **wishes.pop("extra_body", {})}
        return self.openai.chat.completions.create(
            model="m", logprobs=True, extra_body=more, **wishes
        )


def served_by(generate, tokenizer: Tokenizer, **changes) -> Served:
    chat = chat_format(tokenizer, None)
    terms = CallerLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=SECTION.max_new_tokens,
        max_length=SECTION.max_length,
    )
    served = Served(name="tiny", generate=generate, tokenizer=tokenizer, chat=chat, terms=terms)
    return replace(served, **changes)


def serve(generate, tokenizer, limits=None, **changes) -> Rig:
    """Start a server; its rig's `endpoint` is to be closed."""
    sessions = Sessions()
    service = EndpointService(
        served_by(generate, tokenizer, **changes),
        limits or EndpointLimits(),
        sessions=sessions,
        guest_keys=(KEY,),
    )
    endpoint = Endpoint(service).start()
    return Rig(
        endpoint=endpoint,
        service=service,
        sampler=generate,
        tokenizer=tokenizer,
        sessions=sessions,
        openai=openai.OpenAI(base_url=f"{endpoint.address}/v1", api_key=KEY, max_retries=0),
        anthropic=anthropic.Anthropic(base_url=endpoint.address, api_key=KEY, max_retries=0),
        http=httpx.Client(base_url=endpoint.address, headers={"x-api-key": KEY}),
    )


def tiny_policy() -> tuple[ModelSpec, dict]:
    size = -(-byte_tokenizer(CHATML).vocab_size // 8) * 8
    spec = ModelSpec.from_architecture(SHAPE, size)
    return spec, init_params(spec, jax.random.key(3))


def closed(rig: Rig) -> None:
    for client in (rig.openai, rig.anthropic, rig.http):
        client.close()
    rig.endpoint.close()


def told_logprobs(request, drawn) -> dict:
    """Log-probs of a Speaker: the token itself at -0.5, then ids 1, 2, ... at -1, -2, ..."""

    def positions(ids, first=()):
        likely = np.array([[token, *range(1, 30)] for token in ids], np.int32).reshape(-1, 30)
        numbers = np.array([-0.5, *range(-1, -30, -1)], np.float32)
        top, n = request.logprobs.top, len(ids)
        found = PositionLogprobs(
            logprobs=np.full(n, -0.5, np.float32),
            top_ids=likely[:, :top],
            top_logprobs=np.tile(numbers, (n, 1))[:, :top],
            id_logprobs=np.full((n, len(request.logprobs.ids)), -7.0, np.float32),
        )
        for row in first:
            found.logprobs[row], found.top_ids[row] = np.nan, -1
        return found

    told = {}
    if request.logprobs.prompt:
        told["prompt_logprobs"] = positions(request.token_ids, [0])
    if request.logprobs.top or request.logprobs.ids:
        told["top_logprobs"] = positions(drawn)
    return told


class Speaker:
    """A ports.Generate that says prescribed texts, one a request, a few tokens at a time."""

    seed = None

    def __init__(self, tokenizer: Tokenizer, texts: list[str], step: int = 3) -> None:
        self.tokenizer = Tokenizer(
            tokenizer.hf, eos_ids=tokenizer.eos_ids
        )  # for texts of any length
        self.texts, self._step = list(texts), step
        self.requests: list[Request] = []
        self._running: dict[str, tuple[Partial, np.ndarray, asyncio.Future]] = {}

    def submit_many(self, requests):
        loop, futures = asyncio.get_running_loop(), []
        for request in requests:
            self.requests.append(request)
            ids = np.append(self.tokenizer.encode(self.texts.pop(0)), self.tokenizer.eos_ids[0])
            ids, future = ids[: request.max_new_tokens].astype(np.int32), loop.create_future()
            self._running[request.request_id] = (request, ids, future)
            loop.call_later(0.01, self._draw, request.request_id, self._step)
            futures.append(future)
        return futures

    def progress(self):
        return tuple(p for p, *_ in self._running.values() if isinstance(p, Partial))

    def _draw(self, name, count):
        _, ids, future = self._running[name]
        request = next(r for r in self.requests if r.request_id == name)
        some = ids[:count]
        row = {
            "token_ids": some,
            "logprobs": -0.5 * np.ones(len(some), np.float32),
            "versions": np.zeros(len(some), np.int32),
        }
        if request.logprobs is not None:
            row |= told_logprobs(request, some)
        if future.done() or count >= len(ids):
            del self._running[name]
            if not future.done():
                ended = len(ids) and ids[-1] in request.stop_token_ids
                stop = StopReason.EOS if ended else StopReason.LENGTH
                future.set_result(Completion(request_id=name, stop=stop, **row))
            return
        self._running[name] = (Partial(request=request, seed=0, **row), ids, future)
        future.get_loop().call_later(0.03, self._draw, name, count + self._step)

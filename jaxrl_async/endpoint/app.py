"""The endpoint as an ASGI application: paths to handlers, errors in each protocol's shape.

POST /v1/chat/completions   POST /v1/messages               POST /v1/session/reward
POST /v1/completions        POST /v1/messages/count_tokens  POST /v1/session/end
GET  /v1/models             POST /inference/v1/generate     POST /v1/session/begin
POST /v1/responses          GET  /health                    POST /v1/[un]load_lora_adapter
POST /v1/session/reward_key   POST /tokenize  POST /detokenize  GET /version  GET /metrics
"""

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from jaxrl_async import __version__
from jaxrl_async.endpoint.adapter_admin import LOAD, UNLOAD, AdapterAdmin
from jaxrl_async.endpoint.anthropic_messages import messages_call
from jaxrl_async.endpoint.body_fields import BodyFields, parsed_json
from jaxrl_async.endpoint.callers import Caller
from jaxrl_async.endpoint.chat_turns import ChatTurns
from jaxrl_async.endpoint.http_errors import CallRefused, anthropic_error, openai_error
from jaxrl_async.endpoint.http_exchange import (
    ClientGone,
    HttpExchange,
    Receive,
    Scope,
    Send,
    anthropic_event,
    openai_event,
)
from jaxrl_async.endpoint.openai_chat import ChatCall, chat_call
from jaxrl_async.endpoint.openai_text import TextWriter, text_call
from jaxrl_async.endpoint.responses_call import (
    PREFIX,
    ResponsesCall,
    new_root,
    responses_call,
    root_of,
    unknown_response,
)
from jaxrl_async.endpoint.service import LONG_BODY, EndpointService, refusal_of
from jaxrl_async.endpoint.streams import (
    ChatSteps,
    Streamed,
    StreamedChat,
    StreamedMessage,
    StreamedResponse,
    StreamedText,
)
from jaxrl_async.endpoint.token_generate import token_body, token_call
from jaxrl_async.endpoint.tokenize_call import (
    detokenize_call,
    tokenize_body,
    tokenize_call,
    tokenizer_info,
)
from jaxrl_async.types import LARGEST_REWARD, Message

CONVERSATION = "x-session-id"
"""Header that names one of a guest's conversations, or one of a session's players."""
REWARD, END = "/v1/session/reward", "/v1/session/end"
"""Paths to reward and end a session; they need a separate key."""
BEGIN = "/v1/session/begin"
"""Path where external agents request a task; it needs a separate key."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METRICS_PREFIX = "jaxrl_async_endpoint_"
SHOWN_REASON = 200
"""Maximum length of an agent's reason to give up, characters; the rest is cut."""
T = TypeVar("T")
U = TypeVar("U")
Handler = Callable[[HttpExchange, Any], Awaitable[None]]


class EndpointApp:
    """The ASGI application over a EndpointService."""

    def __init__(self, service: EndpointService) -> None:
        """service: serves the calls."""
        self._service = service
        self._chats = ChatTurns(service)
        self._posts: dict[str, Handler] = {
            "/v1/chat/completions": partial(self._chat, chat_call, "chatcmpl", StreamedChat),
            "/v1/completions": self._text,
            "/v1/responses": self._responses,
            "/v1/messages": partial(self._chat, messages_call, "msg", StreamedMessage),
            "/v1/messages/count_tokens": self._count_tokens,
            "/inference/v1/generate": self._generate,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/session/reward_key": self._reward_key,
            **{REWARD: self._reward, END: self._end},
            BEGIN: self._begin,
            LOAD: partial(self._adapt, AdapterAdmin.load),
            UNLOAD: partial(self._adapt, AdapterAdmin.unload),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's call; see ASGI."""
        if scope["type"] != "http":
            raise RuntimeError(f"the endpoint does not serve {scope['type']}")
        origins = self._service.cors_origins
        exchange = HttpExchange(scope, receive, send, cors_origins=origins)
        try:
            await self._serve(exchange)
        except ClientGone:
            self._service.count(disconnected=1)
        except asyncio.CancelledError:
            await self._refuse(exchange, CallRefused("the server is closing", status=503))
        except Exception as error:
            refused = refusal_of(error)
            _clear_frames(error)
            await self._refuse(exchange, refused)

    async def _serve(self, exchange: HttpExchange) -> None:
        """Route a call to its handler."""
        path = exchange.path.rstrip("/")
        handler = self._posts.get(path)
        if exchange.method in ("GET", "HEAD") and await self._reply_to_get(exchange, path):
            return
        if exchange.method == "OPTIONS" and await exchange.reply_preflight():
            return
        if handler is None:
            raise CallRefused(f"{exchange.method} {path} is not served here", status=404)
        if exchange.method != "POST":
            raise CallRefused(f"{path} takes POST", status=405)
        if path == BEGIN:
            self._service.leases().check(exchange.key)
        elif path in (REWARD, END):
            self._service.rewarded(exchange.key)
        else:
            self._service.caller(exchange.key, None)  # check the key before reading the body
        with self._service.admitted(), self._service.holding() as hold:
            most, within_s = self._service.max_body_bytes, self._service.limits.body_s
            work = self._handled(handler, exchange, await exchange.body(most, within_s, hold))
            await self._while_connected(exchange, work)

    async def _reply_to_get(self, exchange: HttpExchange, path: str) -> bool:
        """Answer a GET or HEAD; return False for a path that has none. Raises CallRefused."""
        service = self._service
        if path == "/health":
            await exchange.reply(200, {"status": "ok"})
            return True
        is_model = path == "/v1/models" or path.startswith("/v1/models/")
        if not (is_model or path in ("/version", "/metrics", "/tokenizer_info")):
            return False
        service.caller(exchange.key, None)
        if is_model:
            await exchange.reply(200, _models(service, path))
        elif path == "/version":
            await exchange.reply(200, {"version": __version__})
        elif path == "/tokenizer_info":
            await exchange.reply(200, tokenizer_info(service.served.tokenizer))
        else:
            text = _metrics_text(service.counts.by_name(), {"open_calls": service.num_open})
            await exchange.reply_bytes(200, text.encode(), METRICS_TYPE)
        return True

    async def _handled(self, handler: Handler, exchange: HttpExchange, body: bytes) -> None:
        """Parse a body and run its handler."""
        exchange.is_long = len(body) > LONG_BODY
        value = await self._run_work(exchange, parsed_json, body)
        del body  # free it: the answer may take hours
        await handler(exchange, value)

    async def _run_work(self, exchange: HttpExchange, work: Callable[[U], T], given: U) -> T:
        """Run work, in a thread if the body is long."""
        if not exchange.is_long:
            return work(given)
        return await self._service.run(lambda: work(given), is_long=True)

    async def _while_connected(self, exchange: HttpExchange, work: Awaitable[None]) -> None:
        """Run a call, and cancel it if the client disconnects."""
        serving = asyncio.ensure_future(work)
        disconnected = asyncio.ensure_future(exchange.disconnected())
        try:
            await asyncio.wait({serving, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ClientGone
            serving.result()
        finally:
            for task in (serving, disconnected):
                task.cancel()
            await asyncio.gather(serving, disconnected, return_exceptions=True)
            del serving, disconnected  # break the reference cycle of traceback, frame and task

    async def _refuse(self, exchange: HttpExchange, refused: CallRefused) -> None:
        """Send an error response, and count it."""
        anthropic = exchange.path.startswith("/v1/messages")
        ours = refused.status >= 500
        self._service.count(failed=ours, refused=not ours)
        record = anthropic_error(refused) if anthropic else openai_error(refused)
        headers = {}
        if refused.retry_after_s is not None:
            headers["retry-after"] = f"{refused.retry_after_s:.0f}"
        if not exchange.begun:
            await exchange.reply(refused.status, record, headers=headers)
            return
        await exchange.write((anthropic_event if anthropic else openai_event)(record))
        await exchange.close_stream()

    # ---- handlers

    async def _adapt(
        self,
        change: Callable[[AdapterAdmin, object], Awaitable[str]],
        exchange: HttpExchange,
        body: object,
    ) -> None:
        self._service.check_guest(exchange.key)
        if self._service.adapters is None:
            raise CallRefused("no adapters are served here", status=404)
        message = await change(self._service.adapters, body)
        await exchange.reply(200, {"message": message})

    def _caller(self, exchange: HttpExchange, body: Any, conversation: str | None = None) -> Caller:
        """Return the caller of a sampling call; conversation: see EndpointService.caller. Raises
        CallRefused."""
        player = exchange.header(CONVERSATION)
        return self._service.caller(exchange.key, conversation, body.get("model"), player=player)

    async def _steps(self, exchange: HttpExchange, caller: Caller, call: ChatCall) -> ChatSteps:
        """Return the steps of a chat call of any protocol. Raises CallRefused."""
        prompt = await self._chats.prompt(caller, call, is_long=exchange.is_long)
        return ChatSteps(self._chats, caller, call, prompt)

    async def _chat(
        self,
        read: Callable[[object], ChatCall],
        prefix: str,
        kind: type[StreamedChat | StreamedMessage],
        exchange: HttpExchange,
        body: object,
    ) -> None:
        call = await self._run_work(exchange, read, body)
        caller = self._caller(exchange, body, exchange.header(CONVERSATION))
        steps = await self._steps(exchange, caller, call)
        heading = self._service.heading(caller, prefix)
        await self._answer(exchange, kind(steps, heading), call.stream)

    async def _responses(self, exchange: HttpExchange, body: object) -> None:
        call = await self._run_work(exchange, responses_call, body)
        root = new_root() if call.previous is None else root_of(call.previous)
        conversation = exchange.header(CONVERSATION)
        if conversation is None and (call.stores or call.previous is not None):
            conversation = f"{PREFIX}{root}"  # otherwise nothing is stored for a later call
        caller = self._caller(exchange, body, conversation)
        before = _earlier_messages(caller, call)
        chat = replace(call.chat, messages=call.messages(before))
        steps = await self._steps(exchange, caller, chat)
        heading = self._service.heading(caller, f"{PREFIX}{root}", mark="_")
        messages = (*before, *call.chat.messages)
        streamed = StreamedResponse(steps, call, messages, heading)
        await self._answer(exchange, streamed, call.chat.stream)

    async def _count_tokens(self, exchange: HttpExchange, body: object) -> None:
        call = await self._run_work(exchange, partial(messages_call, counting=True), body)
        caller = self._service.caller(exchange.key, exchange.header(CONVERSATION))
        prompt = await self._chats.prompt(caller, call, is_long=exchange.is_long)
        await exchange.reply(200, {"input_tokens": len(prompt.token_ids)})

    async def _text(self, exchange: HttpExchange, body: object) -> None:
        service, call = self._service, await self._run_work(exchange, text_call, body)
        caller = self._caller(exchange, body)
        service.ignore(call.ignored)
        prompts = tuple(
            [
                await service.text_prompt(
                    caller, prompt, adds_special=call.adds_special, is_long=exchange.is_long
                )
                if isinstance(prompt, str)
                else np.array(prompt, np.int32)
                for prompt in call.prompts
            ]
        )
        heading = service.heading(caller, "cmpl")
        writer = TextWriter(call=call, heading=heading, prompts=prompts, words=service.words)
        await self._answer(exchange, StreamedText(service, caller, writer), call.stream)

    async def _generate(self, exchange: HttpExchange, body: object) -> None:
        service, call = self._service, await self._run_work(exchange, token_call, body)
        caller = self._caller(exchange, body)
        service.ignore(call.ignored)
        prompt = np.array(call.token_ids, np.int32)
        async with service.sample(caller, [prompt], call.options, parts=False) as generation:
            answers = await generation.answers()
        heading = service.heading(caller, "generate")
        await exchange.reply(200, token_body(call, heading, answers, service.words))

    async def _tokenize(self, exchange: HttpExchange, body: object) -> None:
        service, call = self._service, await self._run_work(exchange, tokenize_call, body)
        caller = self._caller(exchange, body, exchange.header(CONVERSATION))
        if isinstance(call.prompt, str):
            tokens = await service.text_prompt(
                caller, call.prompt, adds_special=call.adds_special, is_long=exchange.is_long
            )
        else:
            chat = await self._chats.prompt(caller, call.prompt, is_long=exchange.is_long)
            tokens = chat.token_ids
        most = caller.terms.max_length
        await exchange.reply(200, tokenize_body(call, tokens, service.words, most))

    async def _detokenize(self, exchange: HttpExchange, body: object) -> None:
        tokens = await self._run_work(exchange, detokenize_call, body)
        text = await self._service.run(lambda: self._service.served.tokenizer.decode_all(tokens))
        await exchange.reply(200, {"prompt": text})

    async def _reward_key(self, exchange: HttpExchange, body: object) -> None:
        BodyFields(body).close()
        key = self._service.session(exchange.key).take_reward_key()
        await exchange.reply(200, {"reward_key": key})

    async def _reward(self, exchange: HttpExchange, body: object) -> None:
        fields = BodyFields(body)
        value = fields.number("reward", -LARGEST_REWARD, LARGEST_REWARD)
        if value is None:
            fields.refuse("reward", "a number")
        parts = fields.value("parts")
        if parts is not None and not isinstance(parts, dict):
            fields.refuse("parts", "an object of numbers")
        call = fields.text("call")
        fields.close()
        self._service.rewarded(exchange.key).reward(value, parts=parts, call=call)
        await exchange.reply(200, {"ok": True})

    async def _end(self, exchange: HttpExchange, body: object) -> None:
        fields = BodyFields(body)
        failed = fields.text("failed")
        fields.close()
        session = self._service.rewarded(exchange.key)
        if failed is None:
            session.finish()
        else:
            session.give_up(failed[:SHOWN_REASON])
        await exchange.reply(200, {"ok": True})

    async def _begin(self, exchange: HttpExchange, body: object) -> None:
        leases, model = self._service.leases(), self._service.served.name
        task = await leases.begin(body, address=exchange.address, model=model)
        await exchange.reply(200, task)

    async def _answer(self, exchange: HttpExchange, answer: Streamed, streams: bool) -> None:
        """Send an answer whole, or its events as they arrive, with a ping after a pause. The head
        is sent with the first event, so an early error still has its own status."""
        if not streams:
            await exchange.reply(200, await answer.whole())
            return
        parts: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(1)
        pumping = asyncio.ensure_future(_pump(answer.events(), parts))
        try:
            while True:
                try:
                    part = await asyncio.wait_for(parts.get(), self._service.limits.ping_s)
                except TimeoutError:
                    part = answer.ping
                if isinstance(part, Exception):
                    raise part
                if not exchange.begun:
                    await exchange.open_stream()
                await exchange.write(answer.last if part is None else part)
                if part is None:
                    break
            await exchange.close_stream()
        finally:
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)


def _models(service: EndpointService, path: str) -> dict[str, Any]:
    """Return the models, or the one that a path names. Raises CallRefused."""
    served, adapters = service.served, service.adapters
    model = {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "jaxrl_async",
        "max_model_len": served.terms.max_length,
    }
    models = [model]
    for adapter in () if adapters is None else adapters.names():
        models.append({**model, "id": adapter, "parent": served.name})
    name = path.removeprefix("/v1/models").lstrip("/")
    if not name:
        return {"object": "list", "data": models}
    for one in models:
        if one["id"] == name:
            return one
    names = ", ".join(str(one["id"]) for one in models)
    raise CallRefused(f"the available models are {names}", status=404)


def _metrics_text(counts: Mapping[str, int], gauges: Mapping[str, int]) -> str:
    """Return counters since the start and current values in Prometheus' text format, version
    0.0.4."""
    lines = []
    for kind, end, values in (("counter", "_total", counts), ("gauge", "", gauges)):
        for name, value in values.items():
            full = f"{METRICS_PREFIX}{name}{end}"
            lines += [f"# TYPE {full} {kind}\n", f"{full} {value}\n"]
    return "".join(lines)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes, which hold the body and objects made from
    it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _earlier_messages(caller: Caller, call: ResponsesCall) -> Sequence[Message]:
    """Return the conversation up to the response that a call continues. Raises CallRefused."""
    if call.previous is None:
        return ()
    before = caller.conversations.responses.find(call.previous)
    if before is None:
        raise unknown_response(call.previous)
    return before


async def _pump(
    events: AsyncIterator[bytes], parts: "asyncio.Queue[bytes | Exception | None]"
) -> None:
    """Put events into the queue, one at a time, then None or the error that ended them."""
    try:
        async for part in events:
            await parts.put(part)
        await parts.put(None)
    except Exception as error:
        await parts.put(error)

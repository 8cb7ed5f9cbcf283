"""Clients and agent frameworks as they are, each in its own environment, finish a task through the
endpoint: with a guest's key, and as a session of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from chat_tokenizers import QWEN3, byte_tokenizer
from clients_rig import Driven, started
from endpoint_rig import KEY, SHAPE, Rig, closed, serve
from scripted_policy import PRICE, QUOTE, THOUGHT, Dictated, Scripted

from jaxrl_async.config import schema
from jaxrl_async.endpoint.sampling_request import CallerLimits
from jaxrl_async.endpoint.sessions import SessionLimits, SessionMember
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import EpisodeLimits, SamplingParams, VersionedParams

pytestmark = pytest.mark.exhaustive

LENGTH = 16_384
ANSWER = 2048
SECTION = schema.SamplerSection(
    slots=4, max_length=LENGTH, max_new_tokens=ANSWER, block=16, page_tokens=64
)
CALL = ["price", {"item": "milk"}]
"""What a client that only asks for a call gets; its id follows."""


@dataclass(frozen=True)
class Mode:
    """A mode of a driver: what it is to return, and how many calls that takes."""

    result: Any
    calls: int = 2
    contexts: int = 1  # of the session: token sequences that a trainer gets
    cut: bool = False  # whether a stop string of the client ends the answer before its last token


LOOP = Mode(PRICE)
ONE_CALL = Mode([*CALL, str], calls=1)
OBJECT = Mode(QUOTE, calls=1)
CLIENTS: dict[tuple[str, str], dict[str, Mode]] = {
    ("openai", "clients"): {
        "chat": LOOP,
        "chat_stream": LOOP,
        "chat_usual_fields": LOOP,
        "chat_required": ONE_CALL,
        "chat_named": ONE_CALL,
        "chat_parse": OBJECT,
        "chat_parse_stream": OBJECT,
        "chat_json_object": OBJECT,
        "responses": LOOP,
        "responses_stream": LOOP,
        "responses_required": ONE_CALL,
        "responses_parse": OBJECT,
        "completions": Mode([[i, PRICE[:9]] for i in range(4)], calls=4, contexts=4),
        "models": Mode(True, calls=0, contexts=0),
    },
    ("anthropic", "clients"): {
        "tools": LOOP,
        "tools_stream": LOOP,
        "tool_choice": ONE_CALL,
        "tool_choice_named": ONE_CALL,
        "thinking": Mode([["thinking", THOUGHT], ["text", PRICE]], calls=1),
        "thinking_adaptive": Mode([["thinking", THOUGHT], ["text", PRICE]], calls=1),
        "thinking_tools": LOOP,
        "system_cached": LOOP,
        "tool_runner": LOOP,
        "parse": OBJECT,
        "count_tokens": Mode(True, calls=0, contexts=0),
    },
    ("openai_agents", "clients"): {
        "chat": LOOP,
        "chat_stream": LOOP,
        "responses": LOOP,
        "responses_stream": LOOP,
        "chat_typed": OBJECT,
        "responses_typed": OBJECT,
        "required": LOOP,
        "handoff": Mode([PRICE, "shop"], calls=3, contexts=2),
    },
    ("pydantic_ai", "clients"): {
        "chat": LOOP,
        "chat_stream": LOOP,
        "responses": LOOP,
        "messages": LOOP,
        "typed_by_tool": OBJECT,
        "typed_natively": OBJECT,
    },
    ("smolagents", "clients"): {
        "tool_calling": Mode(PRICE, contexts=2),  # it sends calls back as texts of its own
        "tool_calling_stream": Mode(PRICE, contexts=2),
        "code": Mode(PRICE, calls=1, cut=True),
        "code_stream": Mode(PRICE, calls=1, cut=True),
        "code_structured": Mode(PRICE, calls=1),
    },
    ("langchain", "clients"): {
        "bind_tools": ONE_CALL,
        "bind_tools_any": ONE_CALL,
        "bind_tools_stream": ONE_CALL,
        "structured": OBJECT,
        "structured_by_tool": OBJECT,
        "structured_json_mode": OBJECT,
        "graph": LOOP,
        "graph_stream": LOOP,
        "graph_responses": LOOP,
    },
    ("inspect", "clients"): {
        "evaluate": Mode([PRICE, "C"]),
        "evaluate_with_settings": Mode([PRICE, "C"]),
    },
    ("instructor", "clients-older"): {
        "extract": OBJECT,
        "tools_strict": OBJECT,
        "json_mode": OBJECT,
        "json_schema": OBJECT,
        "markdown_json": OBJECT,
        "partial": OBJECT,
    },
    ("litellm", "clients-older"): {
        "chat": LOOP,
        "chat_stream": LOOP,
        "chat_settings": LOOP,
        "chat_required": ONE_CALL,
        "hosted_vllm": LOOP,
        "messages": LOOP,
        "structured": OBJECT,
    },
    ("lm_eval", "clients-older"): {
        "completions": Mode(1.0, calls=1),
        "chat": Mode(1.0, calls=1),
    },
    ("mini_swe_agent", "clients-older"): {
        "bash": Mode(["Submitted", PRICE + "\n"], calls=1),
        "text_based": Mode(["Submitted", PRICE + "\n"], calls=1),
    },
}
UNCONSTRAINED = {
    ("openai", "chat_json_object"), ("langchain", "bind_tools"), ("langchain", "bind_tools_stream"),
    ("langchain", "structured_json_mode"), ("instructor", "json_mode"),
    ("instructor", "markdown_json"), ("pydantic_ai", "typed_by_tool"),
}  # fmt: skip
"""Modes that demand no call, or any JSON, or that a random text in the right form may break."""
MODES = {driver: modes for (driver, _), modes in CLIENTS.items()}
CASES = [(client, mode) for client, modes in CLIENTS.items() for mode in modes]
OWN_CONSTRAINT = [
    (client, mode)
    for client, mode in CASES
    if CLIENTS[client][mode] in (ONE_CALL, OBJECT) and (client[0], mode) not in UNCONSTRAINED
]


def of_each(cases: list[tuple[tuple[str, str], str]]) -> pytest.MarkDecorator:
    """Once for each mode, and all of a driver together: it is started once."""
    names = [f"{driver}-{mode}" for (driver, _), mode in cases]
    return pytest.mark.parametrize(
        ("driven", "mode"), cases, ids=names, indirect=["driven"], scope="module"
    )


class Swaps(FixedWeights):
    """Gives other weights again and again, as new versions."""

    def __init__(self, spec: ModelSpec) -> None:
        self.params = [init_params(spec, jax.random.key(seed)) for seed in (3, 4)]
        self.version = 0

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        self.version += 1
        return VersionedParams(version=self.version, params=self.params[self.version % 2])


def rig_of(sampler: Any, tokenizer: Any) -> Rig:
    terms = CallerLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=ANSWER,
        max_length=LENGTH,
    )
    return serve(sampler, tokenizer, terms=terms)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Rig]:
    """An endpoint whose policy says the script, a few tokens at a time."""
    tokenizer = byte_tokenizer(QWEN3)
    rig = rig_of(Scripted(tokenizer), tokenizer)
    yield rig
    closed(rig)


@pytest.fixture(scope="module")
def sampled() -> Iterator[Rig]:
    """An endpoint before a sampler whose weights change at every block."""
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    tokenizer = byte_tokenizer(QWEN3)
    spec = ModelSpec.from_architecture(SHAPE, -(-tokenizer.vocab_size // 8) * 8)
    policy = Policy(spec, init_params(spec, jax.random.key(3)), tokenizer)
    with Sampler(policy, section=SECTION, weights=Swaps(spec)) as sampler:
        rig = rig_of(Dictated(sampler, tokenizer), tokenizer)
        yield rig
        closed(rig)


@pytest.fixture(scope="module")
def driven(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driven]:
    driver, environment = request.param
    driven = started(driver, environment, tmp_path_factory.mktemp(driver))
    yield driven
    driven.close()


def is_like(result: Any, wanted: Any) -> bool:
    """Whether a result is as wanted, where a type stands for any value of it but an empty text."""
    if isinstance(wanted, type):
        return isinstance(result, wanted) and result != ""
    if isinstance(wanted, list) and isinstance(result, list) and len(wanted) == len(result):
        return all(is_like(*pair) for pair in zip(result, wanted, strict=True))
    if isinstance(wanted, dict) and isinstance(result, dict) and wanted.keys() == result.keys():
        return all(is_like(result[name], value) for name, value in wanted.items())
    return result == wanted


@of_each(CASES)
def test_a_guest_finishes_its_task(driven: Driven, mode: str, scripted: Rig) -> None:
    wanted = MODES[driven.name][mode]
    before = len(scripted.sampler.requests)
    result = driven(mode, scripted.endpoint.address, KEY, "tiny")
    assert is_like(result, wanted.result), result
    assert len(scripted.sampler.requests) - before == wanted.calls


@of_each(CASES)
def test_a_session_is_what_was_sampled(driven: Driven, mode: str, sampled: Rig) -> None:
    wanted, sampler = MODES[driven.name][mode], sampled.sampler
    limits = EpisodeLimits(
        sampling=SamplingParams(),
        stop_token_ids=sampled.tokenizer.eos_ids,
        max_new_tokens=ANSWER,
        max_length=LENGTH,
    )
    member = SessionMember(prompt=make_prompt(3), label=f"{driven.name}-{mode}", index=0)
    session = sampled.sessions.open(sampler, member, limits, SessionLimits())
    before = len(sampler.requests)
    try:
        result = driven(mode, sampled.endpoint.address, session.key, "tiny")
        session.finish()
        asked = sampler.requests[before:]
        assert is_like(result, wanted.result), result
        assert len(asked) == wanted.calls and session.counts().calls == wanted.calls
        assert {r.sampling for r in asked} <= {limits.sampling}, "the run's alone"
        if not wanted.calls:
            return
        episode = session.episode()
    finally:
        session.end("the test has ended")
    assert episode.num_turns == wanted.calls and len(episode.starts) == wanted.contexts
    said = [sampler.said[r.request_id] for r in asked]
    drawn = episode.token_ids[episode.drawn]
    if wanted.cut:
        assert len(said[0]) - 3 <= len(drawn) < len(said[0])
        said = [said[0][: len(drawn)]]
    np.testing.assert_array_equal(np.sort(drawn), np.sort(np.concatenate(said)))
    if wanted.contexts == 1:
        np.testing.assert_array_equal(drawn, np.concatenate(said))
    np.testing.assert_allclose(episode.logprobs[episode.drawn], 0, atol=1e-6)
    if len(drawn) > 3 * SECTION.block:
        assert len(set(episode.versions[episode.drawn])) > 1, "weights were swapped"


@of_each(OWN_CONSTRAINT)
def test_a_random_policy_keeps_to_what_a_client_demands(
    driven: Driven, mode: str, sampled: Rig
) -> None:
    """A required call and a schema are kept to by a policy that knows nothing."""
    wanted = MODES[driven.name][mode]
    shape = {"item": str, "price": (float, int)} if wanted is OBJECT else None
    sampled.sampler.free = True
    try:
        results = [driven(mode, sampled.endpoint.address, KEY, "tiny") for _ in range(3)]
    finally:
        sampled.sampler.free = False
    for result in results:
        if shape is None:
            assert is_like(result, ["price", dict, str]), result
            assert isinstance(result[1]["item"], str)  # a schema may allow more beside it
        else:
            assert result.keys() == shape.keys(), result
            assert all(isinstance(result[name], kind) for name, kind in shape.items()), result

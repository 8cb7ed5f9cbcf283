"""The endpoint as users start it: the command alone, and in a run whose weights change under it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import KEY, SECTION, Speaker, closed, serve, tiny_policy
from runs import config_of, many_digits, metrics_of

from jaxrl_async.config.judge_section import JudgeSection
from jaxrl_async.endpoint.sampling_request import CallerLimits
from jaxrl_async.errors import ConfigError
from jaxrl_async.judge.judge import JudgeService
from jaxrl_async.judge.judge_prompt import JudgedTask, about_answers, rubric_of
from jaxrl_async.model.policy import Policy
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.run import loop
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request, SamplingParams, VersionedParams

HI = [{"role": "user", "content": "Hi"}]
TINY = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition.eval_size=16",
    "sampler.slots=16",
    "sampler.max_new_tokens=16",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=4",
    "trainer.micro_batch_tokens=512",
    "run.steps=6",
    "eval.every=3",
    "metrics.peak_flops=1e9",
    "endpoint={}",
)


class Swaps(FixedWeights):
    """Gives the same weights again and again, as new versions."""

    def __init__(self, params) -> None:
        self.params, self.version, self.polls = params, 0, 0

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        self.polls += 1
        if self.polls % 3:
            return None
        self.version += 1
        return VersionedParams(version=self.version, params=self.params)


@pytest.mark.full
def test_a_swap_in_mid_answer_is_seen_in_its_versions_alone():
    spec, params = tiny_policy()
    bodies = []
    for weights in (FixedWeights(), Swaps(params)):
        with Sampler((spec, params), section=SECTION, seed=5, weights=weights) as sampler:
            rig = serve(sampler, byte_tokenizer(CHATML))
            bodies.append(rig.chat(seed=3, max_tokens=40).choices[0])
            closed(rig)
    assert bodies[0].token_ids == bodies[1].token_ids
    assert bodies[0].logprobs == bodies[1].logprobs
    spans = bodies[1].weight_versions
    assert len(bodies[0].weight_versions) == 1 and len(spans) > 2
    assert [s["end"] for s in spans[:-1]] == [s["start"] for s in spans[1:]]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, len(bodies[1].token_ids))


def test_a_judge_may_be_our_own_endpoint(monkeypatch):
    tokenizer = byte_tokenizer(CHATML)
    terms = CallerLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=96,
        max_length=2048,
        priority=(-2, 0),
    )
    rig = serve(Speaker(tokenizer, ["Eight of ten", "I think\n8"]), tokenizer, terms=terms)
    faults: list[str] = []
    monkeypatch.setenv("JUDGE_KEY", KEY)
    given = {"model": "m", "base_url": f"{rig.endpoint.address}/v1", "key_variable": "JUDGE_KEY"}
    service = JudgeService(JudgeSection(**given, max_tokens=32), faults.append)
    request = about_answers(
        rubric_of(JudgeSection(model="m", rubric="Good?")),
        JudgedTask(text="2+2"),
        ["4"],
        (0, 10),
        ranked=False,
    )
    assert asyncio.run(service.answers([request])) == [((0.8,),)]
    assert {r.priority for r in rig.sampler.requests} == {(-2, 0)}, "a guest's"
    assert faults == ["judge_refused_replies"] and service.meter.read()["prompt_tokens"] > 0
    service.close()
    closed(rig)


def test_a_port_that_is_taken_is_a_config_error():
    from jaxrl_async.endpoint.http_server import Endpoint

    rig = serve(None, byte_tokenizer(CHATML))
    with pytest.raises(ConfigError, match="cannot listen"):
        Endpoint(rig.service, port=rig.endpoint.port)
    with pytest.raises(ConfigError, match=r"port 99999: .*must be 0-65535"):
        Endpoint(rig.service, port=99999)
    closed(rig)


@pytest.mark.exhaustive
def test_the_command_serves_a_folder(tmp_path: Path):
    spec, params = tiny_policy()
    tokenizer = byte_tokenizer(CHATML)
    Policy(spec, params, tokenizer).save_pretrained(tmp_path / "chatty")
    words = ["--port", "0", "--slots", "2", "--max-length", "96", str(tmp_path / "chatty")]
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_async.serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"JAXRL_ASYNC_KEY": "sesame"},
    )
    try:
        line = next(line for line in server.stdout if line.startswith("serving"))
        address = re.search(r"http://\S+", line).group()
        with openai.OpenAI(base_url=address, api_key="sesame", timeout=100) as client:
            assert [m.id for m in client.models.list()] == ["chatty"]
            reply = client.chat.completions.create(
                model="chatty", messages=HI, seed=4, max_tokens=8,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    with Sampler((spec, params), section=SECTION) as sampler:
        prompt = np.array(reply.prompt_token_ids, np.int32)
        request = Request(
            request_id="r", token_ids=prompt, max_new_tokens=8,
            stop_token_ids=tokenizer.eos_ids, key=(4, 0),
        )  # fmt: skip
        (done,) = sampler.generate([request])
    assert reply.choices[0].token_ids == done.token_ids.tolist()


@pytest.mark.exhaustive
def test_a_guest_calls_a_run_while_it_trains(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("JAXRL_ASYNC_KEY", "sesame")
    caplog.set_level("INFO")
    config = config_of("addition", tmp_path, *TINY, many_digits(tmp_path))
    versions, ended = set(), threading.Event()

    def call() -> None:
        while not ended.wait(0.1):
            found = re.search(r"served at (http://\S+)/v1", caplog.text)
            if found is None:
                continue
            body = {"prompt": "12+34=", "max_tokens": 8, "return_token_ids": True}
            try:
                reply = httpx.post(
                    f"{found[1]}/v1/completions", json=body, headers={"x-api-key": "sesame"}
                )
            except httpx.HTTPError:
                continue  # the run has ended
            if reply.status_code == 200:
                for span in reply.json()["choices"][0]["weight_versions"]:
                    versions.add(int(span["version"].rpartition("-")[2]))

    guest = threading.Thread(target=call)
    guest.start()
    try:
        loop.train(config)
    finally:
        ended.set()
        guest.join(60)
    metrics = metrics_of(config)
    assert metrics[-1]["step"] == 6 and len(versions) > 1
    assert sum(line.get("endpoint/calls", 0) for line in metrics) > 2

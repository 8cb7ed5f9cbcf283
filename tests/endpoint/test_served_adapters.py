"""Adapters served by name beside their base, and loaded by calls."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import jax
import numpy as np
import openai
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import SECTION, tiny_policy

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.policy import Policy
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.serve import main
from jaxrl_async.types import Request

pytestmark = pytest.mark.full

HI = [{"role": "user", "content": "Hi"}]
KEY = {"authorization": "Bearer sesame"}


def adapted(policy: Policy, rank: int, seed: int) -> Policy:
    lora = lora_of(policy.spec, LoraSection(rank=rank, alpha=8))
    assert lora is not None
    made = policy.adapted(lora, jax.random.key(seed))
    grown = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(seed), x.shape), made.adapter
    )
    return made.with_trained(grown)


def saved(tmp_path: Path) -> tuple[Policy, dict[str, Policy]]:
    policy = Policy(*tiny_policy(), byte_tokenizer(CHATML))
    policy.save_pretrained(tmp_path / "base")
    adapters = {"a": adapted(policy, 4, 1), "b": adapted(policy, 2, 2), "c": adapted(policy, 3, 3)}
    for name, one in adapters.items():
        one.save_adapter(tmp_path / "adapters" / name)
    return policy, adapters


def sampled_by(policy: Policy, prompt: list[int]) -> list[int]:
    with Sampler((policy.spec, policy.merged().params), section=SECTION) as sampler:
        request = Request(
            request_id="r",
            token_ids=np.array(prompt, np.int32),
            max_new_tokens=8,
            stop_token_ids=byte_tokenizer(CHATML).eos_ids,
            key=(4, 0),
        )
        return sampler.generate([request])[0].token_ids.tolist()


@pytest.mark.exhaustive
def test_the_command_serves_adapters_beside_their_base(tmp_path: Path) -> None:
    policy, adapters = saved(tmp_path)
    words = ["--port", "0", "--slots", "4", "--max-length", "96", "--max-loras", "3"]
    words += [f"--adapter={name}={tmp_path}/adapters/{name}" for name in ("a", "b")]
    words += ["--adapters-from", str(tmp_path / "adapters"), str(tmp_path / "base")]
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

            def answer(model: str) -> tuple[list[int], list[int]]:
                reply = client.chat.completions.create(
                    model=model, messages=HI, seed=4, max_tokens=8,
                    extra_body={"return_token_ids": True},
                )  # fmt: skip
                assert reply.model == model
                return reply.prompt_token_ids, reply.choices[0].token_ids

            def change(what: str, **fields: object) -> httpx.Response:
                url = f"{address}/{what}load_lora_adapter"
                return httpx.post(url, json=fields, headers=KEY, timeout=100)

            assert [m.id for m in client.models.list()] == ["base", "a", "b"]
            assert client.models.retrieve("a").parent == "base"
            prompt, of_base = answer("base")
            assert of_base == sampled_by(policy, prompt)
            for name in ("a", "b"):
                assert answer(name)[1] == sampled_by(adapters[name], prompt) != of_base
            with pytest.raises(openai.NotFoundError, match="available models: base, a, b"):
                answer("c")
            assert change("", lora_name="c", lora_path="c").status_code == 200
            assert answer("c")[1] == sampled_by(adapters["c"], prompt)
            again = change("", lora_name="c", lora_path="c")
            assert again.status_code == 400 and "load_inplace" in again.text
            swapped = change("", lora_name="c", lora_path="b", load_inplace=True)
            assert swapped.status_code == 200
            assert answer("c")[1] == answer("b")[1]
            full = change("", lora_name="d", lora_path="a")
            assert full.status_code == 400 and "all 3 places are taken" in full.text
            outside = change("", lora_name="d", lora_path="../base")
            assert outside.status_code == 400 and "lora_path" in outside.text
            assert change("un", lora_name="a").status_code == 200
            assert change("un", lora_name="a").status_code == 404
            assert [m.id for m in client.models.list()] == ["base", "b", "c"]
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_a_bad_command_line_says_what_to_give(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    policy = Policy(*tiny_policy(), byte_tokenizer(CHATML))
    policy.save_pretrained(tmp_path)
    for words, message in (
        (["--adapter", "a"], "give NAME=DIR"),
        (["--adapter", f"{tmp_path.name}={tmp_path}"], "another model is called"),
        (["--max-loras", "2"], "no adapters are served"),
        (["--adapters-from", f"{tmp_path}/none"], "there is no such folder"),
    ):
        before = signal.getsignal(signal.SIGINT)
        assert main([*words, str(tmp_path)]) == 2
        assert signal.getsignal(signal.SIGINT) is before
        assert message in capsys.readouterr().err

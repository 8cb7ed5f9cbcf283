"""The small tool environment that benchmarks/peers has in three libraries does the same in each."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from word_chat import Speaks, WordChat

from jaxrl_async.data.tokenizer import PRINTABLE
from jaxrl_async.rollout.chat_env import ChatEnvs, ChatLimits
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.tasks.named_tasks import load_task
from jaxrl_async.types import EpisodeLimits, Prompt, SamplingParams

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
RIGHT = "4.5"  # milk for 2.0 and bread for 2.5


@pytest.fixture(autouse=True)
def peers_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PEERS), str(ROOT)]))


def asks(item):
    return {"name": "price", "arguments": {"item": item}}


@pytest.mark.parametrize(("answer", "reward"), [(RIGHT, 1.0), ("7", 0.0)])
def test_ours_answers_the_tool_and_judges_the_answer(answer, reward):
    task = load_task(f"{PEERS}/shop_ours.py:shop")
    record = task.records[4]
    chat = WordChat((*PRINTABLE, "\n"))
    calls = [f"<tool_call>{json.dumps(asks(item))}</tool_call>" for item in ("milk", "bread")]
    generate = Speaks(chat, "".join(calls), answer)
    prompt = Prompt(
        prompt_id=4,
        position=4,
        token_ids=np.zeros(0, np.int32),
        text="",
        reference="",
        columns=record,
    )
    limits = EpisodeLimits(
        sampling=SamplingParams(),
        stop_token_ids=chat.stop_token_ids,
        max_new_tokens=300,
        max_length=2000,
    )

    async def played():
        envs = ChatEnvs(task, chat, ChatLimits())
        (members,) = begin_groups(generate, envs, [("g0", prompt, [SavedEpisode()])], limits)
        return await play_group(generate, prompt, members, label="g0", limits=limits)

    (episode,) = asyncio.run(played())
    text = chat.tokenizer.decode(episode.token_ids)
    assert "<tool_response>2.0" in text and "<tool_response>2.5" in text
    assert episode.score.reward == reward and episode.score.parts == {"correct": reward}


class ScriptedPolicy(BaseHTTPRequestHandler):
    """Asks for both prices, then answers their sum."""

    def log_message(self, *_):
        """Say nothing."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prices = [float(m["content"]) for m in request["messages"] if m["role"] == "tool"]
        name = request["tools"][0]["function"]["name"]
        message = {"role": "assistant", "content": str(sum(prices)) if prices else None}
        if not prices:
            message["tool_calls"] = [
                {
                    "id": item,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(asks(item)["arguments"])},
                }
                for item in ("milk", "bread")
            ]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop" if prices else "tool_calls",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        about = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
        content = json.dumps({**about, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.mark.exhaustive
def test_that_of_verifiers_does_so_in_its_own_library():
    pytest.importorskip("verifiers", reason="needs the extra [verifiers]")
    from verifiers.v1 import clients
    from verifiers.v1.utils import loaders

    config = loaders.resolve_env_config(
        {
            "taskset": {"id": "shop_verifiers"},
            "agent": {
                "harness": {"id": "verifiers_tools_harness"},
                "runtime": {"type": "subprocess"},
            },
        }
    )
    tasks = list(loaders.load_taskset(config.taskset))
    server = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedPolicy)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    async def played():
        client = clients.EvalClientConfig(
            base_url=f"http://127.0.0.1:{server.server_address[1]}/v1", api_key_var="NO_KEY"
        )
        context = clients.ModelContext(model="policy", client=client)
        env = loaders.load_environment(config)
        async with env.serving():
            return await env.run_slot(env.slots(tasks[4])[0], context)

    try:
        episode = asyncio.run(asyncio.wait_for(played(), 90))
    finally:
        server.shutdown()
        server.server_close()
    assert episode.ok, episode.errors
    (trace,) = episode.traces
    assert trace.last_reply == RIGHT and trace.reward == 1.0


AS_TRL_DOES = """
import inspect, json, sys
from transformers.utils import get_json_schema
from trl import GRPOTrainer
import shop_trl

inspect.signature(GRPOTrainer).bind("model", train_dataset=shop_trl.DATASET,
    reward_funcs=shop_trl.correct, environment_factory=shop_trl.Shop)
row = shop_trl.DATASET[4]
shop = shop_trl.Shop()
assert shop.reset(**row) is None
names = [name for name, _ in inspect.getmembers(shop_trl.Shop, inspect.isfunction)]
tools = [getattr(shop, name) for name in names if name != "reset"]
prices = [tool(item="milk") + tool(item="bread") for tool in tools]
turns = [[{"role": "assistant", "content": text}] for text in (str(prices[0]), "7")]
print(json.dumps({
    "schemas": [get_json_schema(tool)["function"]["name"] for tool in tools],
    "prompt": row["prompt"],
    "rewards": shop_trl.correct(turns, answer=[row["answer"]] * 2, prompts=[], trainer_state=None),
}))
"""
"""What GRPOTrainer does with an environment's class: its methods are the tools, but for `reset`."""


@pytest.mark.exhaustive
def test_that_of_trl_is_what_its_trainer_takes():
    peers = os.environ.get("JAXRL_PEERS")
    if not peers:
        pytest.skip("JAXRL_PEERS is not set: no environments of peers (docs/agreement.md)")
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [Path(peers) / "trl" / "bin" / "python", "-c", AS_TRL_DOES],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, "PYTHONPATH": str(PEERS), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["schemas"] == ["price"] and found["rewards"] == [1.0, 0.0]
    assert found["prompt"][0]["content"] == "What do milk and bread cost together, today 4?"


@pytest.mark.full
def test_the_table_of_the_history_has_the_lines_that_are_counted():
    counted = subprocess.run(
        [sys.executable, PEERS / "lines_of_environments.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert counted in (ROOT / "benchmarks/history/first_hour.md").read_text(encoding="utf-8")

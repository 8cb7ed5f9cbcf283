"""Clients play all episodes of a run, side by side, while its weights change."""

import contextlib
import json
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients_rig import DRIVERS, OWN, python_of
from runs import config_of, metrics_of
from scripted_policy import offered, scripted_text

from jaxrl_async.audit import audit_run
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.exhaustive

PLAYERS = {
    ("openai", "clients"): "chat chat_stream responses responses_stream chat_required",
    ("anthropic", "clients"): "tools tools_stream tool_runner thinking_tools",
    ("openai_agents", "clients"): "chat responses chat_stream responses_stream",
    ("pydantic_ai", "clients"): "chat messages chat_stream",
    ("langchain", "clients"): "graph graph_stream graph_responses",
    ("litellm", "clients-older"): "chat chat_stream messages",
}
GROUP, GROUPS, STEPS = 2, 6, 4
TASK = """
from jaxrl_async import Task

shop = Task(records=[{"question": "What does milk cost?"}] * 64, held_out=[{"question": "?"}] * 4)
"""
TINY = (
    "warm_start.steps=0",
    "sampler={slots: 8, max_length: 3072, max_new_tokens: 128, block: 8, page_tokens: 64, "
    "on_new_weights: recompute}",  # else KV of older weights stays, which is no token's lag
    f"algorithm={{group_size: {GROUP}, groups_per_step: {GROUPS}, learning_rate: 1e-2, "
    "keep_sampling_mask: true}",
    "trainer={micro_batch_tokens: 3072, warmup_steps: 1}",
    "staleness.max_staleness=1",
    f"run.steps={STEPS}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)


def milk_or_bread(prompt: str) -> str | list[str]:
    """The script, but for what is bought: the policy chooses, and milk is rewarded."""
    said = scripted_text(prompt)
    if said.endswith("</tool_call>") and "price" in offered(prompt):
        return [said, said.replace("milk", "bread")]
    return said


@contextlib.contextmanager
def playing(folder: Path, port: int) -> Iterator[dict[str, subprocess.Popen]]:
    """Start every driver as an external agent; each writes what it did to NAME.jsonl."""
    with contextlib.ExitStack() as stack:
        players = {}
        for (driver, environment), modes in PLAYERS.items():
            words = [str(python_of(environment)), str(DRIVERS / f"drive_{driver}.py")]
            out, log = (
                stack.enter_context((folder / f"{driver}{end}").open("w"))
                for end in (".jsonl", ".log")
            )
            players[driver] = stack.enter_context(
                subprocess.Popen(
                    [*words, f"http://127.0.0.1:{port}", "for agents", *modes.split()],
                    stdout=out,
                    stderr=log,
                    env={k: v for k, v in os.environ.items() if k in OWN},
                )
            )
            stack.callback(players[driver].kill)
        yield players


def test_clients_play_a_run_while_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_run
) -> None:
    monkeypatch.setenv("JAXRL_ASYNC_AGENT_KEY", "for agents")
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    held_run.script = milk_or_bread
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    config = config_of(
        "guess_number",
        tmp_path,
        *held_run.model,
        *TINY,
        f"task={tmp_path}/task.py:shop",
        f"endpoint={{external_agents: true, port: {port}}}",
    )
    with playing(tmp_path, port) as players:
        train(config)
        ended = {name: player.wait(60) for name, player in players.items()}
    assert ended == dict.fromkeys(players, 0), "they end when the run has ended"
    said = {
        name: [json.loads(x) for x in (tmp_path / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in players
    }
    worked = [str(one["result"]) for some in said.values() for one in some if "result" in one]
    assert all(any("result" in one for one in some) for some in said.values()), said
    assert len(worked) >= GROUP * GROUPS * STEPS, said
    results = Counter(worked)
    assert results["Milk costs 3.5."] and results["Bread costs 2.0."], results
    assert len(held_run.versions) >= 3, "weights were swapped"
    lines = [line for line in metrics_of(config) if line["step"]]
    apart = [line["mismatch/max"] for line in lines if "mismatch/max" in line]
    assert len(lines) == STEPS and apart and max(apart) < 1e-5
    assert not any(line["faults/failed_groups"] for line in lines)
    found = audit_run(Path(config.run.dir) / config.run.name)
    assert not found.problems and found.trained == GROUPS * STEPS

"""Harbor's tasks: what is read, refused and scored; and trials of Harbor's own package."""

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "benchmarks/peers"))
import environments  # noqa: E402
from harbor_tasks import write_task, write_tasks  # noqa: E402

from jaxrl_async.errors import ConfigError, DataError, RolloutError, Unavailable  # noqa: E402
from jaxrl_async.sandbox import harbor_task as harbor  # noqa: E402
from jaxrl_async.sandbox.harbor_files import copies_of, read_tasks  # noqa: E402
from jaxrl_async.tasks.named_tasks import load_task  # noqa: E402

HARBOR = environments.FOLDER / "harbor/bin/python"
TERMINUS = {
    "name": "terminus-2",
    "kwargs": {"record_terminal_session": False, "max_turns": 5, "enable_summarize": False},
}


def result_of(rewards=None, *errors: str):
    return {"rewards": rewards, "errors": [{"type": e, "message": "oh"} for e in errors]}


# ---- files


def test_tasks_are_read_alone_and_in_folders(tmp_path: Path) -> None:
    paths = write_tasks(tmp_path, 12)
    (one,) = read_tasks(str(paths[0]))
    assert (one.name, one.agent_s, one.verifier_s) == ("write-apple", 300.0, 60.0)
    assert one.instruction == "Write the word apple into the file apple.txt.\n"
    assert [task.name for task in read_tasks(str(tmp_path))] == sorted(p.name for p in paths)
    records = harbor.records_of([one])
    assert records == [
        {"question": one.instruction, "name": "write-apple", "harbor_task": str(paths[0])}
    ]


def test_what_is_no_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither a task of Harbor \(task\.toml\)"):
        read_tasks(str(tmp_path))
    task = write_task(tmp_path, "a")
    (task / "task.toml").write_text("[agent\n")
    with pytest.raises(DataError, match="write-a: not a task of Harbor"):
        read_tasks(str(tmp_path))
    (task / "task.toml").write_text("")
    (task / "instruction.md").unlink()
    with pytest.raises(DataError, match=r"instruction\.md"):
        read_tasks(str(tmp_path))


def test_what_a_simple_dockerfile_does(tmp_path: Path) -> None:
    environment = write_task(tmp_path, "a") / "environment"
    (environment / "data").mkdir()
    (environment / "Dockerfile").write_text(
        "# a comment\nFROM ubuntu:24.04 AS base\nENV A=1 B=two\nENV C three words\nWORKDIR /srv\n"
        "WORKDIR in\nCOPY notes.txt \\\n  data /there/\ncopy *.txt .\n"
    )
    copies = copies_of(environment)
    assert copies.workdir == "/srv/in"
    assert copies.environ == {"A": "1", "B": "two", "C": "three words"}
    assert [(source.name, target) for source, target in copies.files] == [
        ("notes.txt", "/there/"), ("data", "/there/"), ("notes.txt", "/srv/in/."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FROM a\nRUN apt-get install x\n", "RUN apt-get install x"),
        ("FROM a\nUSER me\n", "USER me"),
        ("FROM a\nCOPY --from=base a b\n", "which needs a container"),
        ("FROM a\nCOPY ../../secret .\n", "no such file"),
        ("FROM a\nCOPY missing .\n", "no such file"),
        ("FROM a\nADD notes.txt .\n", "ADD"),
    ],
)
def test_a_dockerfile_that_needs_a_container_is_refused_by_name(
    tmp_path: Path, text: str, why: str
) -> None:
    environment = write_task(tmp_path, "a") / "environment"
    (tmp_path / "secret").write_text("1")
    (environment / "Dockerfile").write_text(text)
    with pytest.raises(ConfigError, match=f"^write-a: .*{why}"):
        copies_of(environment)


def test_without_a_dockerfile_or_with_several_containers_too(tmp_path: Path) -> None:
    environment = write_task(tmp_path, "a") / "environment"
    (environment / "docker-compose.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"write-a: has several containers.*type: docker"):
        copies_of(environment)
    (environment / "docker-compose.yaml").unlink()
    (environment / "Dockerfile").unlink()
    with pytest.raises(ConfigError, match="write-a: has no environment/Dockerfile"):
        copies_of(environment)


# ---- scores


@pytest.mark.parametrize(
    ("result", "reward", "parts"),
    [
        (result_of({"reward": 1}), 1.0, {"correct": 1.0}),
        (result_of({"reward": 0.25, "speed": 3}), 0.25, {"correct": 0.25, "speed": 3.0}),
        (result_of({"score": 0.5}), 0.5, {"correct": 0.5}),
        (result_of({"reward": -2}), -2.0, {}),
        (result_of({"reward": 2}), 2.0, {}),
        (result_of({"reward": 1}, "AgentTimeoutError"), 1.0, {"correct": 1.0, "out_of_time": 1.0}),
        (result_of(None, "AgentTimeoutError"), 0.0, {"correct": 0.0, "out_of_time": 1.0}),
        (
            result_of(None, "ContextLengthExceededError"),
            0.0,
            {"correct": 0.0, "out_of_context": 1.0},
        ),
    ],
)
def test_agents_that_ran_out_of_time_or_context_are_scored(result, reward, parts) -> None:
    score = harbor.score_of_trial(result)
    assert score.reward == reward
    assert score.parts == {"out_of_time": 0.0, "out_of_context": 0.0, **parts}


@pytest.mark.parametrize(
    "kind",
    [
        "EnvironmentStartTimeoutError", "SandboxBuildFailedError", "VerifierTimeoutError",
        "RewardFileNotFoundError", "RuntimeError", "APIConnectionError", "AgentSetupTimeoutError",
        "TrialProcessError",
    ],
)  # fmt: skip
def test_errors_of_the_machine_are_retried_and_never_scored(kind: str) -> None:
    with pytest.raises(Unavailable, match=f"{kind}: oh"):
        harbor.score_of_trial(result_of({"reward": 1.0}, kind))
    with pytest.raises(Unavailable):
        harbor.score_of_trial(result_of({"reward": 1.0}, "AgentTimeoutError", kind))


def test_other_errors_of_agents_and_of_verifiers_fail_the_group() -> None:
    with pytest.raises(RolloutError, match="NonZeroAgentExitCodeError") as failed:
        harbor.score_of_trial(result_of({"reward": 1.0}, "NonZeroAgentExitCodeError"))
    assert not isinstance(failed.value, Unavailable)
    with pytest.raises(Unavailable, match="without a reward"):
        harbor.score_of_trial(result_of(None))
    with pytest.raises(RolloutError, match="a, b and no `reward`"):
        harbor.score_of_trial(result_of({"a": 1, "b": 2}))


# ---- settings


def test_a_python_without_harbor_is_refused_with_the_way_out(tmp_path: Path, monkeypatch) -> None:
    write_task(tmp_path, "a")
    harbor.harbor_python.cache_clear()
    with pytest.raises(ConfigError, match=r"has no Harbor that is new enough.*uv tool install"):
        load_task({f"harbor:{tmp_path}": {"python": sys.executable}})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="`harbor` is not found"):
        load_task(f"harbor:{tmp_path}")
    with pytest.raises(ConfigError, match="cannot be run"):
        load_task({f"harbor:{tmp_path}": {"python": str(tmp_path / "python")}})
    with pytest.raises(ConfigError, match="at_once"):
        load_task({f"harbor:{tmp_path}": {"at_once": 0}})
    with pytest.raises(ConfigError, match="'oracle' asks no model"):
        load_task({f"harbor:{tmp_path}": {"agent": "oracle"}})


def test_the_trials_of_a_process_that_ended_fail_although_another_has_begun() -> None:
    ended, running = (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for words in (["true"], ["cat"])
    )
    with running:
        process = harbor.HarborProcess("python", {})
        process._process = running
        lost, played = Future[dict](), Future[dict]()
        process._waiting = {0: (ended, lost), 1: (running, played)}
        process._read(ended)
        assert isinstance(lost.exception(0), Unavailable) and not played.done()
        assert list(process._waiting) == [1]
        process.close()


def test_a_trial_knows_its_session_and_no_key_but_its_own() -> None:
    session = SimpleNamespace(
        base_url="http://a/v1", api_key="k-1", reward_key="r-2", model="policy",
        record={"harbor_task": "/t"},
    )  # fmt: skip
    trial = {"agent": {"name": "oracle"}, "environment": {"type": "docker"}, "verifier": {}}
    config = harbor.trial_config(trial, session, "/f")
    assert config["agent"] == {
        "model_name": "openai/policy", "base_url": "http://a/v1", "name": "oracle",
    }  # fmt: skip
    assert config["task"] == {"path": "/t"} and config["trials_dir"] == "/f"
    assert "k-1" not in json.dumps(config) and "r-2" not in json.dumps(config)


# ---- Harbor itself


@pytest.fixture
def with_harbor(sandboxes) -> str:
    if not HARBOR.exists():
        pytest.skip(
            "needs Harbor: JAXRL_PEERS=DIR python benchmarks/peers/environments.py harbor, and "
            "JAXRL_PEERS=DIR here"
        )
    return str(HARBOR)


def answers(word: str) -> list[str]:
    reply = {"analysis": "", "plan": "", "task_complete": True}
    command = {"keystrokes": f"echo {word} > apple.txt\n", "duration": 0.5}
    return [
        json.dumps({**reply, "commands": [command]}),
        *[json.dumps({**reply, "commands": []})] * 4,
    ]


def rig_for(texts):
    from chat_tokenizers import QWEN3, byte_tokenizer
    from endpoint_rig import Speaker, serve

    from jaxrl_async.endpoint.sampling_request import CallerLimits
    from jaxrl_async.types import SamplingParams

    tokenizer = byte_tokenizer(QWEN3)
    terms = CallerLimits(
        sampling=SamplingParams(), stop_token_ids=tokenizer.eos_ids, max_new_tokens=4096,
        max_length=200_000,
    )  # fmt: skip
    return serve(Speaker(tokenizer, texts, step=400), tokenizer, terms=terms)


def session_of(rig, record):
    from endpoint_rig import KEY

    address = f"{rig.endpoint.address}/v1"
    return SimpleNamespace(base_url=address, api_key=KEY, model="tiny", record=record)


@pytest.mark.exhaustive
def test_terminus_2_plays_a_task_in_our_sandbox(with_harbor: str, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", 2)
    trials = tmp_path / "trials"
    for word, reward in (("apple", 1.0), ("pear", 0.0)):
        rig = rig_for(answers(word))
        task = harbor.harbor_task(
            str(tmp_path / "tasks"), python=with_harbor, agent=TERMINUS, trials_dir=str(trials)
        )
        try:
            score = asyncio.run(task.program(session_of(rig, task.records[0])))
        finally:
            rig.endpoint.close()
            task.program.__self__._process.close()
        assert (score.reward, score.parts["correct"]) == (reward, reward)
    from endpoint_rig import KEY

    kept = [p for p in trials.rglob("*") if p.is_file()]
    assert len(list(trials.iterdir())) == 2
    assert not [p for p in kept if KEY.encode() in p.read_bytes()]


@pytest.mark.exhaustive
def test_a_trial_that_is_cancelled_or_killed_leaves_nothing(
    with_harbor: str, tmp_path: Path
) -> None:
    write_task(tmp_path, "apple")
    command = {"keystrokes": "sleep 77801\n", "duration": 60}
    reply = json.dumps({"analysis": "", "plan": "", "commands": [command]})
    rig = rig_for([reply] * 4)
    task = harbor.harbor_task(str(tmp_path), python=with_harbor, agent=TERMINUS)
    player, session = task.program.__self__, session_of(rig, task.records[0])

    def sleeping() -> bool:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if Path(f"/proc/{name}/cmdline").read_bytes() == b"sleep\x0077801\x00":
                    return True
            except OSError:
                continue
        return False

    async def until(expected: bool) -> None:
        end = time.monotonic() + 240.0
        while sleeping() != expected:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)

    async def cancelled() -> None:
        work = asyncio.ensure_future(player.play(session))
        await until(True)
        work.cancel()
        await asyncio.wait({work})
        await until(False)

    async def killed() -> None:
        work = asyncio.ensure_future(player.play(session))
        await until(True)
        player._process._process.terminate()
        with pytest.raises(Unavailable, match="has ended"):
            await work
        await until(False)

    try:
        asyncio.run(cancelled())
        asyncio.run(killed())
    finally:
        rig.endpoint.close()
    assert player._process._process.poll() is not None
    player._process.close()

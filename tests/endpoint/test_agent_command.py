"""What a command that plays episodes sees of the run's environment."""

import logging
import os

import pytest

from jaxrl_async.config.judge_section import JudgeSection
from jaxrl_async.config.schema import Config
from jaxrl_async.config.seats_section import FillingSection
from jaxrl_async.endpoint.agent_programs import AgentSession, ProgramCommand
from jaxrl_async.endpoint.run_programs import make_programs
from jaxrl_async.endpoint.run_serving import RunServing
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.shown_environment import key_variables
from jaxrl_async.tasks.task import Task

SESSION = AgentSession(
    base_url="http://127.0.0.1:1/v1", api_key="k", model="m", record={}, prompt=""
)


@pytest.mark.full
async def test_a_command_does_not_see_the_keys_that_settings_name(monkeypatch, tmp_path) -> None:
    for name in ("JUDGES_KEY", "SEATS_KEY", "JAXRL_ASYNC_SECRET", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "sesame")
    monkeypatch.setenv("OTHERS_KIND", "seen")
    judge = JudgeSection(model="m", key_variable="JUDGES_KEY")
    seats = {"a": FillingSection(endpoint="http://a.b/v1", model="m", key_env="SEATS_KEY")}
    dumped = {"judge": judge.model_dump(), "seats": [{n: s.model_dump() for n, s in seats.items()}]}
    secrets = key_variables(dumped)
    assert secrets >= {"JUDGES_KEY", "SEATS_KEY", "VLLM_API_KEY"}
    looks = 'test -z "$JUDGES_KEY$SEATS_KEY$JAXRL_ASYNC_SECRET$VLLM_API_KEY" && test "$OTHERS_KIND"'
    await ProgramCommand(["sh", "-c", looks], secrets, ["OTHERS_*", "*_KEY"])(SESSION)
    with pytest.raises(RolloutError, match="exit code 1"):
        await ProgramCommand(["sh", "-c", looks], secrets)(SESSION)
    with pytest.raises(RolloutError, match="exit code 1"):
        await ProgramCommand(["sh", "-c", looks], (), ["OTHERS_*", "*_KEY"])(SESSION)


@pytest.mark.parametrize("name", ["JUDGES_KEY", "JAXRL_ASYNC_SECRET"])
def test_the_runs_own_keys_cannot_be_shown(name) -> None:
    with pytest.raises(RolloutError, match=f"env.program_variables names {name}"):
        ProgramCommand(["sh"], {"JUDGES_KEY"}, ["OTHERS", name])


def made(program: object, **changes: object):
    config = Config.model_validate({"env": changes, "endpoint": {"max_reward": 3.0}})
    task = Task(records=[{"question": "a"}], program=program)  # type: ignore[arg-type]
    return make_programs(config, task, RunServing(config.endpoint), lambda name, number: None)


def test_what_settings_say_reaches_the_programs(monkeypatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", "d")
    programs = made(["sh"], program_variables=["DOCKER_*"])
    assert programs.bounds.max_reward == 3.0
    assert programs._run._environ["DOCKER_CONFIG"] == "d"
    assert "DOCKER_CONFIG" not in made(["sh"])._run._environ


SEEN = {
    "HTTPS_PROXY": "http://proxy.corp:3128",
    "http_proxy": "http://proxy.corp:3128",
    "HF_HOME": "/data/hf",
    "JAVA_HOME": "/opt/java",
    "CUDA_VISIBLE_DEVICES": "1",
    "DOCKER_HOST": "unix:///run/user/1000/docker.sock",
    "PIP_INDEX_URL": "https://pypi.corp/simple",
    "REQUESTS_CA_BUNDLE": "/etc/corp.pem",
    "XDG_STATE_HOME": "/state",
}
UNSEEN = {
    "HTTP_PROXY": "http://me:sesame@proxy.corp:3128",
    "ALL_PROXY": "me:sesame@proxy.corp:1080",
    "PIP_EXTRA_INDEX_URL": "https://pypi.corp/simple?token=sesame",
    "HF_TOKEN": "sesame",
    "KUBECONFIG": "/home/me/.kube/config",
    "WANDB_API_KEY": "sesame",
}
QUIET = {"SHLVL": "1", "LS_COLORS": "di=1", "OLDPWD": "/", "JAXRL_ASYNC_X": "a", "JUDGES_KEY": "a"}


@pytest.mark.full
async def test_the_log_and_the_error_name_what_a_command_does_not_see(monkeypatch, caplog) -> None:
    """As the text log shows it: at the level of warnings."""
    for name in tuple(os.environ):
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name)
    for name, value in (SEEN | UNSEEN | QUIET | {"OPENAI_API_KEY": "the user's own"}).items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        command = ProgramCommand(["sh", "-c", "env; exit 3"], {"JUDGES_KEY"})
    (line,) = caplog.messages
    listed = ", ".join(sorted(UNSEEN))
    assert f"does not see these environment variables: {listed}. If" in line
    assert "env.program_variables" in line and "sesame" not in line
    assert {n: command._environ.get(n) for n in (*SEEN, *UNSEEN)} == SEEN | dict.fromkeys(UNSEEN)
    with pytest.raises(RolloutError, match=rf"exit code 3(?s:.*)\nIt did not see {listed} \(env\."):
        await command(SESSION)
    caplog.clear()
    shown = ProgramCommand(["sh", "-c", "exit 3"], {"JUDGES_KEY"}, tuple(UNSEEN))
    assert not caplog.messages and UNSEEN.items() <= shown._environ.items()
    with pytest.raises(RolloutError, match=r"output: nothing$"):
        await shown(SESSION)


async def test_a_long_list_of_unseen_variables_is_shortened_in_the_error(monkeypatch) -> None:
    for name in tuple(os.environ):
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name)
    for number in range(25):
        monkeypatch.setenv(f"MINE_{number:02}", "a")
    with pytest.raises(RolloutError, match=r"It did not see MINE_00, .*MINE_19 and 5 more \("):
        await ProgramCommand(["sh", "-c", "exit 3"])(SESSION)


@pytest.mark.full
def test_variables_for_a_function_are_refused() -> None:
    """It runs in this process, and sees all."""
    with pytest.raises(ConfigError, match=r"env\.program_variables: .* a function"):
        made(lambda session: None, program_variables=["DOCKER_HOST"])
    with pytest.raises(ConfigError, match=r"program_variables names JAXRL_ASYNC_SECRET"):
        made(["sh"], program_variables=["JAXRL_ASYNC_SECRET"])

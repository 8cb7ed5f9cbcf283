"""What a command that plays episodes sees of the run's environment."""

import pytest

from jaxrl_async.config.judge_section import JudgeSection
from jaxrl_async.config.schema import Config
from jaxrl_async.config.seats_section import FillingSection
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.rollout.agent_programs import AgentSession, Command
from jaxrl_async.run.builders.playing import key_variables, make_programs
from jaxrl_async.run.builders.serving import RunServing
from jaxrl_async.tasks.task import Task

SESSION = AgentSession(
    base_url="http://127.0.0.1:1/v1", api_key="k", model="m", record={}, prompt=""
)


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
    await Command(["sh", "-c", looks], secrets, ["OTHERS_*", "*_KEY"])(SESSION)
    with pytest.raises(RolloutError, match="exit code 1"):
        await Command(["sh", "-c", looks], secrets)(SESSION)
    with pytest.raises(RolloutError, match="exit code 1"):
        await Command(["sh", "-c", looks], (), ["OTHERS_*", "*_KEY"])(SESSION)


@pytest.mark.parametrize("name", ["JUDGES_KEY", "JAXRL_ASYNC_SECRET"])
def test_the_runs_own_keys_cannot_be_shown(name) -> None:
    with pytest.raises(RolloutError, match=f"env.program_variables names {name}"):
        Command(["sh"], {"JUDGES_KEY"}, ["OTHERS", name])


def made(program: object, **changes: object):
    config = Config.model_validate({"env": changes, "endpoint": {"max_reward": 3.0}})
    task = Task(records=[{"question": "a"}], program=program)  # type: ignore[arg-type]
    return make_programs(config, task, RunServing(config.endpoint), lambda name, number: None)


def test_what_settings_say_reaches_the_programs(monkeypatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "d")
    programs = made(["sh"], program_variables=["DOCKER_*"])
    assert programs.bounds.max_reward == 3.0
    assert programs._run._environ["DOCKER_HOST"] == "d"
    assert "DOCKER_HOST" not in made(["sh"])._run._environ


def test_variables_for_a_function_are_refused() -> None:
    """It runs in this process, and sees all."""
    with pytest.raises(ConfigError, match=r"env\.program_variables: .* a function"):
        made(lambda session: None, program_variables=["DOCKER_HOST"])
    with pytest.raises(ConfigError, match=r"program_variables names JAXRL_ASYNC_SECRET"):
        made(["sh"], program_variables=["JAXRL_ASYNC_SECRET"])

"""Programs that play episodes and behave badly: they leave processes behind, swallow their
cancellation, and look for the run's secrets.

A limit of time in these tests only ends a test that would hang: it is many times what is needed.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from played_programs import played, programs

from jaxrl_async.endpoint.agent_programs import AgentSession, ProgramCommand
from jaxrl_async.errors import RolloutError, RolloutTimeout
from jaxrl_async.rollout.command_groups import COMMANDS
from jaxrl_async.scorers.reward_call import RewardCall
from jaxrl_async.scorers.reward_process import RewardProcesses
from jaxrl_async.shown_environment import hide_secrets, without_secrets
from jaxrl_async.tasks import usercode
from jaxrl_async.tasks.function_source import FunctionSource
from jaxrl_async.testing.fakes import make_episode, make_prompt

ROOT = Path(__file__).parents[2]
HANG_S = 60.0
SESSION = AgentSession(
    base_url="http://127.0.0.1:1/v1", api_key="k", model="m", record={}, prompt=""
)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_of(file: Path) -> list[int]:
    """The processes of a file of ids that are alive, once there has been time for them to go."""
    pids = [int(word) for word in file.read_text().split()]
    assert pids, "the program has begun them"
    end = time.monotonic() + HANG_S
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return [pid for pid in pids if is_alive(pid)]


# ---- processes that are left behind

CHILDREN = {
    "in the background": "sleep 600 & echo $! >> PIDS",
    "without our output": "sleep 600 >/dev/null 2>&1 </dev/null & echo $! >> PIDS",
    "in a session of its own": "setsid sh -c 'echo $$ >> PIDS; exec sleep 600' &",
    "deaf to signals": "sh -c 'trap \"\" TERM HUP INT; echo $$ >> PIDS; sleep 600; sleep 600' &",
    "twice forked": "(setsid sh -c '(setsid sh -c \"echo \\$\\$ >> PIDS; exec sleep 600\" &)' &)",
    "a tree": "setsid sh -c 'for i in 1 2 3; do sleep 600 & echo $! >> PIDS; done; wait' &",
    "one that begins others": (
        "setsid sh -c 'while :; do sleep 600 & echo $! >> PIDS; sleep 0.01; done' &"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("child", CHILDREN)
async def test_a_command_that_exits_has_ended_whatever_it_left(tmp_path: Path, child: str) -> None:
    pids = tmp_path / "pids"
    script = f"{CHILDREN[child]}\nuntil test -s PIDS; do sleep 0.01; done; exit CODE"
    script = script.replace("PIDS", str(pids))
    async with asyncio.timeout(HANG_S):
        await ProgramCommand(["sh", "-c", script.replace("CODE", "0")])(SESSION)
        assert not left_of(pids)
        with pytest.raises(RolloutError, match="exit code 7"):
            await ProgramCommand(["sh", "-c", script.replace("CODE", "7")])(SESSION)
    assert not left_of(pids) and not COMMANDS.running


@pytest.mark.full
@pytest.mark.parametrize("child", ["in the background", "twice forked", "one that begins others"])
def test_a_command_that_takes_too_long_ends_with_all_it_has_started(
    tmp_path: Path, child: str
) -> None:
    script = f"{CHILDREN[child]}\nsleep 600".replace("PIDS", str(tmp_path / "pids"))
    with pytest.raises(RolloutTimeout, match="more than 2 s"):
        played(programs(["sh", "-c", script], total_s=2.0))
    assert not left_of(tmp_path / "pids")


async def test_an_output_that_somebody_else_holds_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The pipe is kept open by a process that is not the command's: ours, which opens it again."""
    held: list[int] = []
    command = await COMMANDS.start(["sh", "-c", "echo $$; sleep 0.2"], {"PATH": os.environ["PATH"]})
    try:
        pid = int(await command.stdout.readline())
        held.append(os.open(f"/proc/{pid}/fd/1", os.O_WRONLY))
        async with asyncio.timeout(HANG_S):
            assert await command.wait() == 0
            await COMMANDS.end(command)
    finally:
        for descriptor in held:
            os.close(descriptor)


async def test_a_reaper_that_is_killed_takes_its_session_along(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ > {pids}; wait"
    command = await COMMANDS.start(["sh", "-c", script], {"PATH": os.environ["PATH"]})
    try:
        while not pids.exists() or not pids.read_text():
            await asyncio.sleep(0.01)
        os.kill(command.pid, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            assert await command.wait() == -signal.SIGKILL
    finally:
        await COMMANDS.end(command)
    assert not left_of(pids)


async def test_a_reaper_that_is_stopped_ends_nevertheless(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("jaxrl_async.rollout.command_groups.REAP_S", 0.2)
    pids = tmp_path / "pids"
    script = f"echo $$ > {pids}; sleep 600"
    command = await COMMANDS.start(["sh", "-c", script], {"PATH": os.environ["PATH"]})
    while not pids.exists() or not pids.read_text():
        await asyncio.sleep(0.01)
    os.kill(command.pid, signal.SIGSTOP)
    async with asyncio.timeout(HANG_S):
        await COMMANDS.end(command)
    assert not left_of(pids)


REWARD = """
import subprocess, time
def leaves(completion, pids):
    child = subprocess.Popen(["setsid", "sleep", "600"])
    with open(pids, "a") as file:
        file.write(f"{child.pid} ")
    time.sleep(600)
"""


@pytest.mark.full
def test_what_a_reward_in_a_process_has_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    source = FunctionSource(module="user_reward", file=str(tmp_path / "reward.py"), name="leaves")
    pids = tmp_path / "pids"
    prompt = make_prompt(1)
    object.__setattr__(prompt, "columns", {"pids": str(pids)})
    call = RewardCall(prompt=prompt, episodes=(make_episode([1]),), texts=("a",), last_texts=("a",))
    with pytest.raises(usercode.TooLate):
        RewardProcesses(1).ask(source, call, 2.0)
    assert not left_of(pids)


# ---- programs that do not end


async def swallows(agent: AgentSession) -> None:
    """Retries on everything, as many agents do."""
    while True:
        with suppress(BaseException):
            await asyncio.sleep(3600)


async def waits_in_a_thread(agent: AgentSession) -> None:
    await asyncio.to_thread(time.sleep, 3600)


async def blocks_its_loop(agent: AgentSession) -> None:
    time.sleep(2.0)


async def cleans_up_for_ever(agent: AgentSession) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        await swallows(agent)


def makes_one_that_swallows(agent: AgentSession):
    return swallows(agent)


ENDLESS = (swallows, waits_in_a_thread, cleans_up_for_ever, makes_one_that_swallows)


@pytest.mark.full
@pytest.mark.parametrize("program", [*ENDLESS, blocks_its_loop])
def test_a_program_that_does_not_end_fails_its_member_and_holds_up_nothing(
    program, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("jaxrl_async.endpoint.agent_programs.REAP_S", 0.1)
    monkeypatch.setattr(usercode, "LEFT_S", 0.05)
    counts: dict[str, int] = {}
    with pytest.raises(RolloutTimeout, match=r"more than 0\.2 s"):
        played(programs(program, counts.__setitem__, total_s=0.2))
    assert counts == {"session_timeouts": 1}
    usercode.start_async(lambda: asyncio.sleep(0)).result(HANG_S)  # it is free again
    if program is swallows:  # cancelled, and alive
        assert "the program of g5/m0 does not end 0.05 s after it was cancelled" in caplog.text


@pytest.mark.full
def test_a_call_that_is_cancelled_before_it_has_begun_has_ended() -> None:
    """The loop for user code is busy meanwhile."""

    async def waits() -> None:
        with pytest.raises(usercode.TooLate):
            await usercode.run_async(lambda: asyncio.sleep(0), 0.01, reap_s=HANG_S)

    busy = usercode.start_async(lambda: blocks_its_loop(SESSION))
    asyncio.run(waits())
    assert busy.done()


def test_a_program_that_ends_when_it_is_cancelled_is_waited_for() -> None:
    ended = []

    async def tidy(agent: AgentSession) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            ended.append(agent.api_key)

    with pytest.raises(RolloutTimeout):
        played(programs(tidy, total_s=0.2))
    assert len(ended) == 1


EXITS = """
import sys
sys.path[:0] = {paths}
import test_programs
from played_programs import played, programs
from jaxrl_async.endpoint import agent_programs
from jaxrl_async.errors import RolloutTimeout
agent_programs.REAP_S = 0.1
try:
    played(programs(test_programs.{program}, total_s=0.2))
except RolloutTimeout:
    print("ended")
"""


@pytest.mark.full
@pytest.mark.parametrize("program", [p.__name__ for p in ENDLESS])
def test_the_process_exits_though_a_program_has_not_ended(program: str) -> None:
    paths = [str(Path(__file__).parent), str(ROOT / "tests/helpers"), str(ROOT)]
    code = EXITS.format(paths=paths, program=program)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


KEEPS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from jaxrl_async import stuck_threads
stuck_threads.EXIT_S = 0.3
ThreadPoolExecutor(1, "pool").submit(time.sleep, 3600)
threading.Thread(target=time.sleep, args=(3600,)).start()
sys.exit(stuck_threads.at_exit_end_with(75))
"""


def test_threads_of_a_program_do_not_keep_a_command_that_has_done_its_work() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", KEEPS], capture_output=True, text=True, timeout=HANG_S, env=env
    )
    assert done.returncode == 75 and "pool_0" in done.stderr, done.stderr


def test_a_loop_ends_though_a_task_on_it_swallows_its_cancellation(caplog) -> None:
    async def work() -> int:
        asyncio.get_running_loop().create_task(swallows(SESSION), name="deaf")
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
        await asyncio.sleep(0)
        return 5

    assert usercode.run_loop(work(), reap_s=0.1) == 5
    assert "deaf" in caplog.text and "is abandoned" in caplog.text


# ---- what programs see


async def test_a_command_sees_the_variables_that_it_needs_and_no_others(
    tmp_path: Path, monkeypatch
) -> None:
    given = {
        "PATH": os.environ["PATH"], "HOME": "/home/a", "LANG": "C.UTF-8", "LC_TIME": "C",
        "TZ": "UTC", "TMPDIR": "/tmp", "VIRTUAL_ENV": "/venv", "WANDB_API_KEY": "w",
        "HF_TOKEN": "h", "AWS_SECRET_ACCESS_KEY": "a", "DATABASE_URL": "postgres://u:p@h/d",
        "JAXRL_ASYNC_SECRET": "s", "JUDGE": "j", "DOCKER_HOST": "d",
    }  # fmt: skip
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = tmp_path / "seen"
    command = ProgramCommand(["sh", "-c", f"env | cut -d= -f1 > {seen}"], {"JUDGE"}, ["DOCKER_*"])
    await command(SESSION)
    told = ("JAXRL_", "OPENAI_", "ANTHROPIC_")
    names = {name for name in seen.read_text().split() if not name.startswith(told)}
    allowed = {"PATH", "HOME", "LANG", "LC_TIME", "TZ", "TMPDIR", "VIRTUAL_ENV", "DOCKER_HOST"}
    assert names - {"_", "PWD", "OLDPWD", "SHLVL", "LC_CTYPE"} == allowed  # a shell's own
    assert set(without_secrets(given, {"JUDGE"}, ["*"])) == set(given) - {
        "JUDGE", "JAXRL_ASYNC_SECRET",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("OPENAI_API_KEY", "x", True), ("HF_TOKEN", "x", True), ("AWS_ACCESS_KEY_ID", "x", True),
        ("GITHUB_PAT", "x", True), ("PGPASSWORD", "x", True), ("TOKEN_2", "x", True),
        ("NPM_AUTH", "x", True), ("SENTRY_DSN", "x", True), ("MY_SECRETS", "x", True),
        ("DB", "mysql://me:word@host/db", True), ("JAXRL_ASYNC_KEY", "x", True),
        ("TOKENIZERS_PARALLELISM", "x", False), ("KEYBOARD", "x", False), ("HF_TOKEN", "", False),
        ("GIT_AUTHOR_NAME", "x", False), ("PATH", "/bin", False), ("URL", "http://host/a", False),
    ],
)  # fmt: skip
def test_which_variables_are_taken_for_secrets(monkeypatch, name, value, is_hidden) -> None:
    monkeypatch.setattr("jaxrl_async.shown_environment._overwrite", lambda names: None)
    monkeypatch.setattr("jaxrl_async.shown_environment.SET_DUMPABLE", 3)  # only asks
    for other in list(os.environ):
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    assert hide_secrets() == ((name,) if is_hidden else ())
    assert os.environ[name] == value


LOOKS = """
import asyncio, os, sys
from jaxrl_async.endpoint.agent_programs import AgentSession, ProgramCommand
from jaxrl_async.shown_environment import hide_secrets
hidden = hide_secrets(("NAMED",))
assert os.environ["HF_TOKEN"] == "sesame-1" and os.environ["NAMED"] == "sesame-3"
script = '''
pid=$$
while test $pid -gt 1; do
    cat /proc/$pid/environ 2>/dev/null | tr '\\\\0' '\\\\n' | grep -a sesame && exit 9
    test $pid = {stop} && break
    pid=$(cut -d' ' -f4 /proc/$pid/stat)
done
exit 0
'''.replace("{stop}", str(os.getpid()))
told = AgentSession(base_url="http://a/v1", api_key="k", model="m", record={}, prompt="")
asyncio.run(ProgramCommand(["sh", "-c", script])(told))
print(*sorted(hidden))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_secret_of_the_run_is_in_proc_for_what_it_starts() -> None:
    secrets = {
        "HF_TOKEN": "sesame-1", "JAXRL_ASYNC_SECRET": "sesame-2", "NAMED": "sesame-3",
        "DATABASE_URL": "postgres://me:sesame-4@db/x", "AWS_SECRET_ACCESS_KEY": "sesame-5",
    }  # fmt: skip
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", LOOKS], env={**plain, **secrets}, capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, sorted(secrets)), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_processes_of_the_same_user_cannot_read_a_run_with_secrets() -> None:
    code = (
        "from jaxrl_async.shown_environment import hide_secrets as h; import ctypes; h();"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    for more, dumpable in (({}, "1"), ({"MY_API_KEY": "x"}, "0")):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **more}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stdout.strip() == dumpable, done.stderr


def scopes_signals() -> bool:
    """Whether the system keeps a root's program from signalling others (Landlock, Linux 6.12)."""
    if sys.platform != "linux" or os.geteuid():
        return False
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 6


@pytest.mark.skipif(not scopes_signals(), reason="needs root and Linux 6.12")
async def test_a_command_can_neither_signal_nor_trace_what_is_not_its_own(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        script = (
            f"kill {other.pid} && exit 3; kill $PPID && exit 4; kill {os.getpid()} && exit 5;"
            f"head -c 1 /proc/{other.pid}/mem >/dev/null 2>&1; sleep 600 & kill $!"
        )
        await ProgramCommand(["sh", "-c", script])(SESSION)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()

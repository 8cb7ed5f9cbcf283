"""A run whose programs play is killed, and stopped, while their sessions are open."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from runs import CONFIGS

from jaxrl_async.audit import audit_run
from jaxrl_async.metrics.recorder import read_lines

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
GROUP, STEPS = 2, 12
TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start={steps: 5, batch_size: 16}",
    "sampler.slots=8",
    f"algorithm={{group_size: {GROUP}, groups_per_step: 4, learning_rate: 1e-3}}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "staleness.max_staleness=2",
    f"run={{steps: {STEPS}, overwrite: false}}",
    "eval.every=0",
    "checkpoint={every: 1}",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "env.program_max_calls=60000",
)
PROGRAM = '''
"""The built-in game by programs that wait while the file `hold` is there, and say so."""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path

from openai import AsyncOpenAI, OpenAI

from jaxrl_async import Task
from jaxrl_async.tasks.guess_number import GuessNumber, guess_number

HERE = Path(__file__).parent
GAME = guess_number(highest=8, guesses=4)


def first(record):
    game = GuessNumber(4)
    return game, [{"role": "user", "content": game.reset(record)}]


def goes_on(game, messages, choice):
    """Return the reward, or None while the game goes on."""
    if choice.finish_reason == "length":
        return 0.0
    answer = choice.message.content or ""
    messages.append({"role": "assistant", "content": answer})
    answered = game.step({"role": "assistant", "content": answer})
    if isinstance(answered, str):
        messages.append({"role": "user", "content": answered})
        return None
    return answered.reward or sum(answered.parts.values())


class Held:
    """While it waits its key and process can be read."""

    def __init__(self, url, key):
        self.file = HERE / "held" / key
        self.file.write_text(json.dumps({"url": url, "key": key, "pid": os.getpid()}))

    def __bool__(self):
        if (HERE / "hold").exists():
            return True
        self.file.unlink(missing_ok=True)
        return False


async def play(session):
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        game, messages = first(session.record)
        reward = None
        while reward is None:
            answer = await client.chat.completions.create(model=session.model, messages=messages)
            held = Held(session.base_url, session.api_key)
            while held:
                await asyncio.sleep(0.02)
            reward = goes_on(game, messages, answer.choices[0])
        return reward


words = dict(records=GAME.records, held_out=[*GAME.held_out][:4], words=GAME.words)
as_function = Task(program=play, **words)
as_command = Task(program=[sys.executable, "-I", "-S", str(HERE / "agent.py")], **words)
'''
COMMAND = '''
"""Two turns by a command that has the standard library alone."""

import json
import os
import time
import urllib.request
from pathlib import Path

HERE, URL, KEY = Path(__file__).parent, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def post(path, body, key=KEY):
    request = urllib.request.Request(
        URL + path, json.dumps(body).encode(), {"Authorization": "Bearer " + key}
    )
    return json.load(urllib.request.urlopen(request))


reward_key = post("/session/reward_key", {})["reward_key"]
messages = [{"role": "user", "content": "1"}]
for _ in range(2):
    reply = post("/chat/completions", {"messages": messages})["choices"][0]["message"]
    file = HERE / "held" / KEY
    file.write_text(json.dumps({"url": URL, "key": KEY, "pid": os.getpid()}))
    while (HERE / "hold").exists():
        time.sleep(0.02)
    file.unlink(missing_ok=True)
    messages += [{"role": "assistant", "content": reply["content"]}]
    messages += [{"role": "user", "content": "2"}]
post("/session/reward", {"reward": len(reply["content"] or "") % 3}, reward_key)
'''


@dataclass
class HeldRun:
    """A run in a process of its own, and what its programs leave in the folder."""

    folder: Path
    runs: Path
    way: str
    process: "subprocess.Popen[str] | None" = None

    @property
    def root(self) -> Path:
        return self.folder / "held"

    def start(self, *flags: str) -> None:
        """Start it, or go on with it."""
        log = (self.folder / "log.txt").open("a")
        folder = f"run={{dir: {self.runs}, name: {self.way}}}"
        settings = [*TINY, folder, f"task={self.file}:{self.way}"]
        words = [str(CONFIGS / "guess_number.yaml"), *flags, *settings]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxrl_async.train", *words], cwd=ROOT, stdout=log, stderr=log
        )
        log.close()

    @property
    def file(self) -> Path:
        return self.folder / "games.py"

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def held(self) -> list[dict[str, str | int]]:
        """The programs that wait."""
        return [json.loads(text) for f in self.root.iterdir() if (text := f.read_text())]

    def hold(self) -> list[dict[str, str | int]]:
        """Have all programs wait; return them when no more come."""
        (self.folder / "hold").touch()
        self.until(lambda: self.held())
        last, since = 0, time.monotonic()
        while time.monotonic() - since < 1.5:
            if len(self.held()) != last:
                last, since = len(self.held()), time.monotonic()
            time.sleep(0.05)
        return self.held()

    def release(self) -> None:
        for file in self.root.iterdir():
            file.unlink()
        (self.folder / "hold").unlink()

    def metrics(self) -> list[dict[str, float]]:
        return [line for line in read_lines(self.runs / self.way / "metrics.jsonl") if line["step"]]

    def until(self, is_so: Callable[[], object], seconds: float = 180.0) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert self.process is not None and self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < end, self.log[-3000:]
            time.sleep(0.02)

    def steps_done(self) -> int:
        path = self.runs / self.way / "metrics.jsonl"
        return max((line["step"] for line in read_lines(path)), default=0) if path.exists() else 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, which share what is compiled."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def held_run(tmp_path: Path, runs: Path, request: pytest.FixtureRequest) -> Iterator[HeldRun]:
    run = HeldRun(tmp_path, runs, request.param)
    run.root.mkdir()
    run.file.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "agent.py").write_text(COMMAND, encoding="utf-8")
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.kill()
        run.process.wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Caller:
    """Calls with the key of an open session again and again, until nobody listens any more."""

    def __init__(self, held: dict[str, str | int]) -> None:
        self.held, self.answered = held, 0
        self.refused: list[tuple[int, str | None]] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        messages = [{"role": "user", "content": "1"}]
        with openai.OpenAI(
            base_url=str(self.held["url"]), api_key=str(self.held["key"]), max_retries=0, timeout=60
        ) as client:
            while True:
                try:
                    client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
                    self.answered += 1
                except openai.APIStatusError as error:
                    self.refused.append(
                        (error.status_code, error.response.headers.get("retry-after"))
                    )
                except openai.APIConnectionError:
                    return


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("held_run", ["as_function", "as_command"], indirect=True)
def test_killed_and_stopped_with_sessions_open_nothing_is_lost_or_trained_twice(
    held_run: HeldRun,
) -> None:
    run = held_run
    run.start()
    run.until(lambda: run.steps_done() >= 1)
    killed = run.hold()
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    pids = {int(h["pid"]) for h in killed}
    end = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_alive, pids)), "programs of the dead run leave"
    run.release()

    before = run.steps_done()
    run.start("--resume")
    run.until(lambda: run.steps_done() > before)
    assert sum(restarts(run)) <= len(killed) // GROUP
    stopped = run.hold()
    assert len(stopped) % GROUP == 0 and run.steps_done() < STEPS - 1
    callers = [Caller(stopped[0]) for _ in range(8)]  # some call is under way when it stops
    run.until(lambda: all(caller.answered for caller in callers))
    run.process.send_signal(signal.SIGTERM)
    for caller in callers:
        caller.thread.join(60)
    refused = [each for caller in callers for each in caller.refused]
    assert run.process.wait(60) == 75, run.log[-3000:]
    assert refused and set(refused) == {(503, "5")}
    assert not any(is_alive(int(h["pid"])) for h in stopped)
    run.release()

    run.start("--resume")
    assert run.process.wait(300) == 0, run.log[-3000:]
    lines = run.metrics()
    # Of the sessions in a checkpoint, those with a finished call continue; groups without restart.
    resumed = sum(line["faults/continued_episodes"] for line in lines)
    assert resumed + sum(restarts(run)) >= 1
    assert not any(line["faults/unrepeated_calls"] for line in lines)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["faults/restarted_groups"] for line in lines) == sum(restarts(run))
    assert not any(line["faults/failed_groups"] for line in lines)
    found = audit_run(run.runs / run.way)
    assert not found.problems and found.resumed == 2 and found.trained == 4 * STEPS
    assert found.steps == STEPS and not found.dropped
    assert os.listdir(run.root) == []


def restarts(run: HeldRun) -> list[int]:
    """How many groups with open sessions began anew, by resumption, by the log."""
    return [
        int(n) for n in re.findall(r"(\d+) groups with open sessions or games start over", run.log)
    ]

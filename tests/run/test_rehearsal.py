"""What is compiled beside the warm start is what the run's samplers need."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from heard_compiles import compiles_of_samplers

from jaxrl_async.config.load import load
from jaxrl_async.cpu.kernel_library import SAMPLING, kernels_are_there
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run import assemble
from jaxrl_async.run.builders import rehearsal
from jaxrl_async.run.builders.rehearsal import Rehearsal, rehearsal_requests
from jaxrl_async.run.builders.samplers import requested_mixes
from jaxrl_async.run.loop import train
from jaxrl_async.sampler.compile_ahead import CompilingAhead
from jaxrl_async.sampler.device import engine
from jaxrl_async.sampler.device.engine import Programs
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.types import Prompt, SamplingParams

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "algorithm={group_size: 2, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 256}",
    "staleness.max_staleness=0",
    "warm_start={steps: 2, batch_size: 8}",
    "run.steps=2",
    "eval.every=1",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
KINDS = {
    "plain": ("mesh.sampler.tensor=1",),
    "divided": ("mesh.sampler.tensor=2", "mesh.samplers=2"),
    "eight bits": ("weights={dtype: int8, checksum: true}",),
    "adapters": ("model.lora={rank: 2, alpha: 4, base: nf4}",),
    "masks": ("sampler.top_k=4",),
}


class Attended(Rehearsal):
    """A rehearsal that the warm start waits for."""

    seen: Callable[[], None] = staticmethod(lambda: None)  # called when it has ended

    def start(self) -> None:
        begun = self._thread.ident is not None
        super().start()
        self._thread.join()
        if not begun:
            type(self).seen()


def run(folder: Path, *words: str, slots: int, name: str) -> list[dict]:
    """Train a run in this process; return its metrics without times. slots: programs are shared by
    samplers of one shape, and each test has its own."""
    (folder / "empty.yaml").write_text("")
    sampler = f"sampler={{slots: {slots}, max_length: 32, max_new_tokens: 8}}"
    where = (f"run.dir={folder}", f"run.name={name}", sampler)
    train(load(str(folder / "empty.yaml"), [*TINY, *where, *words]))
    return [comparable(line) for line in read_lines(folder / name / "metrics.jsonl")]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Programs]:
    """The programs of every sampler that is made."""
    made: list[Programs] = []
    known = engine.programs_of

    def noted(spec: EngineSpec) -> Programs:
        made.append(known(spec))
        return made[-1]

    monkeypatch.setattr(engine, "programs_of", noted)
    return made


def counts(programs: Programs) -> dict[str, int]:
    """How many of each are compiled."""
    return {n: p._cache_size() for n, p in zip(Programs._fields, programs, strict=True)}


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        *(
            pytest.param(kind, marks=[pytest.mark.full, pytest.mark.exhaustive])
            for kind in KINDS
            if kind != "plain"
        ),
    ],
)
def test_the_runs_samplers_find_their_programs_and_draw_the_same(kind, tmp_path, monkeypatch, used):
    slots, words = 8 + 2 * list(KINDS).index(kind), KINDS[kind]
    then: list[dict[str, int]] = []
    monkeypatch.setattr(assemble, "Rehearsal", Attended)
    monkeypatch.setattr(Attended, "seen", lambda: then.extend(map(counts, used)))
    got = run(tmp_path, *words, slots=slots, name="rehearsed")
    assert len(then) == len(used) / 2 == (2 if kind == "divided" else 1), "one for each sampler"
    for before, after in zip(then, map(counts, used), strict=False):
        assert before["generate"] > 1 and before["prefill"] > 0 and before["insert"] > 0
        for name in ("prepare", "prepare_adapter", "empty", "probe"):
            assert after[name] == before[name], f"{name}: weights and pages lie as they did"
    monkeypatch.setattr(Rehearsal, "start", lambda self: None)
    monkeypatch.setattr(assemble, "Rehearsal", Rehearsal)
    assert run(tmp_path, *words, slots=slots, name="alone") == got
    assert "rehearsal" not in {t.name for t in threading.enumerate()}


@pytest.mark.full
def test_a_rehearsal_that_fails_is_logged_and_the_run_continues(tmp_path, monkeypatch, caplog):
    def broken(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(rehearsal, "zero_weights", broken)
    monkeypatch.setattr(assemble, "Rehearsal", Attended)
    assert run(tmp_path, slots=8, name="alone")[-1]["step"] == 2
    assert "could not be compiled ahead: no room" in caplog.text


def test_rehearsed_answers_have_all_lengths_that_fit(tmp_path: Path) -> None:
    def prompt(length: int) -> Prompt:
        ids = np.arange(length, dtype=np.int32)
        return Prompt(prompt_id=0, position=0, token_ids=ids, text="", reference="")

    (tmp_path / "empty.yaml").write_text("")
    config = load(
        str(tmp_path / "empty.yaml"),
        ["data.max_prompt_tokens=16", "sampler={max_length: 32, max_new_tokens: 20}"],
    )
    prompts = [prompt(4), prompt(20), prompt(32), prompt(0)]
    requests = rehearsal_requests(prompts, 50, SamplingParams(), config.sampler, extras=True)
    lengths = {4: set(), 20: set(), 6: set()}  # 6: half the room beside an answer
    for request in requests:
        assert request.extras and request.forced_length is not None
        lengths[len(request.token_ids)].add(request.forced_length)
    assert lengths[4] <= set(range(1, 21)) and {1, 20} & lengths[4] and len(lengths[4]) > 15
    assert lengths[20] <= set(range(1, 13)) and len(lengths[20]) > 9
    assert len({request.key for request in requests}) == 150


@pytest.mark.full
@pytest.mark.exhaustive
def test_episodes_that_an_environment_opens_are_rehearsed(tmp_path, monkeypatch, caplog) -> None:
    """Their prompts have no tokens yet."""
    caplog.set_level("INFO")
    monkeypatch.setattr(assemble, "Rehearsal", Attended)
    words = [w for w in TINY if not w.startswith(("data.", "trainer="))]
    words += ["trainer={row_length: 160, micro_batch_tokens: 640}", "task=guess_number"]
    words += ["sampler={slots: 6, max_length: 160, max_new_tokens: 8}"]
    train(load({"run": {"dir": str(tmp_path)}}, words))
    assert "programs of a sampler were compiled during the warm start" in caplog.text
    assert "could not be compiled ahead" not in caplog.text


@pytest.fixture
def compiled_now():
    with compiles_of_samplers() as names:
        yield names


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", pytest.param("masks", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("warm", [0, 2])
def test_nothing_of_the_samplers_is_compiled_later(warm, kind, tmp_path, monkeypatch, compiled_now):
    """Evaluations and training meet in blocks or not, as the threads happen to go."""
    if not kernels_are_there(SAMPLING):
        pytest.skip("needs g++ or clang++ and a processor with AVX2")
    monkeypatch.setattr(assemble, "Rehearsal", Attended)
    slots = 26 + 2 * (2 * bool(warm) + (kind == "masks"))
    ready = CompilingAhead._run

    def waited(self: CompilingAhead) -> None:
        ready(self)
        done.append(len(compiled_now))

    done: list[int] = []
    monkeypatch.setattr(CompilingAhead, "_run", waited)
    monkeypatch.setattr(CompilingAhead, "leave", lambda self: None)  # a short run may end before
    words = (*KINDS[kind], f"warm_start={{steps: {warm}, batch_size: 8}}", "run.steps=12")
    run(tmp_path, *words, slots=slots, name="known")
    assert len(done) == 1 + bool(warm), "the rehearsal's sampler, and the run's"
    samplings = 3 if kind == "masks" else 2  # training's and an evaluation's; with masks both, too
    assert len(compiled_now) == done[-1] == 2 * 2 + 2 + 2 * samplings
    by_whom = {thread for _, thread in compiled_now}
    assert ("sampler" in by_whom) == (not warm), "its first block waits for what it needs"


@pytest.mark.full
def test_ahead_or_not_is_the_users_choice(tmp_path, monkeypatch):
    begun: list[str] = []
    real = threading.Thread.start

    def noted(self: threading.Thread) -> None:
        begun.append(self.name)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    run(tmp_path, "sampler.compile_ahead=false", slots=8, name="when_needed")
    assert not [name for name in begun if "compiles" in name or "rehearsal" in name]
    run(tmp_path, slots=8, name="ahead")
    assert {"rehearsal", "sampler compiles"} <= set(begun)


@pytest.mark.parametrize(
    ("words", "mixes"),
    [
        ((), [Mix(), Mix(greedy=True)]),
        (("eval.every=0",), [Mix()]),
        (("eval.temperature=0.5",), [Mix()]),
        (("sampler.min_p=0.1",), [Mix(truncated=True, extras=True), Mix(greedy=True)]),
        (
            ("sampler.min_p=0.1", "algorithm.keep_sampling_mask=false"),
            [Mix(truncated=True), Mix(greedy=True)],
        ),
        (("algorithm.keep_sampling_mask=true",), [Mix(), Mix(greedy=True)]),
        (
            ("sampler.top_p=0.9",),
            [Mix(truncated=True, extras=True), Mix(greedy=True)],
        ),
    ],
)
def test_what_a_runs_requests_ask_for(words, mixes):
    assert list(requested_mixes(load({}, [*words]))) == mixes

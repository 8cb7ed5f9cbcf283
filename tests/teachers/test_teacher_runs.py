"""Whole runs whose answers are compared with teachers that are asked over HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_level import byte_level_tokenizer
from fake_teacher import FakeTeacher
from runs import config_of, metrics_of, weights_of

from jaxrl_async.audit import audit_run
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=0",
    "sampler.slots=16",
    "sampler.max_new_tokens=8",
    "sampler.max_length=64",
    "algorithm.group_size=2",
    "algorithm.groups_per_step=2",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=1",
    "data.addition.eval_size=4",
    "eval.every=0",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
    "checkpoint.every=2",
)
VOCAB = 64
"""More than the tokens of additions."""


def taught(folder: Path, url: str, *overrides: str) -> Config:
    return config_of(
        "addition",
        folder,
        *TINY,
        "teacher.source=teachers",
        "teacher.rewards=0.0",
        f"teachers={{sum: {{url: '{url}', model: m}}}}",
        *overrides,
    )


def stopped_and_resumed(
    folder: Path, made: Callable[..., Config]
) -> tuple[Config, list[dict[str, Any]]]:
    """A run of four updates that was stopped after two and resumed, and the metrics of its updates.
    Its weights are those of a run that was never stopped. made: from a folder and settings."""
    whole = made(folder / "whole", "run.steps=4")
    train(whole)
    train(made(folder / "parts", "run.steps=2"))
    again = made(folder / "parts", "run.steps=4", "run.resume=true", "run.overwrite=false")
    train(again)
    for name, values in weights_of(whole).items():
        np.testing.assert_array_equal(values, weights_of(again)[name], err_msg=name)
    steps = [line for line in metrics_of(again) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    return again, steps


def test_the_tasks_of_a_run_share_its_teacher(tmp_path: Path) -> None:
    """Its calls are limited and counted over all of them."""
    sums = "{data: {addition: {digits: 1, eval_size: 4}}}"
    with FakeTeacher(VOCAB, 3) as server:
        server.pause_s = 0.01
        config = taught(
            tmp_path,
            server.url,
            "teachers.sum.concurrency=1",
            f"tasks={{a: {sums}, b: {sums}}}",
            "data.addition=null",
            "data.max_prompt_tokens=null",
            "run.steps=2",
        )
        train(config)
        assert server.most_at_once == 1
        before_the_run = sum("/tokenize" in path for path, _, _ in server.bodies)
        calls = len(server.bodies) - before_the_run
    lines = metrics_of(config)
    assert {"task/a/groups", "task/b/groups"} <= {key for line in lines for key in line}
    counted = sum(line.get("teacher/sum/calls", 0.0) for line in lines)
    assert 0 < counted <= calls, "each once, and those before the run not at all"


@pytest.mark.exhaustive
def test_a_resumed_run_learns_the_same_from_its_teacher(tmp_path: Path) -> None:
    calm = ("staleness.max_staleness=0",)
    with FakeTeacher(VOCAB, 0) as server:
        again, steps = stopped_and_resumed(
            tmp_path, lambda folder, *more: taught(folder, server.url, *calm, *more)
        )
    for line in steps:
        known = line["teacher/sum/tokens"]  # the others pad the policy's vocabulary
        assert known + line["teacher/sum/unknown_tokens"] == line["train/tokens"]
        gap = line["policy/teacher_gap"] * line["train/tokens"]
        assert line["teacher/sum/kl"] * known == pytest.approx(gap, rel=1e-5)
    assert all(line["teacher/sum/calls"] > 0 for line in steps)
    assert audit_run(tmp_path / "parts" / again.run.name).problems == ()


@pytest.mark.exhaustive
def test_a_teacher_with_other_tokens_is_refused_before_the_run(tmp_path: Path) -> None:
    with FakeTeacher(VOCAB, 0) as server:
        server.tokenize = lambda text: [ord(c) % 7 for c in text]
        with pytest.raises(ConfigError, match=r"teachers\.sum has other tokens than the policy"):
            train(taught(tmp_path, server.url, "run.steps=1"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("advantage", ()),
        ("loss", ("teacher.top_k=6",)),
        ("loss", ("teacher.top_k=6", "teacher.unmatched_weight=0.5")),
    ],
)
def test_a_resumed_run_learns_the_same_from_a_teacher_with_other_tokens(
    form: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    other = byte_level_tokenizer(500)
    other.save_pretrained(tmp_path / "tokenizer")
    with FakeTeacher(other.vocab_size, 0) as server:
        server.tokenize = lambda text: other.encode(text).tolist()
        there = f"url: '{server.url}', model: m, tokenizer: {tmp_path / 'tokenizer'}"
        calm = [
            "staleness.max_staleness=0",
            f"teachers={{sum: {{{there}}}}}",
            f"teacher.form={form}",
            *settings,
        ]
        again, steps = stopped_and_resumed(
            tmp_path, lambda folder, *more: taught(folder, server.url, *calm, *more)
        )
        bodies = [body["prompt"] for path, body, _ in server.bodies if path == "/v1/completions"]
    assert max(max(ids) for ids in bodies) > VOCAB, "the policy has no such tokens"
    for line in steps:
        known = line["teacher/sum/tokens"]
        lost = line["teacher/sum/unknown_tokens"] + line["teacher/sum/unaligned_tokens"]
        assert known > 0 and known + lost == line["train/tokens"]
        if form == "loss":
            assert line["policy/teacher_divergence"] > 0
    assert audit_run(tmp_path / "parts" / again.run.name).problems == ()


def test_a_record_that_names_no_teacher_is_refused_before_the_run(tmp_path: Path) -> None:
    with FakeTeacher(VOCAB, 0) as server:
        one = f"{{url: '{server.url}', model: m}}"
        with pytest.raises(ConfigError, match="prompt 0 does not say which of the teachers sum, b"):
            train(taught(tmp_path, server.url, f"teachers={{sum: {one}, b: {one}}}"))
    assert not list(tmp_path.glob("*/metrics.jsonl"))


@contextmanager
def served(policy: Path, port: int) -> Iterator[str]:
    """The command serves a policy; its address."""
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxrl_async.serve", str(policy)),
            *("--port", str(port), "--slots", "4", "--max-length", "80"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"JAXRL_ASYNC_KEY": "sesame", "JAX_PLATFORMS": "cpu"},
    )
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("serving"))
        found = re.search(r"http://\S+", line)
        assert found is not None
        yield found.group()
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.stdout.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_named_teacher_computes_as_before_and_a_served_one_may_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    calm = ("staleness.max_staleness=0", "run.overwrite=true")
    first = config_of("addition", tmp_path / "teacher", *TINY, *calm, "run.steps=1", "run.seed=5")
    train(first)
    policy = tmp_path / "teacher" / first.run.name / "policy"
    key, one = "key_variable: TEACHER_KEY", f"teachers={{here: {{path: {policy}}}}}"
    gaps = {}
    local = ["teacher.source=teachers", "teacher.rewards=0.0", one]
    old = ["teacher.source=path", "teacher.rewards=0.0", f"teacher.path={policy}"]
    for name, overrides in {"named": local, "path": old}.items():
        config = config_of("addition", tmp_path / name, *TINY, *calm, "run.steps=1", *overrides)
        train(config)
        gaps[name] = next(
            line["policy/teacher_gap"] for line in metrics_of(config) if line["step"] == 1
        )
    with ExitStack() as first_server, ExitStack() as second_server:
        url = first_server.enter_context(served(policy, 0))
        found = re.search(r":(\d+)/", url)
        assert found is not None
        remote = ["teacher.source=teachers", "teacher.rewards=0.0", "run.steps=6"]
        remote.append(f"teachers={{there: {{url: '{url}', model: policy, {key}}}}}")
        config = config_of("addition", tmp_path / "served", *TINY, *calm, *remote)
        folder = tmp_path / "served" / config.run.name

        def restart() -> None:
            while not (folder / "metrics.jsonl").is_file():
                time.sleep(0.02)
            first_server.close()  # killed while the run asks it
            second_server.enter_context(served(policy, int(found.group(1))))

        restarting = threading.Thread(target=restart)
        restarting.start()
        train(config)
        restarting.join()
    lines = metrics_of(config)
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert gaps["named"] == pytest.approx(gaps["path"], abs=1e-5)
    assert sum(line["teacher/there/retries"] for line in lines) >= 1
    assert sum(line["faults/outages"] for line in lines) >= 1
    assert audit_run(folder).problems == ()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_served_policy_of_a_run_with_another_tokenizer_is_a_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    byte_level_tokenizer(500).save_pretrained(tmp_path / "words")
    calm = ("staleness.max_staleness=0", "run.overwrite=true")
    words = f"data.tokenizer={tmp_path / 'words'}"
    first = config_of("addition", tmp_path / "teacher", *TINY, *calm, words, "run.steps=1")
    train(first)
    policy = tmp_path / "teacher" / first.run.name / "policy"
    with served(policy, 0) as url:
        there = f"url: '{url}', model: policy, key_variable: TEACHER_KEY, tokenizer: {policy}"
        config = config_of(
            "addition", tmp_path / "student", *TINY, *calm, "teacher.source=teachers",
            "teacher.rewards=0.0", "teacher.form=loss", "teacher.top_k=4", "run.steps=2",
            f"teachers={{there: {{{there}}}}}",
        )  # fmt: skip
        train(config)
    steps = [line for line in metrics_of(config) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["teacher/there/tokens"] > 0 and line["policy/teacher_divergence"] > 0
    assert audit_run(tmp_path / "student" / config.run.name).problems == ()


# ---- on the sampler's chips


def policy_of_a_run(folder: Path, *overrides: str) -> Path:
    """The saved policy of a short run."""
    config = config_of("addition", folder, *TINY, "run.steps=1", "run.seed=5", *overrides)
    train(config)
    return folder / config.run.name / "policy"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("form", "colocated", "temperature"),
    [
        *((form, c, None) for form in ("advantage", "loss") for c in ("false", "true")),
        ("advantage", "false", 0.6),
    ],
)
def test_a_teacher_on_the_sampler_gives_the_log_probs_of_one_on_the_trainer(
    form: str, colocated: str, temperature: float | None, tmp_path: Path
) -> None:
    """temperature: of the only task; None: there is none by name."""
    policy = policy_of_a_run(tmp_path / "teacher")
    lines, task = {}, list[str]()
    if temperature is not None:
        sums = "data: {addition: {digits: 1, eval_size: 4}}"
        task = [
            f"tasks={{a: {{{sums}, sampling: {{temperature: {temperature}}}}}}}",
            "data.addition=null",
            "data.max_prompt_tokens=null",
        ]
    for chips in ("trainer", "sampler"):
        config = config_of(
            "addition", tmp_path / chips, *TINY, "staleness.max_staleness=0", "run.steps=1",
            f"mesh.colocated={colocated}", "teacher.source=teachers", "teacher.rewards=0.0",
            f"teacher.form={form}", *(["teacher.top_k=4"] if form == "loss" else []),
            f"teachers={{t: {{path: {policy}, chips: {chips}}}}}", *task,
        )  # fmt: skip
        train(config)
        assert audit_run(tmp_path / chips / config.run.name).problems == ()
        lines[chips] = next(line for line in metrics_of(config) if line["step"] == 1)
    there, here = lines["sampler"], lines["trainer"]
    name = "policy/teacher_gap" if form == "advantage" else "policy/teacher_divergence"
    assert there[name] == pytest.approx(here[name], abs=1e-5)
    assert there["teacher/t/kl"] == pytest.approx(here["teacher/t/kl"], abs=1e-5)
    assert there["teacher/t/calls"] > 0 and "teacher/t/calls" not in here


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_teacher_on_the_sampler_may_have_other_tokens(tmp_path: Path) -> None:
    byte_level_tokenizer(500).save_pretrained(tmp_path / "words")
    policy = policy_of_a_run(tmp_path / "teacher", f"data.tokenizer={tmp_path / 'words'}")
    config = taught(
        tmp_path / "student", "", "run.steps=2", "teacher.form=loss", "teacher.top_k=4",
        f"teachers={{t: {{path: {policy}, chips: sampler, tokenizer: {policy}}}}}",
    )  # fmt: skip
    train(config)
    steps = [line for line in metrics_of(config) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["teacher/t/tokens"] > 0 and line["policy/teacher_divergence"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_reference_on_the_sampler_trains_as_one_on_the_trainer(
    kl_in: str, tmp_path: Path
) -> None:
    policy = policy_of_a_run(tmp_path / "reference")
    learns = [
        "model.dtype=float32", "algorithm.kl_coefficient=0.1", f"algorithm.kl_in={kl_in}",
        "algorithm.advantage=group_mean",
    ]  # fmt: skip
    lines, weights = {}, {}
    for chips, overrides in {
        "trainer": [f"reference={{path: {policy}}}"],
        "sampler": [
            "reference={teacher: r}",
            f"teachers={{r: {{path: {policy}, chips: sampler}}}}",
        ],
    }.items():
        config = config_of(
            "addition", tmp_path / chips, *TINY, "staleness.max_staleness=0", "run.steps=2",
            *learns,
            *overrides,
        )  # fmt: skip
        train(config)
        assert audit_run(tmp_path / chips / config.run.name).problems == ()
        lines[chips] = [line for line in metrics_of(config) if "train/loss" in line]
        weights[chips] = weights_of(config)
    for line, here in zip(lines["sampler"], lines["trainer"], strict=True):
        assert line["policy/kl_reference"] == pytest.approx(here["policy/kl_reference"], abs=1e-5)
        assert line["teacher/r/tokens"] == line["train/tokens"]
    for name, values in weights["trainer"].items():
        np.testing.assert_allclose(values, weights["sampler"][name], atol=1e-4, err_msg=name)
    resumed = config_of(
        "addition", tmp_path / "sampler", *TINY, "staleness.max_staleness=0", "run.steps=4",
        *learns,
        "reference={teacher: r}", f"teachers={{r: {{path: {policy}, chips: sampler}}}}",
        "run.resume=true", "run.overwrite=false",
    )  # fmt: skip
    train(resumed)
    steps = [line["step"] for line in metrics_of(resumed) if "train/loss" in line]
    assert steps == [1, 2, 3, 4]


# ---- the policy itself


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["average: 0.9", "every: 2"])
def test_a_policy_that_teaches_itself_with_demonstrations_resumes_as_it_was(
    how: str, tmp_path: Path
) -> None:
    records = tmp_path / "records.jsonl"
    with records.open("w") as file:
        for a in range(10):
            for b in range(5):
                shown = f"2+3=5\n{a}+{b}="
                line = {"question": f"{a}+{b}=", "answer": str(a + b), "shown": shown}
                file.write(json.dumps(line) + "\n")
    byte_level_tokenizer(300).save_pretrained(tmp_path / "tokenizer")
    common = [
        *TINY, "staleness.max_staleness=0", "data.addition=null", f"data.jsonl.path={records}",
        "data.jsonl.prompt_field=question", "data.jsonl.answer_field=answer",
        "data.jsonl.eval_size=4", f"data.tokenizer={tmp_path / 'tokenizer'}",
        "teacher.source=teachers", "teacher.rewards=0.0", "teacher.form=loss", "teacher.top_k=8",
        f"teachers={{me: {{policy: {{{how}}}, context: shown}}}}",
    ]  # fmt: skip
    common = [word for word in common if not word.startswith("data.addition.eval_size")]
    _, steps = stopped_and_resumed(
        tmp_path, lambda folder, *more: config_of("addition", folder, *common, *more)
    )
    for line in steps:
        assert line["teacher/me/tokens"] == line["train/tokens"]
        assert line["policy/teacher_divergence"] > 0

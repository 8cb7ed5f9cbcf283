"""The first job of a newcomer for start_*.py: a model's folder, questions, and a score.

The score prints how long ago the process was started when it first judges a sampled answer.
"""

import os
import sys
import time

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen3-0.6B"
STARTED = float(os.environ.get("STARTED", time.time()))
"""When the process was started, seconds since the epoch."""
RECORDS = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(20) for b in range(20)]
_scored: list[float] = []


def score(completion: str, answer: str) -> float:
    """Return 1 for the answer alone, and something for digits."""
    if completion != answer and not _scored:  # a run of ours tries the function on the answer
        _scored.append(time.time() - STARTED)
        print(f"first reward after {_scored[0]:.1f} s", flush=True)
    return float(completion.strip() == answer) + 0.1 * any(c.isdigit() for c in completion)

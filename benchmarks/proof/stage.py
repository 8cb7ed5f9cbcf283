"""One stage of ../accelerator_proof.py, which starts it: python -m proof.stage NAME[:ARGUMENT]."""

import argparse
import importlib
import sys
import time
from pathlib import Path

from proof.shared import Work

HOMES = {
    "env": "ceilings",
    "parity": "parity",
    "decoders": "parity",
    "paged": "decoding",
    "decode": "decoding",
    "churn": "decoding",
    "hf": "other_engines",
    "vllm": "other_engines",
    "train": "learning",
    "experts": "learning",
    "run": "runs",
    "two": "runs",
    "real": "runs",
}
"""The module of each stage's function, which has the stage's name."""


def main() -> int:
    """Run the stage of the command line; return the exit code."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("name")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--scratch", type=Path, required=True)
    words.add_argument("--limit", type=float, required=True)
    words.add_argument("--tiny", action="store_true")
    args = words.parse_args()
    name, _, argument = args.name.partition(":")
    work = Work(
        stage=args.name,
        argument=argument,
        out=args.out,
        scratch=args.scratch,
        tiny=args.tiny,
        until=time.monotonic() + args.limit,
    )
    function = getattr(importlib.import_module(f"proof.{HOMES[name]}"), name)
    function(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A sampler process of benchmarks/simulate.py: its device's time is forced, its rounds are noted.

Started in place of `python -m jaxrl_async.sample`, with the same arguments; SLEPT_DEVICE has the
fields of dictated.Dictated as JSON, SLEPT_ROUNDS is the folder for what it did.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from dictated import Dictated, timed_blocks
from simulate import Round, noting

from jaxrl_async import sample
from jaxrl_async.sampler.decode_loop import DecodeLoop


def main() -> int:
    """Run the sampler, and write down its rounds when it ends."""
    rounds: list[Round] = []
    device = Dictated(**json.loads(os.environ["SLEPT_DEVICE"]))
    with timed_blocks(device) as took:
        noted = noting(DecodeLoop.round, rounds, took, lambda loop: loop.weights.version)
        with patch.object(DecodeLoop, "round", noted):
            code = sample.main()
    lines = [asdict(r) | {"making": [r.making.start, r.making.stop]} for r in rounds]
    file = Path(os.environ["SLEPT_ROUNDS"]) / f"{os.getpid()}.json"
    file.write_text(json.dumps(lines), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())

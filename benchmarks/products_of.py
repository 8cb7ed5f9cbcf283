"""Time products of one library in a process of its own: python products_of.py numpy|torch.

Reads {"rows": n, "shapes": [[E, D], ...], "repeats": r, "size": s} from stdin and writes
{"products_s": .., "bf16_products_s": .. or null, "flop_per_s": ..}: of the products of n rows with
all weights [E, D] in turn, and of square matrices of this size. Needs nothing of ours, so that the
Python of another environment can run it.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any


def main() -> None:
    """Measure and print."""
    request = json.load(sys.stdin)
    number = _numpy if sys.argv[1] == "numpy" else _torch
    times, peak = number(request["rows"], request["shapes"], request["size"], request["repeats"])
    answer = {"products_s": times[0], "bf16_products_s": times[1] if len(times) > 1 else None}
    print(json.dumps({**answer, "flop_per_s": peak}))


def _numpy(rows: int, shapes: Any, size: int, repeats: int) -> tuple[list[float], float]:
    import numpy as np

    weights = [np.ones(shape, np.float32) for shape in shapes]
    inputs = {width: np.ones((rows, width), np.float32) for _, width in shapes}
    seconds = least_s(lambda: [inputs[w.shape[1]] @ w.T for w in weights], repeats)
    square = np.ones((size, size), np.float32)
    return [seconds], 2.0 * size**3 / least_s(lambda: square @ square, repeats)


def _torch(rows: int, shapes: Any, size: int, repeats: int) -> tuple[list[float], float]:
    import torch

    seconds = []

    def in_turn(layers: list[Any], inputs: dict[int, Any]) -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            layers = [
                torch.nn.Linear(width, outputs, bias=False, dtype=dtype)
                for outputs, width in shapes
            ]
            inputs = {width: torch.ones(rows, width, dtype=dtype) for _, width in shapes}
            seconds.append(least_s(partial(in_turn, layers, inputs), repeats))
        square = torch.ones(size, size)
        return seconds, 2.0 * size**3 / least_s(lambda: square @ square, repeats)


def least_s(work: Callable[[], Any], repeats: int) -> float:
    """Return the least time of a call, seconds, after one that is not counted."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()

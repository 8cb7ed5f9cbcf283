"""Sums of two numbers, asked in words; the reward is 1 for the number alone."""

import numpy as np

import jaxrl_async as jr

SHOWN = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
"""What precedes each question. Without an example a model of this size answers in sentences, is
never right, and has nothing to learn from."""


def sums(most: int = 10, eval_size: int = 64, seed: int = 0, *, example: bool = True) -> jr.Task:
    """Return the task.

    Args:
        most: largest summand; the smallest is 0.
        eval_size: sums held out; the others are trained on.
        seed: of the order of the sums, and of what is held out.
        example: whether SHOWN precedes each question.
    """
    shown = SHOWN if example else []
    pairs = [(a, b) for a in range(most + 1) for b in range(most + 1)]
    order = np.random.default_rng(seed).permutation(len(pairs))
    records = [
        {
            "messages": [*shown, {"role": "user", "content": f"What is {a} + {b}?"}],
            "answer": str(a + b),
        }
        for a, b in (pairs[i] for i in order)
    ]
    return jr.Task(records=records[eval_size:], held_out=records[:eval_size], reward=number_alone)


def number_alone(completion: str, answer: str) -> dict[str, float]:
    """Score an answer: 1 for the right number and nothing else."""
    return {"correct": float(completion.strip() == answer)}

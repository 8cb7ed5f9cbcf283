"""Compares the arrays of a checkpoint with those of the run that reads it."""

from collections.abc import Mapping
from pathlib import Path

import jax

from jaxrl_async.errors import CheckpointError

TRAIN = "train"
"""The part of a run's state that all runs have."""
PARTS = {
    "reference": "a reference policy (algorithm.kl_coefficient, or what else compares with one)",
    "critic": "a critic (algorithm.advantage=gae)",
    "teacher": "a teacher that follows the policy (teacher.source=self)",
    "teachers": "teachers that follow the policy (teachers.NAME.policy)",
}
"""Parts of the state that some settings add, and these settings."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the arrays of a state, by path."""


def check_arrays(folder: Path, item: str, saved: Shapes, expected: Shapes) -> None:
    """Raise CheckpointError if the arrays are certainly another run's, FileNotFoundError if some
    may have been lost.

    Arrays that are saved and not wanted, or of another shape, are another run's; those that are
    wanted and missing may as well have been torn off.

    Args:
        folder: of the checkpoint.
        item: its part with the arrays.
        saved: shapes there.
        expected: shapes of this run.
    """
    saved_parts, expected_parts = _parts(saved), _parts(expected)
    if TRAIN in expected_parts and TRAIN not in saved_parts:  # every run has it
        raise FileNotFoundError(f"{folder / item} has lost what says which arrays it holds")
    if different := sorted(saved_parts ^ expected_parts):
        part = different[0]
        had, has = ("with", "has not") if part in saved_parts else ("without", "has")
        raise CheckpointError(
            f"{folder} was made {had} {PARTS.get(part, part)}, which this run {has} now. Resume "
            "with the settings that made it (config.yaml next to it), or choose another run.name; "
            "model.path=.../policy starts from a finished run's weights."
        )
    if problem := shape_mismatch(saved, {k: v for k, v in expected.items() if k in saved}):
        raise CheckpointError(
            f"{folder} does not fit this run: {problem}. {_optimizer_differs(saved, expected)}"
            "Resume with the configuration that made it (config.yaml next to it), or choose "
            "another run.name."
        )
    if missing := shape_mismatch(saved, expected):
        raise FileNotFoundError(f"{missing}, or cannot read it")


def shapes_of(tree: object) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state's arrays, or of descriptions of them, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): tuple(v.shape) for k, v in leaves}


def shape_mismatch(saved: Shapes, expected: Shapes) -> str:
    """Return the first difference between two tables of array shapes; "" if they are equal."""
    for path in sorted(saved.keys() | expected.keys()):
        if path not in saved:
            return f"it has no {path}"
        if path not in expected:
            return f"it has {path} {list(saved[path])}, which this run does not know"
        if saved[path] != expected[path]:
            return f"{path} is {list(saved[path])} there and {list(expected[path])} here"
    return ""


def _optimizer_differs(saved: Shapes, expected: Shapes) -> str:
    """Return a sentence with the settings if two tables of array shapes differ in the optimizer's
    state (TrainState.opt_state) alone; "" otherwise."""
    different = saved.items() ^ expected.items()
    if not all("/opt_state/" in path for path, _ in different):
        return ""
    return (
        "Only the optimizer's state differs: trainer.optimizer or trainer.rounding has another "
        "value. "
    )


def _parts(shapes: Shapes) -> set[str]:
    """Return the parts of a state whose arrays these are."""
    return {name.partition("/")[0] for name in shapes}

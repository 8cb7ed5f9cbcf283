"""What the algorithm names is tried before the run: whatever is registered passes as it is."""

import inspect
from pathlib import Path

import pytest

from jaxrl_async.algorithms.corrections import correction
from jaxrl_async.algorithms.losses import token_loss
from jaxrl_async.algorithms.shaping import shaping
from jaxrl_async.algorithms.trial import check_algorithm
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import AlgorithmSection, TeacherSection
from jaxrl_async.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
ARGUMENTS = {"max_tokens": 8, "cache_tokens": 2, "low": 0, "high": 1, "keep": 2}


def with_arguments(function, name):
    """The choice of a function with something for each argument that has no default."""
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]
    return {name: {key: ARGUMENTS[key] for key in needed}} if needed else name


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_configurations_pass(path):
    config = load(path, ["data.jsonl.path=x"] if path.stem == "gsm8k" else [])
    check_algorithm(config.algorithm, config.teacher)


@pytest.mark.parametrize(
    ("field", "registry"),
    [("loss", token_loss), ("correction", correction), ("shaping", shaping)],
    ids=["loss", "correction", "shaping"],
)
def test_whatever_is_registered_passes(field, registry):
    for name in sorted(registry):
        choice = with_arguments(registry[name], name)
        algorithm = AlgorithmSection(**{field: (choice,) if field == "shaping" else choice})
        check_algorithm(algorithm, TeacherSection())


def test_pass_at_k_needs_k_answers_that_a_downsample_keeps():
    """Before, k was quietly what was kept."""
    shapings = ({"downsample": {"keep": 4}},)
    with pytest.raises(ConfigError, match=r"what a downsample keeps; k is 6, group_size is 4"):
        check_algorithm(
            AlgorithmSection(shaping=shapings, advantage={"pass_at_k": {"k": 6}}), TeacherSection()
        )
    check_algorithm(AlgorithmSection(shaping=shapings, advantage="pass_at_k"), TeacherSection())


def test_a_shaping_of_the_users_that_fails_is_told_with_its_error(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def wild(shaped):\n    return shaped.nothing\n")
    with pytest.raises(ConfigError, match=r"algorithm\.shaping = .*wild.* AttributeError: "):
        check_algorithm(AlgorithmSection(shaping=(f"{file}:wild",)), TeacherSection())

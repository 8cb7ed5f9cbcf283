"""The reference of Python names leaves out what only the package calls."""

import pytest

import jaxrl_async
from jaxrl_async.api.api_reference import INNER, _parts, markdown


@pytest.mark.full
@pytest.mark.parametrize("name", INNER)
def test_methods_that_are_left_out_exist_and_others_are_there(name):
    kind = getattr(jaxrl_async, name)
    assert [method for method in INNER[name] if not hasattr(kind, method)] == []
    text = markdown()
    assert [m for m in INNER[name] if f"### {name}.{m}\n" in text] == []
    assert "__init__" not in INNER[name] or f"\n{name}(\n" not in text
    assert f"## {name}\n" in text and "### Sampler.generate\n" in text


def test_the_page_has_values_of_defaults_and_tells_once_what_classes_share():
    text = markdown()
    assert "- `max_new_tokens: int=256`: longest answer" in text
    assert "- `**settings`: any setting" in text
    assert "\n# token_ids to prompt_logprobs: as in Completion\n" in text
    assert "\nAs in [Sampler](#sampler): `close`, " in text and "### Router.close\n" not in text
    assert "### Run.policy\n" in text, "a cached property is one, too"


def test_a_default_that_is_a_function_of_two_arguments_stays_on_one_line():
    assert _parts("a: int, f: F=lambda name, number: None, b: int=0") == [
        "a: int", "f: F=lambda name, number: None", "b: int=0"
    ]  # fmt: skip

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pytest
from pydantic import Field

from jaxrl_async.algorithms.registry import AtLeast0, NoFacts, Registry, rule
from jaxrl_async.errors import ConfigError


@pytest.fixture
def shapes() -> Registry:
    registry: Registry = Registry("shape", "draw.shape", NoFacts)

    @registry
    def circle(x: float, *, radius: float = 1.0, sides: int = 0) -> float:
        return x * radius + sides

    @registry
    def square(x: float, *, side: float) -> float:
        return x * side

    @registry
    @rule("inner must be below outer", lambda inner, outer: inner < outer)
    @rule("outer must fit the page", lambda outer, page: outer <= page)
    def ring(x: float, *, inner: AtLeast0 = 1.0, outer: float = 2.0) -> float:
        return x * (outer - inner)

    @registry
    def free(x, *, anything=None, odd: "NoSuchType" = 0):
        return x

    return registry


def test_names_are_the_functions_names(shapes):
    assert sorted(shapes) == ["circle", "free", "ring", "square"]
    assert len(shapes) == 4


def test_a_name_resolves_to_the_function_with_its_defaults(shapes):
    assert shapes.resolve("circle")(3.0) == 3.0


def test_arguments_are_bound(shapes):
    assert shapes.resolve({"circle": {"radius": 2.0, "sides": 1}})(3.0) == 7.0
    assert shapes.resolve({"square": {"side": 2}})(3.0) == 6.0


def test_an_unknown_name_names_the_nearest_and_all_known(shapes):
    with pytest.raises(
        ConfigError,
        match=r"unknown shape 'circl'; did you mean 'circle'\?.*circle, free, ring, square",
    ):
        shapes.resolve("circl")


def test_an_unknown_argument_names_the_nearest(shapes):
    with pytest.raises(
        ConfigError, match=r"'circle' has no argument 'radus'; did you mean 'radius'"
    ):
        shapes.resolve({"circle": {"radus": 2.0}})


def test_the_data_argument_cannot_be_bound(shapes):
    with pytest.raises(ConfigError, match="no argument 'x'"):
        shapes.resolve({"circle": {"x": 2.0}})


@pytest.mark.parametrize("bad", ["two", None, True, [1]])
def test_a_number_must_be_a_number(shapes, bad):
    with pytest.raises(ConfigError, match="radius must be float"):
        shapes.resolve({"circle": {"radius": bad}})


def test_a_float_is_not_an_int(shapes):
    with pytest.raises(ConfigError, match="sides must be int"):
        shapes.resolve({"circle": {"sides": 1.5}})


def test_a_missing_argument_shows_how_to_write_it(shapes):
    with pytest.raises(ConfigError, match=r"needs side: write \{square: \{side: \.\.\.\}\}"):
        shapes.resolve("square")


def test_two_choices_at_once_are_refused(shapes):
    with pytest.raises(ConfigError, match="keep one"):
        shapes.resolve({"circle": {}, "square": {"side": 1.0}})


def test_a_number_out_of_its_range_is_refused_with_setting_and_range(shapes):
    with pytest.raises(ConfigError, match=r"draw.shape: shape 'ring': inner must be float >= 0"):
        shapes.resolve({"ring": {"inner": -0.5}})
    assert shapes.resolve({"ring": {"inner": 0}})(3.0) == 6.0


def test_rules_hold_between_arguments_and_with_what_is_known_of_the_run(shapes):
    with pytest.raises(ConfigError, match=r"inner must be below outer; inner is 2.0, outer is 2.0"):
        shapes.resolve({"ring": {"inner": 2.0}})
    assert shapes.resolve({"ring": {"outer": 9.0}})(1.0) == 8.0
    with pytest.raises(ConfigError, match=r"outer must fit the page; outer is 9.0, page is 8"):
        shapes.resolve({"ring": {"outer": 9.0}}, page=8)


@pytest.mark.parametrize(
    ("kind", "value", "bound"),
    [
        (tuple[float, float], [0.1, 2], (0.1, 2.0)),
        (tuple[str, ...], ["a", "b"], ("a", "b")),
        (Path, "some/file", Path("some/file")),
        (list[int] | None, [1], [1]),
        (Mapping[str, float], {"a": 1}, {"a": 1.0}),
        (float, 1, 1),
        (Literal["low", "high"], "low", "low"),
    ],
    ids=str,
)
def test_a_typed_argument_gets_what_yaml_can_say_in_its_type(kind, value, bound):
    """YAML has no tuples and no paths."""
    registry = Registry("shape", "draw.shape", NoFacts)

    def typed(x, *, given):
        return given

    typed.__annotations__["given"] = kind
    registry(typed)
    found = registry.resolve({"typed": {"given": value}})(None)
    assert found == bound and type(found) is type(bound)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (tuple[float, float], [0.1], "[float, float], not [0.1]"),
        (tuple[float, float], [0.1, True], "[float, float], not"),
        (tuple[str, ...], "a", "[str, ...], not 'a'"),
        (list[Annotated[int, Field(ge=1)]], [0], "[int >= 1, ...], not [0]"),
        (int, True, "int, not True"),
        (float, "1", "float, not '1'"),
        (dict[str, float], {"a": "b"}, "{name: float}, not"),
    ],
    ids=str,
)
def test_a_typed_argument_of_another_type_is_refused_in_words(kind, value, expected):
    registry = Registry("shape", "draw.shape", NoFacts)

    def typed(x, *, given):
        return given

    typed.__annotations__["given"] = kind
    registry(typed)
    with pytest.raises(ConfigError) as refused:
        registry.resolve({"typed": {"given": value}})
    assert f"given must be {expected}" in str(refused.value)


def test_a_function_without_types_takes_what_it_is_given(shapes):
    assert shapes.resolve({"free": {"anything": [1], "odd": "x"}})(3.0) == 3.0


# ---- facts


class ShapeFacts(NamedTuple):
    corners: int = 0
    needs: tuple[str, ...] = ()


@pytest.fixture
def figures() -> Registry:
    registry: Registry = Registry("figure", "draw.figure", ShapeFacts, ShapeFacts(corners=-1))

    @registry
    def dot(x: float) -> float:
        return x

    @registry(corners=3)
    def triangle(x: float, *, side: AtLeast0 = 1.0) -> float:
        return x * side

    return registry


def test_a_function_declares_its_facts_where_it_is_registered(figures):
    assert figures.facts("dot") == ShapeFacts()
    assert figures.facts({"triangle": {"side": 2.0}}) == ShapeFacts(corners=3)
    assert figures.facts_of(figures.resolve({"triangle": {"side": 2.0}})).corners == 3


def test_an_unknown_fact_is_refused_with_the_nearest(figures):
    with pytest.raises(ConfigError, match=r"'star' declares 'corner'; did you mean 'corners'\?"):

        @figures(corner=5)
        def star(x: float) -> float:
            return x


def test_a_users_function_declares_its_own_facts_or_has_those_assumed(figures, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxrl_async.algorithms.registry import declare\n"
        "@declare(corners=4)\n"
        "def square(x): return x\n"
        "def blob(x): return x\n"
        "@declare(edges=4)\n"
        "def wrong(x): return x\n"
    )
    assert figures.facts(f"{file}:square").corners == 4
    assert figures.facts(f"{file}:blob").corners == -1
    assert figures.facts(f"{tmp_path / 'elsewhere.py'}:square").corners == -1
    with pytest.raises(ConfigError, match=r"declares 'edges'.*it can declare: corners, needs"):
        figures.facts(f"{file}:wrong")


def test_what_the_configuration_knows_must_be_what_is_declared(figures):
    figures.check_known({"triangle"}, lambda facts: facts.corners > 0)
    with pytest.raises(TypeError, match=r"disagree on \['dot', 'triangle'\]"):
        figures.check_known({"dot"}, lambda facts: facts.corners > 0)

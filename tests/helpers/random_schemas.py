"""Random JSON schemas that a random model ends answers to: everything has a bound."""

from typing import Any

import numpy as np

NAMES = ("name", "age", "x", "y", "tags", "a b", 'quo"te', "größe", "items", "value", "")


def random_schema(random: np.random.Generator, depth: int = 3) -> dict[str, Any]:
    """A schema of one of the kinds, with smaller ones in it."""
    flat = (_string, _integer, _number, _constant, _choice, _pattern, _nothing)
    deep = (_object, _object, _array, _any_of)
    kinds = (*flat, *deep, *deep) if depth else flat
    return kinds[random.integers(len(kinds))](random, depth - 1)


def random_object(random: np.random.Generator) -> dict[str, Any]:
    """A schema of an object."""
    return _object(random, 2)


def _string(random: np.random.Generator, _: int) -> dict[str, Any]:
    least = int(random.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + int(random.integers(0, 6))}


def _pattern(random: np.random.Generator, _: int) -> dict[str, Any]:
    patterns = ("^[a-f]{2,4}$", r"^\d{3}-\d{2}$", "^(on|off)$", "^x?y{0,3}z$")
    return {"type": "string", "pattern": patterns[random.integers(len(patterns))]}


def _integer(random: np.random.Generator, _: int) -> dict[str, Any]:
    least = int(random.integers(-200, 200))
    return {"type": "integer", "minimum": least, "maximum": least + int(random.integers(0, 300))}


def _number(random: np.random.Generator, _: int) -> dict[str, Any]:
    return {"enum": [round(float(x), 3) for x in random.normal(size=random.integers(1, 4))]}


def _constant(random: np.random.Generator, _: int) -> dict[str, Any]:
    values: list[Any] = [None, True, 7, "str\n", {"k": [1, "2"]}, []]
    return {"const": values[random.integers(len(values))]}


def _choice(random: np.random.Generator, _: int) -> dict[str, Any]:
    values: list[Any] = ["yes", "no", "maybe, or", 3, None, False]
    return {"enum": [values[i] for i in sorted(random.permutation(6)[: random.integers(1, 5)])]}


def _nothing(random: np.random.Generator, _: int) -> dict[str, Any]:
    return {"type": ["boolean", "null"][random.integers(2)]}


def _object(random: np.random.Generator, depth: int) -> dict[str, Any]:
    names = [NAMES[i] for i in random.permutation(len(NAMES))[: random.integers(0, 4)]]
    needed = [name for name in names if random.random() < 0.6]
    return {
        "type": "object",
        "properties": {name: random_schema(random, max(depth, 0)) for name in names},
        "required": needed,
        "additionalProperties": False,
    }


def _array(random: np.random.Generator, depth: int) -> dict[str, Any]:
    least = int(random.integers(0, 2))
    return {
        "type": "array",
        "items": random_schema(random, max(depth, 0)),
        "minItems": least,
        "maxItems": least + int(random.integers(0, 3)),
    }


def _any_of(random: np.random.Generator, depth: int) -> dict[str, Any]:
    count = random.integers(1, 3)
    return {"anyOf": [random_schema(random, max(depth, 0)) for _ in range(count)]}

r"""Parse answers as mathematics and compare them, with math-verify. Runs in mathprocess.py's
processes.

    Answer ──money is no formula──> formula, expression or number ──math-verify──> equal?
                                                                   small numbers, units ──> not
"""

import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Abs, Basic, Interval, MatrixBase, N, Symbol, Tuple
from sympy.core.relational import Relational
from sympy.sets import FiniteSet

from jaxrl_async.scorers.answers import OTHERS, TEXT, Answer, find_answer, plain_float
from jaxrl_async.scorers.units import differ, unit_of
from jaxrl_async.scorers.written_numbers import (
    CURRENCIES,
    ESCAPED_DOLLAR,
    NUMBER,
    PARTS,
    number_of,
    plain_signs,
    without_powers,
    written,
)

PLAIN, FORMULAS = [ExprExtractionConfig()], [LatexExtractionConfig(boxed_match_priority=0)]
FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]")
"""A formula between its delimiters."""
WORD = re.compile(
    r"(?<![\\A-Za-z])(?!sqrt|frac|infty|theta|alpha|beta|gamma)[A-Za-z]{4,}"
    r"|(?<![\\A-Za-z0-9])(?!sin|cos|tan|log|exp|lim|max|min|gcd|lcm|mod|ln)[A-Za-z]{2,}"
    r"(?:'[a-z]+)?\s+(?=[A-Za-z0-9$\\-])"
    rf"|[{OTHERS}]"
)
"""A word of prose, not of a formula."""
PROSE = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]{{2,}}|[{OTHERS}]")
SPACED = re.compile(r"[-+]?[0-9]+(?: [0-9]+)+(?:\.[0-9]+)?")
THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
"""Numbers with spaces between them; one number, in groups of three digits."""
OTHER_WORDS = re.compile(rf"[{OTHERS}]")
SEVERAL = re.compile(r",|\b(?:and|or)\b")
EQUALS = re.compile(r"(?<![!<>=])=")
PARENTHESIS = re.compile(r"\([^()]*\)")
OTHER_MONEY = re.compile(rf"[{CURRENCIES[1:]}](?=\s?-?[0-9])|(?<=[0-9])\s?[{CURRENCIES[1:]}]")
MIXED = re.compile(r"(?<![\w.,/^*+)}-])(-?[0-9]+) ([0-9]+)/([0-9]+)(?![\w/^*])")
"""A mixed number: 3 1/2."""
FUNCTION = re.compile(r"(?<![\\A-Za-z])(sqrt|log|ln|sin|cos|tan) (?=[0-9])")
ITEM = r"-?[$]?(?:[0-9][0-9./]*|\\[dt]?frac\s*\{[0-9]+\}\s*\{[0-9]+\})"
LIST = re.compile(rf"(?:^|(?<=[:=])|(?<=\bis)|(?<=\bare))\s*({ITEM}(?:, ?{ITEM})*),? and ({ITEM})$")
"""Several numbers: 1, 2, and 3."""
FRACTION = re.compile(
    r"(?:^|(?<=[\s=:]))-?(?:[0-9]+/[0-9]+|[0-9]*\\[dt]?frac\s*\{[0-9]+\}\s*\{[0-9]+\})"
    r"(?=[.,]?(?:\s|$))(?!\s*[-+*/^=<>])"
)
ROUNDED = 5e-6
"""Relative difference up to which numbers count as equal: six decimals of a number >= 0.1."""
SMALL = 2e-6
"""Maximum difference that math-verify may have rounded away, since it compares six decimals."""


def same(completion: str, reference: str) -> bool:
    """Return whether a completion's answer equals the reference mathematically."""
    right, asked_text = read_reference(reference)
    answer = find_answer(plain_signs(completion))
    if answer is None or not right:
        return False
    if differ(_without_borders(plain_money(answer.line, "\\$")), _without_borders(asked_text)):
        return False
    given = expressions_of(answer)
    return any(
        verify([r], [g], timeout_seconds=None, allow_set_relation_comp=True)
        and not rounded_away(r, g)
        for r in right
        for g in given
    )


def is_readable(reference: str) -> bool:
    """Return whether a reference can be parsed as mathematics."""
    return any(isinstance(read, Basic | MatrixBase) for read in read_reference(reference)[0])


def read_reference(reference: str) -> tuple[list[Any], str]:
    """Return the possible meanings of a reference, and its text with money marked."""
    text = plain_signs(plain_float(reference))
    answer = find_answer(text)
    marked = answer is not None and answer.mark in ("box", "####")
    line = plain_money(answer.line if answer is not None and marked else text.strip(), "\\$")
    bare = _plain_line(line)
    if FORMULA.search(bare):
        return parsed(bare), line
    return _read(bare), line


def expressions_of(answer: Answer) -> list[Any]:
    """Return the possible meanings of an answer; empty if it cannot be parsed."""
    line = _plain_line(plain_money(answer.line, "\\$"))
    if answer.mark == "box":
        return _read(line)
    formulas = list(FORMULA.finditer(line))
    if formulas:
        after = PARENTHESIS.sub("", line[formulas[-1].end() :])
        if not NUMBER.search(after):
            return parsed(line[: formulas[-1].end()])
        line = after
    line = line.rstrip(". ")
    several = LIST.search(line)
    if several:
        return parsed(boxed(f"{several[1]}, {several[2]}"))
    if not SEVERAL.search(line):
        line = EQUALS.split(line)[-1].strip()
    if not WORD.search(line):
        return _read(line)
    number = number_of(Answer(line, answer.mark))
    if number is not None:
        return parsed(boxed(written(number)))
    fractions = FRACTION.findall(line)
    if len(fractions) == 1 and len(NUMBER.findall(line)) == len(NUMBER.findall(fractions[0])):
        return parsed(boxed(fractions[0].strip()))
    others: list[Any] = parse(line, PLAIN, parsing_timeout=None)
    return [] if others and getattr(others[0], "is_Number", False) else others


def _read(text: str) -> list[Any]:
    """Return the possible meanings of a text: an expression, or a number with words around it."""
    if PARTS.search(TEXT.sub(r" \1 ", text)):
        return []
    if SPACED.fullmatch(text.strip()):
        is_number = THOUSANDS.fullmatch(text.strip())
        return parsed(boxed(text.replace(" ", ""))) if is_number else []
    bare = without_powers(text)
    number = _one_number(bare)
    return number if number and bare == text else [*number, *parsed(boxed(text))]


def _plain_line(text: str) -> str:
    """Return a line without money, with mixed numbers and functions as LaTeX."""
    return FUNCTION.sub(r"\\\1 ", MIXED.sub(r"\1\\frac{\2}{\3}", without_money(text)))


def _one_number(text: str) -> list[Any]:
    """Return the number in a text that is one number with a unit, with words in LaTeX's text, or
    with words of another script; [] for any other text."""
    if len(list(NUMBER.finditer(text))) != 1 or "%" in text:
        return []
    alone = not NUMBER.sub("", TEXT.sub("", text)).strip(" .,~$\\")
    if not (OTHER_WORDS.search(text) or unit_of(text) or (alone and TEXT.search(text))):
        return []
    number = number_of(Answer(text, "end"))
    return [] if number is None else parsed(boxed(written(number)))


def plain_money(text: str, sign: str) -> str:
    r"""Return the text with `sign` for each '$' that is money and not the delimiter of a formula.

    Before a digit it is money unless the next '$' closes a formula: no space before it, no digit
    after it, and no word of prose between them. A '$' without another one is money, too.
    """
    text = text.replace("\\$", "\x1e")
    borders = [
        i
        for i, c in enumerate(text)
        if c == "$" and "$" not in (text[i - 1 : i], text[i + 1 : i + 2])
    ]
    money = set()
    at = 0
    while at < len(borders):
        begin = borders[at]
        end = borders[at + 1] if at + 1 < len(borders) else None
        if end is None or _is_money(text[begin + 1 : end], text[end + 1 : end + 2]):
            money.add(begin)
            at += 1
        else:
            at += 2
    return "".join(sign if i in money or c == "\x1e" else c for i, c in enumerate(text))


def _is_money(between: str, behind: str) -> bool:
    """Return whether a '$' is money, from the text up to the next one, and the text after that."""
    if not re.match(r"\s?-?[.0-9]", between):
        return not between.strip()
    return between[-1].isspace() or behind.isdigit() or bool(PROSE.search(between))


def _without_borders(text: str) -> str:
    """Return the text of plain_money with only money signs, without delimiters of formulas."""
    return text.replace("\\$", "\x1e").replace("$", "").replace("\x1e", "$")


def without_money(text: str) -> str:
    """Return the text without money signs."""
    return OTHER_MONEY.sub("", ESCAPED_DOLLAR.sub("", text))


def boxed(text: str) -> str:
    r"""Wrap a text in \boxed{}, in which the library finds formulas."""
    return f"\\boxed{{{text}}}"


def parsed(text: str) -> list[Any]:
    """Return the possible meanings of a text's formulas: expressions, and the last one's text."""
    text = text.replace("\\varnothing", "\\emptyset").replace("°", "^\\circ")
    read: list[Any] = parse(text, FORMULAS, parsing_timeout=None)
    return read


def rounded_away(right: object, given: object) -> bool:
    """Return whether two numbers that math-verify considers equal differ, relative to their
    size."""
    first, second = numbers_in(right), numbers_in(given)
    if len(first) != len(second):
        return False
    return any(_differ(a, b) for a, b in zip(first, second, strict=True))


def _differ(a: Any, b: Any) -> bool:
    distance, size = Abs(a - b), max(Abs(a), Abs(b))
    return bool(distance <= SMALL and distance > ROUNDED * size)


def numbers_in(read: object) -> list[Any]:
    """Return the numbers in an expression, in a fixed order, with a number for each of its
    variables; empty: it has none."""
    if isinstance(read, Relational):
        return numbers_in(read.rhs) if isinstance(read.lhs, Symbol) else []
    if isinstance(read, FiniteSet):
        return sorted((n for inner in read.args for n in numbers_in(inner)), key=_order)
    if isinstance(read, Interval):
        return [*numbers_in(read.start), *numbers_in(read.end)]
    if isinstance(read, Tuple):
        return [n for inner in read.args for n in numbers_in(inner)]
    if isinstance(read, MatrixBase):
        return [n for inner in read.flat() for n in numbers_in(inner)]
    if not isinstance(read, Basic):
        return []
    values = {s: N(1.7) + N(0.31) * i for i, s in enumerate(sorted(read.free_symbols, key=str))}
    try:
        value = N(read.doit().subs(values), 20)
    except Exception:  # if it cannot be computed, only math-verify compares it
        return []
    return [value] if value.is_number and value.is_finite else []


def _order(value: Any) -> Any:
    return (N(value.as_real_imag()[0]), N(value.as_real_imag()[1]))

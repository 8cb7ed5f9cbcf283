"""Find the final answer in a text: numbers, LaTeX, the last line. Needs no JAX."""

import re
from decimal import Decimal

NUMBER = re.compile(
    r"(?P<sign>-)?[$€£¥₹]?(?P<after>-)?(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?"
    r"(?(digits)(?:\.(?P<part>[0-9]+))?|\.(?P<alone>[0-9]+))"
)
"""A number as people write it; a comma belongs to it only before groups of three digits."""
DASHES = str.maketrans(dict.fromkeys("−–—‒", "-"))
UNIT = r"""(?: [kcm]m | kg | mg | [mcd]l | lbs? | oz | ft | yds? | mi | mph | km?/h | [kmgt]b | kwh?
    | ms | secs? | mins? | hrs? | seconds? | minutes? | hours? | days? | weeks? | months? | years?
    | usd | eur | gbp | cents? | dollars? | euros? | percent ) (?! [\w({\[^] )"""
"""A unit that may follow its number without a space; one letter may be a variable."""
LARGER_BEFORE = re.compile(
    r"""(?: [^\W_] | _ | [.,^√±<>≤≥≠\\/*×÷] | !=            # glued: x2, 1.2, 1,2, 2^3, >5
        | [0-9)}\]] [ ]* (?: \*\* | // | [-+*^/×÷] ) [ ]* -?    # 10 - 5, 1 / 2
        | (?: [0-9*+/^×÷-] | [0-9)}\]] [ ]* [-+*^/×÷] [ ]* ) [({\[] [ ]*    # 2(5), 3 * (5)
        | [0-9)}\]] [ ]+ x [ ]+                           # 9 x 2
        | \\ (?: times | cdot | div | pm | sqrt | [dt]?frac | [lg]eq? | [lgn]t | neq? ) [ ]*
        | [0-9] (?: : | [ ]+ : [ ]* )                      # 1:2, not "step 1: 2"
        | (?<![^\W\d_]) [^\W\d_] [ ]* [-+*^/×÷] [ ]*       # x + 2
        | [^=:\s] [ ]+ - [ ]+                              # is - 5: a sign or a dash?
        | [<>≤≥≠] =? [ ]* | != [ ]*
        | [^\W\d] [({\[] [ ]* | [}\])^_] [({\[]            # sqrt(2), \frac{1}{2}
        | [({\[] [^(){}\[\]]* , \s*                        # (1, 2
        )$""",
    re.VERBOSE,
)
"""What precedes a number that is part of something larger."""
LARGER_AFTER = re.compile(
    r"""(?: (?!UNIT) [^\W_] | _ | [\^({\[√] | [,.:][0-9]  # glued: 3x, 2(5), not 18kg
        | [ ]* [)}\]] [ ]* [*^×÷/+-] [ ]* [0-9(\\] | [ ]* \) [0-9({\[]      # (5) * 3, (5)(3)
        | [ ]+ x [ ]+ [0-9]
        | [ ]* \\ (?: times | cdot | div | pm | sqrt | [dt]?frac | pi )
        | [ ]* (?: [*^×÷/+-] (?: [ ]* [0-9(\\] | [ ]* [^\W\d_](?![^\W_]) ) | [ ]: [ ]* [0-9] )
        | \s* , [^(){}\[\]]* [)\]}]                        # 1, 2)
        | [ ]* (?: hundred | thousand | million | billion | trillion | dozen )
        )""".replace("UNIT", UNIT),
    re.VERBOSE | re.IGNORECASE,
)
"""What follows such a number."""
TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
"""LaTeX for words and fonts."""
HOLDERS = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{")
"""LaTeX that wraps an answer without changing it."""
EMPHASIS = [
    re.compile(
        rf"(?<![^\s(\[{{\"'=:>$*_`-])({mark}{{2,3}}|(?<![0-9)\]}}][ ]){mark})(?![\s{mark}])"
        rf"((?:[^{mark}\n]|(?<=[^\W_]){mark}(?=[^\W_]))++)(?<!\s)\1(?![^\s.,;:!?)\]}}\"'*_`%$<-])"
    )
    for mark in (r"\*", "_", "`")
]
"""Pairs of Markdown marks at word borders: **18**, not 2*3*4 or 2 *3* 4."""
ANNOTATION = re.compile(r"<<[^<>\n]*>>(?=-?\$?[0-9.])")
"""GSM8K's calculator annotation, before its result: 9*2=<<9*2=18>>18."""
TAG = re.compile(r"</?answer>", re.IGNORECASE)
ESCAPED_DOLLAR = re.compile(r"(?<![0-9])\\\$|\\\$(?![0-9])")
"""Money, not the border of a formula; kept if the numbers on its two sides would become one."""
NEIGHBOURS = 200
"""Characters looked at on each side of a number."""
MAX_ANSWER = 1000
"""Characters of a line in which an answer is looked for."""
LEAD_IN = re.compile(r".*\banswer\b[^:=\n]{0,40}?(?:\bis\b|[:=])\s*:?\s*", re.IGNORECASE)
FORMULA = re.compile(r"\$[^$]+\$|\\\(|\\\[|\\boxed")
"""Marks of LaTeX in a text."""
EQUALS = re.compile(r"(?<![!<>=])=")


def final_number(text: str) -> Decimal | None:
    """Return the number that ends a worked answer; None if there is none or it is part of more."""
    _, marker, tail = undressed(text).translate(DASHES).rpartition("####")
    tail = HOLDERS.sub("{", TEXT.sub(r"\1", tail))
    numbers = list(NUMBER.finditer(tail))
    return _alone(tail, numbers[0] if marker else numbers[-1]) if numbers else None


def undressed(text: str) -> str:
    """Strip what only marks the answer: emphasis, <answer> tags, calculator annotations, \\$."""
    for _ in range(2):  # **_18_**
        for pair in EMPHASIS:
            text = pair.sub(r"\2", text)
    return ESCAPED_DOLLAR.sub("", ANNOTATION.sub("", TAG.sub("\n", text)))


def _alone(text: str, match: re.Match[str]) -> Decimal | None:
    """Return the number that was matched; None if it is part of something larger."""
    start, end = match.span()
    before = text[max(0, start - NEIGHBOURS) : start]
    if LARGER_BEFORE.search(before) or LARGER_AFTER.match(text[end : end + NEIGHBOURS]):
        return None
    negative = match["sign"] or match["after"] or re.search(r"[=:]\s*-\s+$", before)
    digits = (match["digits"] or "0").replace(",", "")
    number = Decimal(f"{digits}.{match['part'] or match['alone'] or '0'}")
    return -number if negative else number


def final_line(text: str) -> str:
    r"""Return the part of a text that is its final answer.

    That is the last \boxed{}, else the line after the last '####', else the whole text if it has a
    formula, else the last line, after its last '=' if it has no comma.
    """
    text = undressed(text)
    last = last_boxed(text)
    if last is not None:
        return f"\\boxed{{{last}}}"
    _, marker, tail = text.rpartition("####")
    lines = [line.strip() for line in (tail if marker else text).splitlines() if line.strip()]
    if not lines or (not marker and FORMULA.search(text)):
        return text.strip()
    final = (lines[0][:MAX_ANSWER] if marker else lines[-1][-MAX_ANSWER:]).rstrip(". ")
    lead_in = LEAD_IN.match(final)
    final = final[lead_in.end() :] if lead_in else final
    return final if "," in final else EQUALS.split(final)[-1].strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{} of a text; None if it is absent or open."""
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(start + len("\\boxed"), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + len("\\boxed{") : at]
    return None

r"""Find the final answer in a text. Needs no JAX.

    text ──find_answer──> Answer ──written_numbers.py, mathprocess.py──> its value

The answer comes after the last </think>. A text whose thinking never ends, or whose last \boxed{}
is open, was cut off and has no answer. Otherwise the answer is the content of the last \boxed{},
or else the text after the last '####', or the rest of the last sentence "the answer is", or the end
of the text. A sentence without a value, or that begins the working ("Answer: Let x = 3."), is the
answer only if no number follows it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Literal

OTHERS = (
    "\u0400-\u1cff\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\uff00-\uff0f\uff1a-\uff20\uff3b-\uff40"
    "\uff5b-\uffdc\U00020000-\U0003ffff"
)
"""Letters and marks of scripts that are not used for variables: 18元, 18개, 18 яблок."""
TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
"""LaTeX for words and fonts."""
BESIDE = OTHERS + r"\s\"'*_`$-"
EMPHASIS = [
    re.compile(
        rf"(?<![^{BESIDE}(\[{{=:>])({mark}{{2,3}}|(?<![0-9)\]}}][ ]){mark})(?![\s{mark}])"
        rf"((?:[^{mark}\n]|(?<=[^\W_]){mark}(?=[^\W_]))++)(?<!\s)\1(?![^{BESIDE}.,;:!?)\]}}%<])"
    )
    for mark in (r"\*", "_", "`")
]
"""Pairs of Markdown marks at word borders: **18**, not 2*3*4 or 2 *3* 4."""
ANNOTATION = re.compile(r"<<[^<>\n]*>>(?=-?\$?[0-9.])")
"""GSM8K's calculator annotation, before its result: 9*2=<<9*2=18>>18."""
TAG = re.compile(r"</?answer>", re.IGNORECASE)
THINKING = re.compile(
    r"<(/?)(?:think|thinking|thought|reasoning|seed:think)>|\[(/?)THINK\]|◁(/?)think▷",
    re.IGNORECASE,
)
"""Thinking marks of several model families; a group has '/' at the end of thinking."""
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
BARE_BOX = re.compile(r"\\[A-Za-z]+(?:\{[^{}\n]*\})*|[-+]?[\w.,/^]*\w", re.ASCII)
r"""The content of \boxed without braces."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
DISPLAY = re.compile(r"(\$\$|\\\[|\\\])")
GAP = r"[^:=：\n,.;!?，。；！？\d]"
SENTENCE = re.compile(
    rf"""(?: (?<!\bto[ ]) (?<!\bof[ ]) (?<!wrong[ ]) \banswers?\b
        (?: [ ]* \([^()\n]*\) | (?P<clause> [ ] (?: to | of | for | in | from | with | here | then
            | thus | therefore | hence | we | I | you | that ) \b {GAP}{{0,40}}? ) )?
        | (?: \b (?: respuesta | réponse | resposta | risposta | antwort ) \b | ответ | 答案 | 答え
            | (?<![가-힣]) (?: 최종 | 정 | 최종[ ]?정 )? 답 | คำตอบ ) {GAP}{{0,40}}?
        | (?<!\w) 答 )
    (?: [ ]* (?: \b (?: is | are | es | est | é | è | ist | lautet ) \b
            | 是 | 为 | 為 | は | 은 | 는 | คือ ) [ \t]* [:：]?
            (?! \s* (?: not\b | (?: found | given | shown | (?!indeed) \w+ed ) \s
                (?: by | to | in | as | from | when | if | with | using ) \b
                | the \s (?: sum | product | difference | quotient | number ) \s of \b ) )
        | (?P<weak> (?(clause)(?!)) [ ]? [:=：] ) )
    [ \t]*""",
    re.IGNORECASE | re.VERBOSE,
)
"""Phrases before an answer: "The answer is", "Answer:", 答案是; `weak`: working may follow it."""
SENTENCES_TRIED = 16
"""Number of such sentences that are inspected, from the last one."""
SENTENCE_END = re.compile(
    r"(?<![\s.])(?<!approx)(?<!\bca)(?<!\bi\.e)(?<!\be\.g)[.!?](?=\s)|[。！？]"
)
CLAUSE_END = re.compile(r",\s|，")
CHOICE = re.compile(r"\W*[A-J]\W*")
"""A choice: (B)."""
SUM = re.compile(r"\W*\d[\d.,]*(?:\s*[-+*×]\s*\d[\d.,]*)+\W*")
"""Arithmetic whose result may follow: 40 + 2."""
LONG_LINE = 200
"""Length from which on a line is not a heading, characters."""
HEADING = re.compile(
    r"\W*(?:(?:step|part|case|phase)\b|\d+[.):]\s+[A-Za-z]|.*:\W*$)", re.IGNORECASE
)
"""A Markdown heading that begins with '####' and contains a number: Step 2."""
WORD = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]{{3,}}|[{OTHERS}]{{2,}}")
VALUE = re.compile(r"[\d\\$=]")
MAX_ANSWER = 1000
"""Maximum length of a line with an answer, characters."""

Mark = Literal["box", "####", "sentence", "end"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer of a text: its text, and the mark that identifies it.

    A box and a sentence contain only the answer. After '####' the answer comes first; without a
    mark ("end") it comes last in the text.
    """

    text: str
    mark: Mark

    @property
    def line(self) -> str:
        """The line that contains the answer."""
        lines = [line.strip() for line in _on_lines(self.text).splitlines() if line.strip()]
        if not lines:
            return ""
        if self.mark in ("box", "sentence"):
            return " ".join(lines)
        if self.mark == "####":
            return next(filter(VALUE.search, lines), lines[0])[:MAX_ANSWER]
        return next(filter(_may_answer, reversed(lines)), lines[-1])[-MAX_ANSWER:]


def find_answer(text: str) -> Answer | None:
    r"""Return a text's final answer; None if the text was cut off before its answer was complete.

    That is the case if thinking never ends, or the last \boxed{} is open.
    """
    after = after_thinking(text)
    if after is None:
        return None
    text = without_markup(after)
    box = next(reversed(list(BOX.finditer(text))), None)
    if box is not None:
        boxed = _boxed(text[box.end() :])
        return None if boxed is None else Answer(boxed, "box")
    before, mark, rest = text.rpartition("####")
    first = rest.strip().partition("\n")[0]
    is_heading = len(first) < LONG_LINE and HEADING.match(first) is not None
    if mark and VALUE.search(first) and not is_heading:
        return Answer(rest, "####")
    stated = _stated(text, len(before))
    if stated is not None:
        return Answer(stated, "sentence")
    return Answer(rest, "####") if mark and not is_heading else Answer(text, "end")


def after_thinking(text: str) -> str | None:
    """Return what follows the last </think>; None if thinking never ends."""
    mark = next(reversed(list(THINKING.finditer(text))), None)
    if mark is None:
        return text
    return text[mark.end() :] if any(mark.groups()) else None


def thinking_marks(tokens: Mapping[int, str]) -> dict[int, str]:
    """Return the tokens, by id, that are thinking marks."""
    return {i: text.strip() for i, text in tokens.items() if THINKING.fullmatch(text.strip())}


def opened_thinking(prompt: str) -> str:
    """Return the mark at the end of a prompt that opens the answer's thinking; else ''."""
    mark = next(reversed(list(THINKING.finditer(prompt))), None)
    is_open = mark is not None and not any(mark.groups()) and not prompt[mark.end() :].strip()
    return mark[0] if mark is not None and is_open else ""


def without_markup(text: str) -> str:
    """Strip markup around the answer: emphasis, <answer> tags, calculator annotations."""
    for _ in range(2):  # **_18_**
        for pair in EMPHASIS:
            text = pair.sub(r"\2", text)
    return ANNOTATION.sub("", TAG.sub("\n", text))


def _boxed(after: str) -> str | None:
    r"""Return the content of a \boxed whose remaining text this is; None if it is open."""
    if not after.startswith("{"):
        bare = BARE_BOX.match(after)
        return bare[0] if bare else None
    depth = 0
    for brace in BRACE.finditer(after):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return after[1 : brace.start()]
    return None


def _stated(text: str, start: int) -> str | None:
    """Return the answer in the last sentence "the answer is" after start; None without one."""
    for lead_in in islice(reversed(list(SENTENCE.finditer(text, start))), SENTENCES_TRIED):
        after = text[lead_in.end() :].lstrip()
        rest = _on_lines(after[:MAX_ANSWER]).partition("\n")[0]
        end = SENTENCE_END.search(rest)
        part = rest[: end.start()] if end else rest
        is_sure = bool(VALUE.search(CLAUSE_END.split(part)[0]) or CHOICE.fullmatch(part))
        is_working = "=" in part or len(WORD.findall(part)) > 2 or WORD.search(VALUE.split(part)[0])
        is_sure = is_sure and not (lead_in["weak"] and is_working) and not SUM.fullmatch(part)
        is_last = not re.search(r"\d", after[len(part) :])
        if part.strip() and (is_sure or (is_last and _may_answer(part))):
            return part.strip().rstrip(". 。")
    return None


def _may_answer(line: str) -> bool:
    """Return whether a line may be an answer: it contains a value, or at most two words."""
    return bool(VALUE.search(line)) or len(WORD.findall(line)) <= 2


def _on_lines(text: str) -> str:
    r"""Return the text with each formula in $$..$$ or \[..\] on one line."""
    parts = DISPLAY.split(text)
    opened: int | None = None
    for index in range(1, len(parts), 2):
        closes = opened is not None and parts[index] == {"$$": "$$", "\\[": "\\]"}[parts[opened]]
        if opened is not None and closes:
            parts[opened + 1 : index] = [p.replace("\n", " ") for p in parts[opened + 1 : index]]
            opened = None
        elif parts[index] != "\\]":
            opened = index
    return "".join(parts)


# ---- references that a table stored as a float

FLOAT = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?")
"""A number as Python writes a float."""
MOST_EXPONENT = 400
"""Approximate maximum exponent of a float."""


def plain_float(text: str) -> str:
    """Return a float's text the way people write it: 5.0 as 5, 1e-05 as 0.00001. All other text is
    unchanged."""
    number = text.strip()
    if not FLOAT.fullmatch(number) or not {".", "e"} & set(number):
        return text
    if "e" not in number and not re.search(r"\.0+$", number):
        return text
    if abs(int(number.partition("e")[2] or 0)) > MOST_EXPONENT:
        return text
    written = f"{Decimal(number):f}"
    return written.rstrip("0").rstrip(".") if "." in written else written

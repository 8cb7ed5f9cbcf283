r"""Parse an answer as one number, in the ways that people write it. Needs no JAX.

18   $18   1,018   1\,018   １８   18元   18kg        a number
1/2   10-5   x^2   2x   5 million   5万               part of something larger: not a number
"""

import re
import unicodedata
from decimal import Decimal

from jaxrl_async.scorers.answers import OTHERS, TEXT, WORD, Answer

DOLLARS = {"CA": "\ue001", "AU": "\ue002", "NZ": "\ue003", "HK": "\ue004"}
"""Countries before their dollars, and this package's internal sign for these dollars: CA$18."""
CURRENCIES = "$€£¥₹₩₽฿" + "".join(DOLLARS.values())
NUMBER = re.compile(
    rf"(?P<sign>-)?[{CURRENCIES}]?(?P<after>-)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?"
    r"(?(digits)(?:\.(?P<part>[0-9]+))?|\.(?P<alone>[0-9]+))"
)
"""A number as people write it; a comma belongs to it only before groups of three digits."""
SIGNS = {"٫": ".", "٬": ",", "⁄": "/", "∕": "/", "\u3000": " ", "，": "，"} | dict.fromkeys(
    "−–—‒", "-"
)
"""Signs of other scripts as ASCII; a full-width comma separates clauses and is kept."""
COUNTRY = re.compile(r"\b(US|CA|AU|NZ|HK)\\?\$(?=\s?-?[0-9])")
MINUS = re.compile(
    r"(?:\bnegative|(?:^|(?<=[=:(\n])|(?<=[=:(\n] )|(?<=\bis )|(?<=\bbe )|(?<=\bget )"
    r"|(?<=\bgives )|(?<=\bequals ))minus)\s+(?=\\?\$?[0-9])",
    re.IGNORECASE,
)
"""A sign as a word; `7 minus 3` is not a number."""
GROUPS = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}"
    r"(?:(?:\\[,;:! ]|\{,\}|,\\!|\\thinspace |[~'’\u00a0\u2005-\u2009\u202f])[0-9]{3})+(?![0-9])"
)
"""Thousands as LaTeX and typesetters separate them."""
LETTER, ALPHA = rf"[^\W_{OTHERS}]", rf"[^\W\d_{OTHERS}]"
OR = r"(?: \bor\b | 或者? | または | 또는 | или | หรือ )"
JOINS = r"""and | & | vs\.? | versus | bis | oder | und | ou | et | e | o | u | y
    | plus | minus | times | over | mod | choose | (?: divided | multiplied ) \s by
    | to | in | out \s of | of \s the
    | 和 | 与 | 與 | 及 | 到 | 至 | から | と | 에서 | 와 | 과 | и | до | ถึง | และ"""
"""Words between the numbers of a list, a range, a share or a sum."""
ROUNDED = re.compile(r"\bround\w*\s+(?:\w+\s+)?\$?[0-9][0-9.,]*\s+(?:\w+\s+)?to\s+$", re.IGNORECASE)
"""Text before a rounded number, which is not a range."""
KINDS = (
    "d|days?|h|hrs?|hours?|m|mins?|minutes?|s|secs?|seconds?|weeks?|months?|yrs?|years?",
    "mi|miles?|yds?|yards?|ft|feet|foot|in|inch(?:es)?|k?m|cm|(?:kilo|centi)?met(?:er|re)s?",
    "dollars?|euros?|pounds?|cents?|pence",
    "lbs?|pounds?|oz|ounces?|kg|g|(?:kilo)?grams?",
)
PARTS = re.compile(
    "|".join(rf"[0-9] *(?:{kind}) *,? +(?:and +)?[0-9][0-9.,]* *(?:{kind})\b" for kind in KINDS),
    re.IGNORECASE,
)
"""One quantity in two units: 5 hours and 30 minutes."""
LISTED = re.compile(r"[0-9$%}]\s*(?:[,;|&，；、]|\\(?:mid|q?quad|\\))\s*(?:\$?[A-Za-z]\s*=\s*)?$")
"""Text before the last number of a list that is an answer."""
UNIT = rf"""(?: [kcm]m | kg | mg | [mcd]l | lbs? | oz | ft | yds? | mi | mph | km?/h | [kmgt]b
    | kwh? | ms | secs? | mins? | hrs? | seconds? | minutes? | hours? | days? | weeks? | months?
    | years? | usd | eur | gbp | cents? | dollars? | euros? | percent )
    (?! {LETTER} | [_({{\[^] )"""
"""A unit that may follow its number without a space; one letter may be a variable."""
POWER = re.compile(
    r"(?:(?<=[0-9$/*~{ ])|(?<=·)|(?<=\\[,;:!]))"
    r"((?:[kcdmn]?m|in|ft|yds?|mi|units?|s|sec|hr?|inches|feet|met(?:er|re)s?)[ ]?\}?)"
    r"[ ]?(?:\^[ ]?(?:\{[ ]?-?[0-9][ ]?\}|-?[0-9](?![0-9]))|[²³])"
)
"""A unit with its exponent: cm^2; one letter directly after a number may be a variable: 5m^2."""
LARGER_BEFORE = re.compile(
    rf"""(?: {LETTER} | _ | [.,^√±<>≤≥≠\\/*×÷] | !=         # glued: x2, 1.2, 1,2, 2^3, >5
        | [0-9] [，、]                                        # 1，2
        | [0-9)}}\]] [ ]* (?: \*\* | // | [-+*^/×÷~〜] ) [ ]* -?    # 10 - 5, 1 / 2, 5~18
        | (?: [0-9*+/^×÷-] | [0-9)}}\]] [ ]* [-+*^/×÷] [ ]* ) [({{\[] [ ]*    # 2(5), 3 * (5)
        | [0-9)}}\]] [ ]+ x [ ]+                           # 9 x 2
        | \\ (?: times | cdot | div | pm | sqrt | [dt]?frac | [lg]eq? | [lgn]t | neq? ) [ ]*
        | [0-9] (?: : | [ ]+ : [ ]* )                      # 1:2, not "step 1: 2"
        | (?<!{ALPHA}) {ALPHA} [ ]* [-+*^/×÷] [ ]*         # x + 2
        | [^=:\s] [ ]+ - [ ]+                              # is - 5: a sign or a dash?
        | [<>≤≥≠] =? [ ]* | != [ ]*
        | (?: {ALPHA} | _ ) [({{\[] [ ]* | [}}\])^_] [({{\[]            # sqrt(2), \frac{{1}}{{2}}
        | [({{\[] [^(){{}}\[\]]* , \s*                     # (1, 2
        | 分之 | 分の | 분의 | [0-9] [ ]                    # 5/18, 10 000
        | [0-9] \s* [,，]? \s* \(? (?:and/)? {OR} (?: \s* maybe )? \s* (?: [A-Za-z] \s* = \s* )?
                                                           # 5 or 7, x = 5 or x = 7
        | [0-9%] \s* (?: {JOINS} ) \s* (?: [A-Za-z] \s* = \s* )?      # 5 to 7, x = 5 and x = 7
        | (?<! [/0-9.,] ) [0-9][0-9.,]* \s* \( \s*         # 8 (7 if rounded), not 3/4 (0.75)
        | [0-9] ['′] [ ]?                                  # 5'6"
        | \b (?: sqrt | root | log | ln | sin | cos | tan | half | twice | double | triple )
            (?: \s+ of )? \s+
        | (?: \b (?: not | never | cannot | isn't | can't | won't | instead \s of | rather \s than
            | no \s longer | other \s than | anything \s but | nothing \s like ) | \b не ) \s+
            (?: (?: be | quite | equal (?: \s to )? ) \s+ )?
        | 不 (?: 是 | 等于 | 为 | 会是 )? \s*
        )$""",
    re.VERBOSE | re.IGNORECASE,
)
"""Text before a number that is part of something larger."""
LARGER_AFTER = re.compile(
    rf"""(?: (?!{UNIT}) {LETTER} | _ | [\^({{\[√] | [,.:，、][0-9]  # glued: 3x, 2(5), not 18kg
        | [ ]* [)}}\]] [ ]* [*^×÷/+-] [ ]* [0-9(\\] | [ ]* \) [0-9({{\[]      # (5) * 3, (5)(3)
        | [ ]+ x [ ]+ [0-9]
        | [ ]* \\ (?: times | cdot | div | pm | sqrt | [dt]?frac | pi )
        | [ ]* (?: [*^×÷/+-] (?: [ ]* [0-9(\\] | [ ]* {ALPHA}(?!{LETTER}) ) | [ ]: [ ]* [0-9] )
        | \s* , [^(){{}}\[\]]* [)\]}}]                     # 1, 2)
        | [ ]* (?: hundred | thousand | million | billion | trillion | dozen | lakh | crore
            | squared | cubed | halves | thirds | quarters | tenths | (?: bn | tens ) \b )
        | [ ]* (?: [百万萬亿億兆半백천만억조] | 千(?![克米瓦]) | 分之 | 分の | 분의
            | тыс | миллион | миллиард | млн | млрд | ร้อย | พัน | หมื่น | แสน | ล้าน )
        )""",
    re.VERBOSE | re.IGNORECASE,
)
"""Text after such a number."""
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{")
"""LaTeX that wraps an answer without changing it."""
ESCAPED_DOLLAR = re.compile(r"(?<![0-9])\\\$|\\\$(?![0-9])")
"""Money, not the delimiter of a formula; kept if the numbers on both sides would become one."""
NEIGHBOURS = 200
"""Number of characters inspected on each side of a number."""


def number_of(answer: Answer | None) -> Decimal | None:
    """Return an answer's number: the first one after '####', or else the last.

    None if there is no answer or no number, or if the number is part of something larger.
    """
    if answer is None:
        return None
    text = without_powers(ESCAPED_DOLLAR.sub("", plain_signs(answer.text)))
    text = WRAPPED.sub("{", TEXT.sub(r"\1", text))
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    number = numbers[0 if answer.mark == "####" else -1]
    line = text[text.rfind("\n", 0, number.start()) + 1 : number.start()][-NEIGHBOURS:]
    is_list = answer.mark in ("box", "sentence") or not WORD.search(line)
    return None if is_list and LISTED.search(line) else _alone(text, number)


def without_powers(text: str) -> str:
    """Return the text without the exponents of units: 5 cm for 5 cm^2."""
    return POWER.sub(_unit_alone, text)


def written(number: Decimal) -> str:
    """Return a number's digits: 18 for 18.0."""
    return f"{number.normalize():f}"


def plain_signs(text: str) -> str:
    """Return the text with the digits, signs and thousands of all scripts as ASCII's."""
    text = re.sub(r"[^\x00-\x7f]+", lambda found: "".join(map(_plain, found[0])), text)
    text = GROUPS.sub(lambda found: re.sub(r"[^0-9]+", "", found[0]), text)
    text = COUNTRY.sub(lambda found: DOLLARS.get(found[1], "\\$"), text)
    return MINUS.sub("-", text)


def _unit_alone(found: re.Match[str]) -> str:
    is_variable = len(found[1]) == 1 and found.string[found.start() - 1].isdigit()
    return found[0] if is_variable else found[1]


def _plain(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.decimal(character))
    is_wide = "\uff01" <= character <= "\uff5e"
    return chr(ord(character) - 0xFEE0) if is_wide else character


def _alone(text: str, match: re.Match[str]) -> Decimal | None:
    """Return the number that was matched; None if it is part of something larger."""
    start, end = match.span()
    before = ROUNDED.sub(" ", text[max(0, start - NEIGHBOURS) : start])
    after = text[end : end + NEIGHBOURS]
    if LARGER_BEFORE.search(before) or LARGER_AFTER.match(after):
        return None
    if any(
        part.start() < len(before) < part.end()
        for part in PARTS.finditer(before + text[start : end + NEIGHBOURS])
    ):
        return None
    negative = match["sign"] or match["after"] or re.search(r"[=:]\s*-\s+$", before)
    digits = (match["digits"] or "0").replace(",", "")
    number = Decimal(f"{digits}.{match['part'] or match['alone'] or '0'}")
    return -number if negative else number

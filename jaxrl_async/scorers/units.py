r"""Parse the unit that ends an answer: 12\text{ cm}, 5 minutes, $5, 3 m/s^2. Needs no JAX."""

import re
from collections import Counter
from collections.abc import Mapping

from jaxrl_async.scorers.answers import MAX_ANSWER, OTHERS, TEXT
from jaxrl_async.scorers.written_numbers import CURRENCIES, DOLLARS, plain_signs

NAMES = """
mm millimeter millimetre 毫米 | cm centimeter centimetre 厘米 센티미터 | m meter metre 米 미터 метр
dm decimeter decimetre | km kilometer kilometre 千米 公里 킬로미터
inch inches | ft foot feet | yd yard | mi mile | nm nanometer nanometre | μm micrometer micrometre
mg milligram milligramme 毫克 | g gram gramme 克 그램 | kg kgs kilogram kilogramme kilo 千克 公斤
t ton tonne 吨 | oz ounce | lb lbs
ml mL milliliter millilitre 毫升 | cl cL | l L liter litre 升 리터 | gal gallon
ns nanosecond | μs microsecond | ms millisecond | s sec second 秒 초 | min minute 分钟 分鐘 분
h hr hour 小时 小時 時間 시간 | day 天 | week | month | yr year
mph | kph kmh kmph | Hz hertz | kHz | MHz | GHz | N newton | J joule | kJ kilojoule | W watt
kW kilowatt | MW megawatt | kWh | V volt | mV | kV | A amp ampere | mA | Ω ohm | Pa pascal | kPa
K kelvin | °C celsius | °F fahrenheit | ° deg degree | rad radian | mol mole | eV | cal calorie
kcal kilocalorie | usd dollar $ 美元 달러 | cent ¢ | eur euro € 欧元 | gbp £ | yen 円
yuan rmb 元 块 | won ₩ 원 | rupee ₹ | ruble rouble ₽ | baht ฿ | % pct percent | bit | byte
kb kB | mb MB | gb GB | tb TB | am AM | pm PM | acre | hectare ha | quart qt | pint pt | cup
tsp teaspoon | tbsp tablespoon | decade | century centuries | knot
"""
"""Units, each followed by its other names; a plural ends in s."""
UNITS: Mapping[str, str] = {
    name: group.split()[0]
    for line in NAMES.strip().splitlines()
    for group in line.split(" | ")
    for name in group.split()
} | {sign: country for country, sign in DOLLARS.items()}
SPEEDS = {"mph": {"mi": 1, "h": -1}, "kph": {"km": 1, "h": -1}}
MONEY = frozenset({"usd", "eur", "gbp", "yen", "yuan", "won", "rupee", "ruble", "baht", *DOLLARS})
MARK = "\x1f"
"""Marks where LaTeX's text begins."""
SIGN = f"[{CURRENCIES}]"
QUANTITY = re.compile(
    rf"(?P<whole>{MARK}|(?<![\w.,^/*+-])(?P<money>-?{SIGN})?[ ]?-?[0-9][0-9.,]*(?:/[0-9]+)?"
    r"(?:[ ]*(?:\\times|\\cdot|×|x|\*)[ ]*10\^-?[0-9]+)?)|(?<![\w^])(?<!\^-)[0-9]"
)
"""A number with its money sign, or LaTeX's text; not `whole`: a number within a formula."""
WORD = rf"°[CF]?|[%Ω¢{CURRENCIES}]|[A-Za-zμ]+|[{OTHERS}]+"
FACTOR = re.compile(
    rf"[ ]*(?P<by>/|\bper\b|·|\*|\\cdot)?[ ]*(?P<power>square|sq\.?|cubic)?[ ]*(?P<word>{WORD})"
    r"(?:\^?(?P<exponent>-?[0-9])(?![0-9])|(?P<square>²|[ ]squared)|(?P<cube>³|[ ]cubed))?"
)
RATE = re.compile(r"^[ ]*(?:/|(?:per|an?)\b)")
"""Words before the unit that a price is for: $42 an hour."""
SYMBOL = re.compile(r"[ ]+(?!in\b)[A-Za-zμΩ]{1,2}(?=[ ]*(?:$|[.,;)]|\^|[·/*]))")
"""A unit's symbol after another one: N m."""
DEGREES = re.compile(
    rf"(?:°|\bdeg(?:ree)?s?\b\.?)[ {MARK}~\\]*([CF])(?:elsius|ahrenheit)?(?![A-Za-z])",
    re.IGNORECASE,
)
"""Degrees of temperature, as symbols and words."""
SHORT = {
    r"kilowatt[ -]hours?": "kWh",
    r"\bper ?cent\b": "%",
    r"\bnewton[ -]met": "N·met",
    r"\b([ap])\.m\b\.?": r"\1m",
    r"\bin(?=\.?\s*$|\^|[²³])": "inch",
}
"""Names with several words or full stops."""
SPACES = re.compile(r"\\[,;:! ]|\\q?quad|~|[\u00a0\u2005-\u2009\u202f]")


def unit_of(text: str) -> Counter[str]:
    """Return the exponents of the units that end an answer; empty without a known unit.

    text: the line with the answer; its '$' signs are money, not the delimiters of formulas.
    """
    text = text[-MAX_ANSWER:]
    text = SPACES.sub(" ", plain_signs(text).replace("\\$", "$").replace("\\%", "%"))
    text = TEXT.sub(rf"{MARK}\1", text.replace("\\left", "").replace("\\right", ""))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\(?:circ|degree)\b", "°", text)
    text = re.sub(r"[{}]", "", text.replace("µ", "μ"))
    text = DEGREES.sub(lambda found: "°" + found[1].upper(), text)
    for name, short in SHORT.items():
        text = re.sub(name, short, text, flags=re.IGNORECASE)
    quantity = next(reversed(list(QUANTITY.finditer(text))), None)
    if quantity is None or quantity["whole"] is None:
        return Counter()
    if quantity["money"]:
        found, behind = Counter({UNITS[quantity["money"][-1]]: 1}), text[quantity.end() :]
        return _units_at(RATE.sub("/", behind), 0, found) if RATE.match(behind) else found
    return _units_at(text, quantity.end(), Counter())


def differ(text: str, other: str) -> bool:
    """Return whether two answers end in units that differ.

    Money may leave out what it pays for ($42 for $42 per hour), a degree its scale.
    """
    own, others = unit_of(text), unit_of(other)
    if not own or not others or own == others:
        return False
    few, many = sorted((set(own.items()), set(others.items())), key=len)
    if few == {("°", 1)}:
        return not {unit for unit, _ in many} <= {"°C", "°F"}
    return not (few < many and few <= {(unit, 1) for unit in MONEY})


def _units_at(text: str, start: int, found: Counter[str]) -> Counter[str]:
    """Add the exponents of the units from `start` on, one after another, to those found."""
    while factor := FACTOR.match(text, start):
        unit = _unit_named(factor["word"])
        exponent = int(
            factor["exponent"] or (2 if factor["square"] else 3 if factor["cube"] else 1)
        )
        exponent *= {"s": 2, "c": 3}.get((factor["power"] or "-")[0], 1)
        joined = (  # two words side by side may be prose
            factor["by"] or factor["exponent"] or SYMBOL.match(text, factor.start())
        )
        if unit is None or (found and not joined):
            break
        exponent = -exponent if factor["by"] in ("/", "per") else exponent
        for name, times in SPEEDS.get(unit, {unit: 1}).items():
            found[name] += times * exponent
        start = factor.end()
    return found


def _unit_named(word: str) -> str | None:
    """Return the unit of that name; None if it is unknown."""
    for name in (word, word.lower() if len(word) > 2 else word):
        for known in (name, name.removesuffix("s") if len(name) > 3 else name):
            if known in UNITS:
                return UNITS[known]
    first = next((n for n in range(len(word), 0, -1) if word[:n] in UNITS), 0)  # 元。 18원입니다
    return UNITS[word[:first]] if first and ord(word[0]) > 0x3FF else None

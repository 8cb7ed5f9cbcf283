"""Whether a turn of the policy does what a given turn does: the functional reward of PivotRL.

    given turn    turn of the policy    matches if
    tool calls    tool calls            the same tools with the same arguments, in any order
    text          text                  it calls no tool (text=any), or has the same words

After PivotRL, Yi et al. 2026 (arXiv:2603.21383), sec. 2: a turn earns 1 if it is
acceptable at this point, not only if it is the demonstration word for word. The comparison is the
same as in NeMo Gym's single_step_tool_use_with_argument_comparison. Pure functions, no JAX.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_async.data.chat_formats.chat_messages import arguments_object
from jaxrl_async.types import CORRECT, Message, StopReason

CUT_OFF, MALFORMED = "cut_off", "malformed"
NO_CALL, CALL, COUNT, TOOL = "no_call", "call", "number_of_calls", "tool"
ARGUMENTS, TEXT = "arguments", "text"
REASONS = (CUT_OFF, MALFORMED, NO_CALL, CALL, COUNT, TOOL, ARGUMENTS, TEXT)
"""Reasons for which a turn does not match: a limit cut it off; a call cannot be read; it calls no
tool, or calls one where the given turn does not; another number of calls; another tool; other
arguments; another text."""
CLOSE = 1e-6
"""Maximum difference of two numbers that count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRules:
    """What counts as the same turn."""

    calls: Literal["arguments", "names"] = "arguments"  # compare arguments, or tools alone
    text: Literal["any", "same"] = "any"  # of a given turn without calls
    similarity: float = 1.0  # least similarity of texts, 0 to 1; see `similar`
    ignored: frozenset[str] = frozenset()  # names of arguments that are not compared


def mismatch_of(given: Message, turn: Message, rules: MatchRules) -> str:
    """Return why a turn does not match a given one, one of REASONS; "": it matches."""
    if turn.get("tool_call_errors"):
        return MALFORMED
    expected, calls = given.get("tool_calls") or (), turn.get("tool_calls") or ()
    if not expected:
        if calls:
            return CALL
        content, text = (str(message.get("content") or "") for message in (given, turn))
        return "" if rules.text == "any" or similar(content, text, rules.similarity) else TEXT
    if not calls:
        return NO_CALL
    if len(calls) != len(expected):
        return COUNT
    if not can_pair(expected, calls, lambda a, b: _name(a) == _name(b)):
        return TOOL
    if rules.calls == "names" or can_pair(expected, calls, lambda a, b: _same_call(a, b, rules)):
        return ""
    return ARGUMENTS


def can_pair(
    expected: Sequence[object], found: Sequence[object], fits: Callable[[Any, Any], bool]
) -> bool:
    """Return whether each of `expected` can be paired with another one of `found` that fits it.

    Augmenting paths (Kuhn 1955): one call may fit several, so the first that fits may be wrong.
    """
    partner: dict[int, int] = {}  # of each one found: the expected one

    def assigned(index: int, seen: set[int]) -> bool:
        for other, candidate in enumerate(found):
            if other in seen or not fits(expected[index], candidate):
                continue
            seen.add(other)
            if other not in partner or assigned(partner[other], seen):
                partner[other] = index
                return True
        return False

    return all(assigned(index, set()) for index in range(len(expected)))


def _name(call: Mapping[str, Any]) -> str:
    return str(call.get("function", {}).get("name", ""))


def _same_call(given: Mapping[str, Any], call: Mapping[str, Any], rules: MatchRules) -> bool:
    if _name(given) != _name(call):
        return False
    first, second = (
        arguments_object(one["function"].get("arguments") or {}) for one in (given, call)
    )
    if first is None or second is None:
        return False
    compared = [{k: v for k, v in one.items() if k not in rules.ignored} for one in (first, second)]
    return same_value(compared[0], compared[1], rules.similarity)


def same_value(given: object, value: object, similarity: float = 1.0) -> bool:
    """Return whether two arguments are the same: whole numbers, such as an order's, if they are
    equal, other numbers to within CLOSE, texts by `similar`, objects and lists by each of their
    values."""
    if isinstance(given, bool) or isinstance(value, bool):
        return given is value
    if isinstance(given, int | float) and isinstance(value, int | float):
        if isinstance(given, int) and isinstance(value, int):
            return given == value
        try:
            return math.isclose(given, value, rel_tol=1e-9, abs_tol=CLOSE)
        except OverflowError:  # a whole number that no float holds
            return given == value
    if isinstance(given, str) and isinstance(value, str):
        return similar(given, value, similarity)
    if isinstance(given, Mapping) and isinstance(value, Mapping):
        same_keys = given.keys() == value.keys()
        return same_keys and all(same_value(given[k], value[k], similarity) for k in given)
    if isinstance(given, list) and isinstance(value, list):
        pairs = zip(given, value, strict=False)
        return len(given) == len(value) and all(same_value(a, b, similarity) for a, b in pairs)
    return type(given) is type(value) and given == value


def similar(given: str, text: str, least: float = 1.0) -> bool:
    """Return whether two texts have the same words, apart from case and the spaces between them;
    or, for `least` below 1, words in common with an F1 of at least that.

    F1 = 2 |A and B| / (|A| + |B|) of the multisets of words.
    """
    first, second = given.lower().split(), text.lower().split()
    if first == second or least >= 1:
        return first == second
    common = (Counter(first) & Counter(second)).total()
    return 2 * common >= least * (len(first) + len(second))


class TurnReward:
    """A reward function: 1 if the policy's turn matches the record's column `given`, else 0.

    The part is `correct`; the metrics logged/missed_REASON are the shares of REASONS.
    """

    def __init__(self, rules: MatchRules) -> None:
        self._rules = rules
        self.__name__ = "turn_match"

    def __call__(
        self,
        messages: Sequence[Message],
        given: Message,
        stop: str,
        log_metric: Callable[[str, float], None],
    ) -> dict[str, float]:
        """Score one turn, the last of the messages."""
        is_cut = stop == StopReason.LENGTH.value
        missed = CUT_OFF if is_cut else mismatch_of(given, messages[-1], self._rules)
        for reason in REASONS:
            log_metric(f"missed_{reason}", float(missed == reason))
        return {CORRECT: float(not missed)}

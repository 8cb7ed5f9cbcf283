"""Spans of a text that two tokenizers have split, against a search of every prefix."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.teachers.text_spans import Spans, spans_of


def searched(policy: list[bytes], teacher: list[bytes]) -> list[tuple[int, int, int, int]]:
    """The spans: from each end, the shortest further tokens of both that spell the same bytes."""
    found, a, b = [], 0, 0
    while True:
        pairs = [
            (i, j)
            for i in range(a + 1, len(policy) + 1)
            for j in range(b + 1, len(teacher) + 1)
            if b"".join(policy[a:i]) == b"".join(teacher[b:j])
        ]
        if not pairs:
            return found
        i, j = min(pairs)
        found.append((a, i, b, j))
        a, b = i, j


def as_rows(spans: Spans) -> list[tuple[int, ...]]:
    return [
        (*map(int, policy), *map(int, teacher))
        for policy, teacher in zip(spans.policy, spans.teacher, strict=True)
    ]


@st.composite
def split(draw: Any, text: bytes) -> list[bytes]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    ends = [*(c for c in cuts if c < len(text)), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


@st.composite
def both(draw: Any) -> tuple[list[bytes], list[bytes]]:
    text = draw(st.text("ab é数🙂", max_size=12)).encode()
    other = text if draw(st.booleans()) else draw(st.text("ab é数🙂", max_size=12)).encode()
    return draw(split(text)), draw(split(other))


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(both())
def test_spans_are_the_shortest_tokens_that_spell_the_same(pair: Any) -> None:
    policy, teacher = pair
    found = spans_of(policy, teacher)
    assert as_rows(found) == searched(policy, teacher)
    single = [(i - a, j - b) == (1, 1) for a, i, b, j in as_rows(found)]
    assert found.one_to_one.tolist() == single


@pytest.mark.parametrize(
    ("policy", "teacher", "wanted"),
    [
        (
            [b"hel", b"lo", b" wor", b"ld", b"!"],
            [b"hello", b" w", b"orld", b"!"],
            [(0, 2, 0, 1), (2, 4, 1, 3), (4, 5, 3, 4)],
        ),
        ([b"a", b"b"], [b"", b"a", b"b"], [(0, 1, 0, 2), (1, 2, 2, 3)]),
        ([b"a", b"b"], [b"a", b"", b"b", b""], [(0, 1, 0, 1), (1, 2, 1, 3)]),
        ([b"a", b"bX", b"c"], [b"a", b"bY", b"c"], [(0, 1, 0, 1)]),
        ([b"abc"], [b"ab"], []),
        ([], [], []),
    ],
)
def test_a_span_ends_where_both_end_a_token(policy: Any, teacher: Any, wanted: Any) -> None:
    assert as_rows(spans_of(policy, teacher)) == wanted


def test_a_span_that_the_policy_splits_unusually_is_left_out() -> None:
    policy, teacher = [b"h", b"i", b" you", b" two"], [b"hi", b" you", b" t", b"wo"]
    assert len(spans_of(policy, teacher).policy) == 3
    usual = [b"hi", b" you", b" two"]
    assert as_rows(spans_of(policy, teacher, usual)) == [(2, 3, 1, 2), (3, 4, 2, 4)]
    letters = [b"h", b"i", b" you"]
    assert as_rows(spans_of(letters, letters, [b"hi", b" you"])) == [(2, 3, 2, 3)]
    np.testing.assert_array_equal(
        spans_of(policy, teacher, policy).policy, spans_of(policy, teacher).policy
    )


def test_spans_move_with_the_tokens_before_them() -> None:
    spans = spans_of([b"ab", b"c"], [b"a", b"b", b"c"]).moved(5, 7)
    assert as_rows(spans) == [(5, 6, 7, 9), (6, 7, 9, 10)]
    assert as_rows(spans.at(np.array([False, True]))) == [(6, 7, 9, 10)]


ALIGN = """
import json, sys
from trl.experimental.gold.gold_trainer import ULDLoss
print(json.dumps([ULDLoss._align_by_byte_offsets(*case) for case in json.load(sys.stdin)]))
"""


def cut(text: bytes, rng: random.Random) -> list[bytes]:
    ends = [*sorted(rng.sample(range(1, len(text)), rng.randrange(0, len(text) - 1))), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def offsets_of(pieces: list[bytes]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.exhaustive
def test_spans_are_the_groups_of_trls_gold() -> None:
    peers = os.environ.get("JAXRL_PEERS")
    if not peers:
        pytest.skip("JAXRL_PEERS is not set: no environments of peers (docs/agreement.md)")
    rng = random.Random(0)
    text = "The quick brown fox, été 数学 🙂".encode()
    pairs = [(cut(text, rng), cut(text, rng)) for _ in range(50)]
    offsets = [[offsets_of(pieces) for pieces in pair] for pair in pairs]
    done = subprocess.run(
        [Path(peers) / "trl" / "bin" / "python", "-c", ALIGN],
        input=json.dumps(offsets),
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (policy, teacher), groups in zip(pairs, json.loads(done.stdout), strict=True):
        wanted = [(a[0], a[-1] + 1, b[0], b[-1] + 1) for a, b in zip(*groups, strict=True)]
        assert as_rows(spans_of(policy, teacher)) == wanted

"""Episodes of several turns, for people: parts by who said them, and contexts that branch."""

import numpy as np
import pytest

from jaxrl_async.run.shown_contexts import common_tokens, contexts_of
from jaxrl_async.types import NOT_DRAWN, Episode, StopReason

pytestmark = pytest.mark.full


class Letters:
    """Each token is a letter."""

    def decode_all(self, token_ids):
        return "".join(chr(i) for i in token_ids)


def episode(text: str, *, turns: int) -> Episode:
    """An episode of contexts apart by bars; capitals were drawn."""
    contexts = text.split("|")
    starts = tuple(np.cumsum([0, *map(len, contexts[:-1])]).tolist())
    letters = "".join(contexts)
    sampled = np.array([letter.isupper() for letter in letters])
    return Episode(
        token_ids=np.array([ord(letter.lower()) for letter in letters], np.int32),
        drawn=sampled,
        logprobs=np.zeros(len(letters), np.float32),
        versions=np.where(sampled, 3, NOT_DRAWN).astype(np.int32),
        stop=StopReason.EOS,
        num_turns=turns,
        starts=starts,
    )


def test_an_episode_of_one_context_is_cut_where_the_policy_begins_and_ends():
    (context,) = contexts_of(episode("pqABtCD", turns=2), Letters())
    assert context == {"parts": [(False, "pq"), (True, "ab"), (False, "t"), (True, "cd")]}


def test_a_context_continues_the_one_with_which_it_has_most_in_common():
    found = contexts_of(episode("pqAB|xyC|pqabtD|pqE", turns=4), Letters())
    assert found[1] == {"parts": [(False, "xy"), (True, "c")]}
    assert found[2] == {"after": 0, "shared": 4, "parts": [(False, "t"), (True, "d")]}
    assert found[3] == {"after": 0, "shared": 2, "parts": [(True, "e")]}


def test_what_was_sampled_again_is_shown_again_though_it_is_the_same():
    found = contexts_of(episode("pqAB|pqABC", turns=2), Letters())
    assert found[1] == {"after": 0, "shared": 2, "parts": [(True, "abc")]}


def test_nothing_sampled_and_nothing_there_are_no_parts_of_their_own():
    (context,) = contexts_of(episode("pq", turns=2), Letters())
    assert context == {"parts": [(False, "pq")]}
    assert common_tokens(np.array([1, 2]), np.array([], int)) == 0

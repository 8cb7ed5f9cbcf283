"""Pages, prefix store, slots, memory plan, limit and schedule: pure host code."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.errors import ConfigError
from jaxrl_async.model.families.parts import LayerKind
from jaxrl_async.model.kv_layout import KvGroup, KvLayout, layout_of
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.admission import DECREASE, Limit, SamplerLoad, adjusted_limit
from jaxrl_async.sampler.batch.kv_budget import plan_memory
from jaxrl_async.sampler.batch.kv_cache import KvCache, Pages, PrefixStore, TableForm, page_names
from jaxrl_async.sampler.batch.slots import Slots
from jaxrl_async.sampler.device.sampling import TokenExtras
from jaxrl_async.sampler.grammar import packed_words, unpacked_bits


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 5))))
def test_pages_add_up_whatever_happens(steps) -> None:
    pages, held = Pages(8), []
    for what, number in steps:
        if what == "take":
            free = pages.num_free
            got = pages.allocate(number)
            assert (got is None) == (number > free)
            held += [got] if got else []
        elif held and what == "share":
            pages.hold(held[number % len(held)])
            held.append(held[number % len(held)])
        elif held:
            pages.release(held.pop(number % len(held)))
        pages.check_integrity(held)


def test_a_page_that_is_free_cannot_be_given_back() -> None:
    with pytest.raises(AssertionError, match="page 0 is free"):
        Pages(1).release([0])


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NEAR, FAR = LayerKind(window=5), LayerKind()
ALL, MIXED = layout_of((FAR,)), layout_of((NEAR, FAR))


def form_with(page_tokens: int, layout: KvLayout = ALL) -> TableForm:
    return TableForm(layout=layout, page_tokens=page_tokens, width=12, no_page=99)


def table_of(form: TableForm, *rows: list[int]) -> np.ndarray:
    table = form.empty()
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return table


def found(store: PrefixStore, *token_ids: int) -> list[int]:
    (row,) = store.match(tokens(*token_ids))[0].tolist()
    return row


def test_the_store_finds_the_longest_prefix_but_leaves_a_token_to_compute() -> None:
    pages, form = Pages(8), form_with(2)
    store = PrefixStore(pages, form)
    mine = pages.allocate(3)
    store.put(tokens(1, 2, 3, 4, 5), table_of(form, mine))
    assert store.held == (mine[1], mine[0]), "only full pages; ends are given up first"
    assert found(store, 1, 2, 3, 4, 9) == mine[:2]
    assert found(store, 1, 2, 3, 4) == mine[:1], "the last token's logits are needed"
    assert found(store, 9, 2, 3, 4, 5) == []
    assert found(store, 1, 2, 9, 4, 5) == mine[:1]


def test_the_store_gives_up_ends_first_and_never_what_others_hold() -> None:
    pages, form = Pages(4), form_with(1)
    store = PrefixStore(pages, form)
    mine = pages.allocate(3)
    store.put(tokens(1, 2, 3), table_of(form, mine))
    pages.release(mine[1:])
    assert store.evict(1) == 1 and pages.num_free == 2
    assert found(store, 1, 2, 3, 4) == mine[:2], "the end of the chain went"
    pages.release(mine[:2])
    assert store.evict(5) == 1, "the first page is still held by its sequence"
    pages.check_integrity([mine[:1], store.held])


def test_a_prompt_goes_on_only_where_the_pages_of_the_window_are_there() -> None:
    """Pages of 2 tokens, a window of 5: what follows a page sees the two before it."""
    pages, form = Pages(20), form_with(2, MIXED)
    store, words = PrefixStore(pages, form), tokens(*range(1, 12))
    far, near = pages.allocate(5), pages.allocate(2)
    store.put(words, table_of(form, far, [99, 99, 99, *near]))
    table, hidden = store.match(words)
    assert table.tolist() == [far, [99, 99, 99, *near]] and hidden == 0
    other, hidden = store.match(tokens(1, 2, 3, 4, 5, 6, 7, 8, 0))
    assert other.shape == (2, 0) and hidden == 4, "all tokens would see four, the window none"
    early = pages.allocate(2)
    store.put(words[:4], table_of(form, far[:2], early))
    shorter, hidden = store.match(tokens(1, 2, 3, 4, 5, 6, 7, 8, 0))
    assert shorter.tolist() == [far[:2], early] and hidden == 2
    for mine in (far, near, early, form.pages_in(table), form.pages_in(shorter)):
        pages.release(mine)
    assert store.evict(20) == 9 and pages.num_free == 20


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20))
def test_a_sequence_keeps_what_any_later_token_sees_and_not_much_more(tokens, page_tokens, window):
    group = KvGroup(window=window, layers=(0,))
    first = group.first_page(tokens, page_tokens)
    full = tokens // page_tokens * page_tokens
    for next_token in (tokens, tokens - 1, full):  # also computed again, and behind the last page
        assert first * page_tokens <= max(0, next_token - window + 1)
    kept = -(-tokens // page_tokens) - first
    assert kept <= -(-(window - 1) // page_tokens) + 1
    assert kept <= KvLayout(groups=(group,), arrays=1).pages_of(tokens, page_tokens, 1)


def test_other_weights_empty_the_store() -> None:
    pages, form = Pages(4), form_with(1)
    store = PrefixStore(pages, form)
    mine = pages.allocate(2)
    store.put(tokens(1, 2), table_of(form, mine))
    store.clear()
    assert found(store, 1, 2, 3) == []
    pages.check_integrity([mine])


def test_a_store_that_is_off_keeps_nothing() -> None:
    pages, form = Pages(2), form_with(1)
    store = PrefixStore(pages, form, enabled=False)
    store.put(tokens(1, 2), table_of(form, pages.allocate(2)))
    assert store.held == () and found(store, 1, 2) == []


def test_a_group_shares_full_pages_and_each_member_has_the_last_one_of_its_own() -> None:
    cache = KvCache(form_with(2), 8)
    leader, found_tokens = cache.allocate(tokens(1, 2, 3, 4, 5), spare=0)
    follower = cache.allocate_follower(5, spare=0)
    assert found_tokens == 0 and leader is not None and follower is not None
    assert follower[0, :4].tolist() == [99, 99, 3, 99]
    cache.share(leader, follower, 5)
    assert leader[0, :4].tolist() == [0, 1, 2, 99] and follower[0, :4].tolist() == [0, 1, 3, 99]
    cache.check_integrity([leader, follower])
    cache.release(leader)
    assert (leader == 99).all() and cache.pages.num_free == 5, "the follower holds three"
    cache.check_integrity([follower])


def test_a_new_request_evicts_stored_prefixes_but_leaves_pages_to_spare() -> None:
    cache = KvCache(form_with(2), 4)
    first, _ = cache.allocate(tokens(1, 2, 3, 4, 5), spare=0)
    cache.prefixes.put(tokens(1, 2, 3, 4, 5), first)
    cache.release(first)
    assert cache.pages.num_free == 2 and cache.evictable_share == 0.5
    assert cache.allocate(tokens(1, 2, 3, 4, 9, 8, 7), spare=1) == (None, 0), "it needs two of two"
    again, found_tokens = cache.allocate(tokens(1, 2, 3, 4, 9), spare=1)
    assert found_tokens == 4 and again[0, :3].tolist() == [0, 1, 3]
    assert not cache.grow(again, 3, 5), "only one page is free, and none can be evicted"
    assert cache.grow(again, 3, 4) and cache.pages.num_free == 0
    cache.release(again)
    assert cache.allocate_follower(7, spare=4) is None
    assert cache.pages.num_free == 4 and cache.prefixes.held == ()
    assert cache.prefixes.stats().evicted_pages == 2


def test_pages_behind_a_window_are_given_back_and_taken_when_the_prompt_comes_to_them() -> None:
    """Pages of 2 tokens, a window of 5: the prompt keeps three of five pages of that layer."""
    cache = KvCache(form_with(2, MIXED), 20)
    table, _ = cache.allocate(tokens(*range(10)), spare=0)
    assert (table != 99).sum(axis=1).tolist() == [5, 3], "its last page, and two before"
    assert cache.fill(table, 0, 4) and cache.pages.num_free == 20 - 5 - 5
    cache.release(table, cache.form.hidden(table, 10))
    assert cache.pages.num_free == 20 - 5 - 3
    cache.check_integrity([table])


def test_slots_sort_a_blocks_tokens_out_by_owner() -> None:
    form = form_with(page_tokens=4)
    slots = Slots(3, max_new=8, cache=KvCache(form, 8))
    slots.occupy(0, 2, table_of(form, [1]), version=4)
    slots.occupy(2, 3, table_of(form, [2]), version=5)
    sampled = tokens(10, 11, 12, 13, 14, 15).reshape(2, 3)
    owners = tokens(0, 2, 2, 3, 3, 3).reshape(2, 3)  # slot 2 took row 0 over; row 1 is empty
    spans = slots.take(sampled, sampled.astype(np.float32), owners, version=6)
    assert [tuple(s) for s in spans] == [(0, 0, 1), (2, 0, 2)]
    assert slots.tokens[0, :1].tolist() == [10] and slots.tokens[2, :2].tolist() == [11, 12]
    assert slots.versions[0, :1].tolist() == [4], "the first token has the old logits' version"
    assert slots.versions[2, :2].tolist() == [5, 6]
    assert slots.lengths.tolist() == [3, 0, 5]


def test_masks_are_stored_for_the_requests_that_ask_for_them_alone() -> None:
    form = form_with(page_tokens=4)
    slots = Slots(2, max_new=8, cache=KvCache(form, 8))
    for slot in (0, 1):
        slots.occupy(slot, 2, table_of(form, [slot + 1]), version=4)
    sampled, full = tokens(3, 5).reshape(2, 1), np.array([[-0.5], [-0.7]], np.float32)
    words = np.array([0b101000, 2**32 - 1], np.uint32).reshape(2, 1, 1)  # [R, block, V / 32]
    owners = tokens(0, 1).reshape(2, 1)
    slots.take(sampled, full, owners, 4, TokenExtras(full, words), masked={0})
    assert [of.record().num_tokens for of in slots.masks] == [1, 0]
    own = slots.output(0, extras=True)
    assert own.kept is not None and own.kept.ids.tolist() == [3, 5]
    assert own.full_logprobs is not None and own.full_logprobs.tolist() == [-0.5]


def test_bits_come_back_as_token_ids() -> None:
    words = np.array([0b1001, 1 << 31], np.uint32)
    assert np.flatnonzero(unpacked_bits(words)).tolist() == [0, 3, 63]
    assert packed_words(tokens(0, 3, 63), 2).tolist() == words.tolist()


def test_memory_plan_refuses_what_could_never_finish_a_sequence() -> None:
    sizes = {
        "token_bytes": 64, "layout": ALL, "max_length": 100, "page_tokens": 16, "block": 16,
        "reserve_share": 0.25,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"needs 7\. Give at least"):
        plan_memory(**sizes, slots=4, budget_bytes=6 * 16 * 64)
    plan = plan_memory(**sizes, slots=None, budget_bytes=80 * 16 * 64)
    assert (plan.pages, plan.slots, plan.kv_bytes) == (80, 20, 80 * 16 * 64)
    roomy = plan_memory(**sizes, slots=4, budget_bytes=None)
    assert roomy.pages >= (4 + 1) * 7, "every slot can hold the longest sequence"


limits = st.builds(Limit, value=st.floats(1, 64), least=st.just(1), most=st.just(64))
loads = st.builds(
    SamplerLoad,
    running=st.integers(0, 64),
    waiting=st.integers(0, 9),
    used_share=st.floats(0, 1),
    preempted=st.integers(0, 2),
)


@given(limits, loads)
def test_the_limit_stays_in_its_bounds_and_moves_by_one_or_by_a_fifth(limit, load) -> None:
    after = adjusted_limit(limit, load)
    assert after.least <= after.value <= after.most
    assert after.value in (
        limit.value,
        min(64.0, limit.value + 1),
        max(1.0, limit.value * DECREASE),
    )
    assert not (load.preempted and after.value > limit.value)


def test_the_limit_finds_its_way_back_up() -> None:
    limit = Limit(value=64, least=1, most=64)
    limit = adjusted_limit(limit, SamplerLoad(running=64, waiting=5, used_share=0.95, preempted=1))
    assert limit.value == 64 * DECREASE
    for _ in range(20):
        running = limit.requests
        limit = adjusted_limit(
            limit, SamplerLoad(running=running, waiting=5, used_share=0.3, preempted=0)
        )
    assert limit.requests == 64


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50))).map(
        lambda pairs: [(start, start + more) for start, more in pairs]
    ),
    st.integers(1, 64),
)
def test_every_prompt_is_prefilled_once_in_order_within_the_budget(waiting, budget) -> None:
    done = [start for start, _ in waiting]
    rounds = deque()
    while any(d < total for d, (_, total) in zip(done, waiting, strict=True)):
        open_ = [
            (i, d, t) for i, (d, (_, t)) in enumerate(zip(done, waiting, strict=True)) if d < t
        ]
        pieces = shapes.plan_prefill([(d, t) for _, d, t in open_], budget)
        assert 0 < sum(p.count for p in pieces) <= budget
        assert [p.index for p in pieces] == list(range(len(pieces))), "first come, first served"
        for piece in pieces:
            assert piece.start == done[open_[piece.index][0]]
            done[open_[piece.index][0]] += piece.count
        rounds.append(pieces)
    assert done == [total for _, total in waiting]


@given(st.integers(1, 5000))
def test_buckets_hold_what_they_are_for_at_little_waste(count) -> None:
    assert count <= shapes.steps_of_half(count) < max(2, 1.5 * count)
    assert count <= shapes.length_bucket(count) < max(shapes.SMALLEST_BUCKET + 1, 2 * count)
    assert count <= shapes.rows_bucket(count) < 4 * count + 1


@given(st.integers(1, 300), st.integers(1, 300))
def test_rows_hold_everybody_and_shrink_when_few_run(running, slots) -> None:
    running = min(running, slots)
    rows = shapes.decode_rows(running, slots)
    assert running <= rows <= slots and slots % rows == 0


def test_a_page_has_the_name_of_all_tokens_up_to_its_end():
    tokens = np.arange(12, dtype=np.int32)
    names = page_names(tokens, 4)
    assert len(set(names)) == 3 and names[:2] == page_names(tokens[:11], 4)
    other = page_names(np.where(tokens == 0, 99, tokens).astype(np.int32), 4)
    assert not set(names) & set(other), "the same tokens behind another beginning"
    assert not set(names) & set(page_names(tokens, 4, b"adapter"))


def test_a_budget_holds_pages_of_all_arrays_beside_places_and_states():
    layout = KvLayout(groups=(KvGroup(window=0, layers=(0, 1, 2)),), arrays=3)
    plan = plan_memory(
        token_bytes=10, layout=layout, max_length=8, page_tokens=4, block=4, slots=2,
        reserve_share=0.5, budget_bytes=5_000, places_bytes=1_000, state_bytes=100,
    )  # fmt: skip
    assert plan.page_bytes == 120 and plan.reserve == 1
    assert plan.pages == (5_000 - 1_000 - 3 * 100) // 120 and plan.kv_bytes == plan.pages * 120

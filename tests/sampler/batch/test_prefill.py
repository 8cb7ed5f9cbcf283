"""The arrays of a prefill: which tokens, from which requests, into which cells."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import SPEC

from jaxrl_async.sampler.batch.decoding import form_of
from jaxrl_async.sampler.batch.prefill import (
    Chunk,
    chunks_of,
    insert_args,
    leaders,
    plan_parts,
    slot_inserts,
)
from jaxrl_async.sampler.batch.sequence import LiveRequest, Prefilling
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.types import Request

pytestmark = pytest.mark.full

ENGINE = EngineSpec(model=SPEC, slots=4, max_length=32, pages=20, page_tokens=4)


def only_chunk(waiting: list[Prefilling], budget: int) -> Chunk:
    (chunk,) = chunks_of(plan_parts(waiting, budget), budget, ENGINE)
    return chunk


def prefilling(slot_index: int, tokens: int, pages: list[int], prefilled: int = 0) -> Prefilling:
    token_ids = np.arange(tokens, dtype=np.int32) + 100 * slot_index
    table = form_of(ENGINE).empty()
    table[0, : len(pages)] = pages
    request = Request(
        request_id=str(slot_index), token_ids=token_ids, max_new_tokens=8, key=(slot_index, 0)
    )
    return Prefilling(
        live=LiveRequest(request=request, max_new=8),
        slot_index=slot_index,
        order=slot_index,
        token_ids=token_ids,
        table=table,
        prefilled=prefilled,
        kv_version=0,
    )


def test_a_chunk_has_the_next_tokens_of_each_request_and_their_cells():
    first, second = prefilling(1, 10, [7, 8, 9], prefilled=4), prefilling(2, 5, [3, 4])
    chunk = only_chunk([first, second], 9)
    assert chunk.num_tokens == 9
    tokens = chunk.args.token_ids[:9]
    assert tokens.tolist() == [104, 105, 106, 107, 108, 109, 200, 201, 202]
    assert chunk.args.positions[:9].tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert chunk.cells.pages.tolist() == [[8] * 4 + [9] * 2 + [3] * 3 + [20] * 7]
    assert chunk.cells.offsets[:9].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    unpacked = chunk.args.token_ids[chunk.args.token_indices]
    assert unpacked[0, :6].tolist() == tokens[:6].tolist()
    assert unpacked.reshape(-1)[chunk.args.cell_indices[:9]].tolist() == tokens.tolist()
    assert chunk.args.tables.tolist()[:2] == [[[7]], [[3]]]
    assert chunk.advance() == [(0, first)] and second.prefilled == 3


def test_on_a_tpus_pages_a_prompt_goes_on_in_the_next_program():
    """Each is told where its tokens are written, and nothing is left for the insert to write."""
    engine = replace(ENGINE, ragged=True)
    first, second = prefilling(1, 4, [7]), prefilling(2, 32, [*range(8)], prefilled=4)
    chunks = []
    for chunk in chunks_of([(first, 4), (second, 16)], 8, engine):
        chunks.append(chunk)
        chunk.advance()
    assert [len(c.args.token_ids) for c in chunks] == [8, 8, 8]
    assert [[count for _, count in c.parts] for c in chunks] == [[4, 4], [8], [4]]
    assert chunks[0].args.cells.pages[0].tolist() == [7] * 4 + [1] * 4
    assert chunks[1].args.starts[0] == 8 and chunks[1].args.cells.pages[0].tolist() == [
        *([2] * 4), *([3] * 4)
    ]  # fmt: skip
    assert chunks[2].args.cells.pages[0].tolist() == [4] * 4 + [20] * 4
    assert chunks[2].args.tables.shape == (4, 1, 8), "rows and pages are of one number"
    assert all(c.unwritten.pages.shape == (1, 0) and c.unwritten.offsets.size == 0 for c in chunks)


def test_followers_take_their_leaders_logits_and_a_copy_of_its_last_page():
    leader, follower = prefilling(0, 6, [1, 2]), prefilling(3, 6, [1, 5])
    leader.followers.append(follower)
    assert leaders([leader, follower]) == [leader]
    chunk = only_chunk(leaders([leader, follower]), 100)
    (inserted,) = slot_inserts(chunk.advance(), ENGINE)
    args = insert_args(chunk.cells, inserted, ENGINE, seed=0)
    assert args.rows[:2].tolist() == [0, 0] and args.slots.tolist() == [0, 3, 4, 4]
    assert args.sources.tolist() == [2, 0, 0, 0] and args.targets.tolist() == [5, 20, 20, 20]
    assert (args.slot_params.keys[0] != args.slot_params.keys[1]).any()

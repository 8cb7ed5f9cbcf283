"""The arrays of a prefill: which tokens, from which requests, into which cells."""

import numpy as np
from tiny import SPEC

from jaxrl_async.sampler.batch.decoding import form_of
from jaxrl_async.sampler.batch.prefill import Chunk, chunks_of, insert_args, leaders, plan_parts
from jaxrl_async.sampler.batch.sequence import LiveRequest, Prefilling
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.types import Request

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


def test_followers_take_their_leaders_logits_and_a_copy_of_its_last_page():
    leader, follower = prefilling(0, 6, [1, 2]), prefilling(3, 6, [1, 5])
    leader.followers.append(follower)
    assert leaders([leader, follower]) == [leader]
    chunk = only_chunk(leaders([leader, follower]), 100)
    args = insert_args(chunk.cells, chunk.advance(), ENGINE, seed=0)
    assert args.rows[:2].tolist() == [0, 0] and args.slots.tolist() == [0, 3, 4, 4]
    assert args.sources.tolist() == [2, 0, 0, 0] and args.targets.tolist() == [5, 20, 20, 20]
    assert (args.slot_params.keys[0] != args.slot_params.keys[1]).any()

"""The ledger: every fate on its own line, there at once."""

import json

from jaxrl_async.buffer.ledger import Ledger


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_fate_can_be_read_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.write("admitted", group=0, version=3)
    assert lines(path) == [{"fate": "admitted", "group": 0, "version": 3}]
    ledger.close()


def test_a_second_ledger_appends_to_the_first(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for group in range(2):
        ledger = Ledger(path)
        ledger.write("admitted", group=group)
        ledger.close()
    assert [x["group"] for x in lines(path)] == [0, 1]


def test_after_close_and_without_a_path_nothing_is_kept_and_nothing_fails(tmp_path):
    path = tmp_path / "ledger.jsonl"
    closed = Ledger(path)
    closed.close()
    closed.close()
    for ledger in (closed, Ledger()):
        ledger.write("dropped", group=1)
    assert lines(path) == []

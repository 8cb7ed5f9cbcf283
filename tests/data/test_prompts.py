"""The prompt pipeline: order, shards, places, bad records, warm-start pairs."""

import json
import os
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_async.codec import dumps, loads
from jaxrl_async.config.rules import check_rules
from jaxrl_async.config.schema import AdditionSection, Config, DataSection, JsonlSection
from jaxrl_async.data import record_files
from jaxrl_async.data.addition import addition_tokenizer, worked_answer
from jaxrl_async.data.prompts import (
    FittingPairs,
    PromptStream,
    eval_prompts,
    make_prompts,
    prompt_of,
    warm_start_pairs,
)
from jaxrl_async.data.record_files import rows_of_file
from jaxrl_async.data.records import Record, final_answer, read_records
from jaxrl_async.data.tokenizer import character_tokenizer, load_tokenizer
from jaxrl_async.errors import ConfigError, DataError

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not (SHARED / "gsm8k").is_dir(), reason="the shared GSM8K data is not here"
)
TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 #?:")


def records(count):
    ids = np.zeros(1, np.int32)
    return [Record(token_ids=ids, text=str(i), reference="", answer="") for i in range(count)]


def jsonl(tmp_path, lines, **settings):
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
    )
    own = JsonlSection(path=str(path), **settings)
    return DataSection(max_prompt_tokens=64, jsonl=own)


def section(max_prompt_tokens=64, **settings):
    return DataSection(max_prompt_tokens=max_prompt_tokens, jsonl=JsonlSection(**settings))


def pairs_of(config, tokenizer=TOKENIZER):
    seed, row = config.run.seed, config.longest_example
    return warm_start_pairs(config.data, config.warm_start, tokenizer, seed=seed, max_length=row)


def question(i):
    return {"question": f"q{i}", "answer": f"so it is {i} #### {i}"}


def test_each_record_is_checked_before_the_first_prompt():
    seen = []
    PromptStream(records(20), 3, process_index=1, process_count=2, check=seen.append)
    assert [(p.prompt_id, p.position) for p in seen] == [(i, -1) for i in range(20)]


def test_each_pass_holds_every_record_once_in_another_order():
    stream = PromptStream(records(20), 3)
    first, second = ([p.prompt_id for p in islice(stream, 20)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second != list(range(20))


def test_the_same_seed_gives_the_same_stream_and_another_seed_another():
    one, two, other = (
        [p.prompt_id for p in islice(PromptStream(records(50), s), 80)] for s in (1, 1, 2)
    )
    assert one == two != other


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(count=st.integers(3, 40), processes=st.integers(1, 3), seed=st.integers(0, 5))
def test_processes_share_the_records_and_never_a_position(count, processes, seed):
    streams = [
        PromptStream(records(count), seed, process_index=i, process_count=processes)
        for i in range(processes)
    ]
    one_pass = [
        p for i, s in enumerate(streams) for p in islice(s, len(range(i, count, processes)))
    ]
    assert sorted(p.prompt_id for p in one_pass) == list(range(count))
    assert sorted(p.position for p in one_pass) == list(range(count))


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(taken=st.integers(0, 60))
def test_a_restored_stream_continues_where_it_was(taken):
    stream = PromptStream(records(20), 0)
    list(islice(stream, taken))
    again = PromptStream(records(20), 0)
    again.restore(json.loads(json.dumps(stream.state())))
    assert [(p.prompt_id, p.position) for p in islice(again, 30)] == [
        (p.prompt_id, p.position) for p in islice(stream, 30)
    ]


@pytest.mark.parametrize(
    "change", [{"seed": 9}, {"num_records": 3}, {"process_count": 2}, {"next": None}]
)
def test_the_state_of_another_stream_is_refused(change):
    stream = PromptStream(records(20), 0)
    with pytest.raises(DataError, match="of another stream"):
        stream.restore({**stream.state(), **change})


def test_the_state_before_an_earlier_draw_is_where_that_draw_was_made():
    stream = PromptStream(records(20), 0)
    taken = list(islice(stream, 9))
    again = PromptStream(records(20), 0)
    again.restore(stream.state(4))
    assert [p.position for p in islice(again, 5)] == [p.position for p in taken[4:]]


def test_too_few_records_for_the_processes_are_refused():
    with pytest.raises(DataError, match="cannot be sharded"):
        PromptStream(records(2), 0, process_index=2, process_count=3)


def test_addition_prompts_are_problems_with_their_sums():
    tokenizer = addition_tokenizer()
    data = DataSection(addition=AdditionSection(digits=3, eval_size=10))
    held = eval_prompts(data, tokenizer)
    train = list(islice(make_prompts(data, tokenizer, 0), 200))
    for prompt in (*held, *train):
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert sum(int(x) for x in prompt.text.rstrip("=").split("+")) == int(prompt.reference)
    assert len({p.text for p in held}) == 10
    assert not {p.text for p in held} & {p.text for p in train}
    assert not {p.position for p in held} & {p.position for p in train}


def test_the_last_records_are_held_out_and_the_others_are_trained_on(tmp_path):
    data = jsonl(tmp_path, [question(i) for i in range(10)], eval_size=3, answer_mark="#### ")
    assert [p.text for p in eval_prompts(data, TOKENIZER)] == ["q7", "q8", "q9"]
    train = islice(make_prompts(data, TOKENIZER, 0), 7)
    assert sorted((p.text, p.reference) for p in train) == [(f"q{i}", f"{i}") for i in range(7)]


@pytest.mark.parametrize(("records", "held"), [(2, 1), (19, 1), (39, 3), (640, 64), (700, 64)])
def test_a_tenth_of_the_records_is_held_out_unless_a_number_is_set(tmp_path, records, held):
    data = jsonl(tmp_path, [question(i) for i in range(records)])
    assert [p.text for p in eval_prompts(data, TOKENIZER)] == [
        f"q{i}" for i in range(records - held, records)
    ]
    train = {p.text for p in islice(make_prompts(data, TOKENIZER, 0), records - held)}
    assert train == {f"q{i}" for i in range(records - held)}


def test_at_most_64_records_of_a_file_for_the_evaluation_are_used(tmp_path):
    held = tmp_path / "e.jsonl"
    held.write_text("\n".join(json.dumps(question(i)) for i in range(70)))
    data = jsonl(tmp_path, [question(100)], eval_path=str(held))
    assert [p.text for p in eval_prompts(data, TOKENIZER)] == [f"q{i}" for i in range(64)]


def test_a_file_of_its_own_for_the_evaluation_leaves_all_records_to_training(tmp_path):
    held = tmp_path / "e.jsonl"
    held.write_text("\n".join(json.dumps(question(i)) for i in range(50, 59)))
    data = jsonl(tmp_path, [question(i) for i in range(4)], eval_path=str(held), eval_size=2)
    assert [p.text for p in eval_prompts(data, TOKENIZER)] == ["q50", "q51"]
    assert len({p.text for p in islice(make_prompts(data, TOKENIZER, 0), 4)}) == 4


BAD = [
    (b'{"question": "\xff", "answer": "1"}', "not UTF-8"),
    (b'{"question": ', "not a JSON object"),
    (b"[" * 100_000, "not a JSON object"),
    (b"[1]", "not a JSON object"),
    ({"question": "q"}, "a field is missing"),
    ({"question": "q", "answer": None}, "a field is missing"),
    (b'{"question": "q", "answer": [NaN]}', "a field is missing"),
    ({"question": "q", "answer": ["\ud800"]}, "a field is missing"),
    (b'{"question": "q", "answer": "1", "answer": "2"}', "a key appears twice"),
    (b'{"question": "q", "answer": "1", "x": [{"a": 1, "a": 1}]}', "a key appears twice"),
    (b'{"question": "q", "answer": "1", "x": ' + b"[" * 64 + b"]" * 64 + b"}", "lists and objects"),
    (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "not a JSON object"),
    ({"question": "q\ud800", "answer": "1"}, "a field is missing"),
    ({"question": "", "answer": "1"}, "the prompt has no tokens"),
    (
        {"question": "q" * 65, "answer": "1"},
        "the prompt is too long: 65 tokens, but only 64 are allowed",
    ),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_record_is_skipped_and_logged_with_its_line(tmp_path, caplog, line, reason):
    data = jsonl(tmp_path, [question(0), line, question(2)], eval_size=1, max_bad_share=0.4)
    assert next(make_prompts(data, TOKENIZER, 0)).text == "q0"
    assert f"line 2: skipped: {reason}" in caplog.text
    assert "1 of 3 records skipped" in caplog.text


def test_too_large_a_share_of_bad_records_is_refused(tmp_path):
    data = jsonl(tmp_path, [question(0), *(line for line, _ in BAD), question(2)], eval_size=1)
    with pytest.raises(
        DataError, match=r"15 of 17 records cannot be used .* line 2: not UTF-8; line 3"
    ):
        make_prompts(data, TOKENIZER, 0)


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = "\r\n".join(["", json.dumps(question(1)), " ", json.dumps(question(2)), ""])
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    data = DataSection(jsonl=JsonlSection(path=str(path), eval_size=1))
    assert [p.text for p in eval_prompts(data, TOKENIZER)] == ["q2"]


def test_empty_missing_and_too_small_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="empty"):
        make_prompts(jsonl(tmp_path, []), TOKENIZER, 0)
    with pytest.raises(DataError, match="cannot be read"):
        make_prompts(DataSection(jsonl=JsonlSection(path=str(tmp_path / "no"))), TOKENIZER, 0)
    with pytest.raises(DataError, match="none is left to train on"):
        make_prompts(jsonl(tmp_path, [question(0)], eval_size=1), TOKENIZER, 0)
    with pytest.raises(DataError, match="1 usable record, but 1 is held out"):
        make_prompts(jsonl(tmp_path, [question(0)]), TOKENIZER, 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "question,answer\nq,a\n", r"pandas\.read_csv"),
        ("t.json", '[{"question": "q", "answer": "a"}]', "one object per line"),
    ],
)
def test_a_table_and_a_list_are_refused_with_what_reads_them(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        list(rows_of_file(tmp_path / name))


def test_a_wrong_template_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="template"):
        make_prompts(jsonl(tmp_path, [question(0)], template="{x}"), TOKENIZER, 0)


def test_the_final_answer_stands_after_the_mark():
    assert final_answer("2+2=4\n#### 4 ", "#### ") == "4"
    assert final_answer(" four ", "#### ") == "four"
    assert final_answer("#### Tests\n x ", None) == "#### Tests\n x"


def test_a_pair_as_long_as_a_row_is_taken_and_a_longer_one_left_out():
    def record(answer):
        ids = np.arange(3, dtype=np.int32)
        return Record(token_ids=ids, text="", reference="", answer=answer)

    both = [record("aaaa"), record("aaaaa")]
    short, long = sorted({len(i) for i, _ in islice(FittingPairs(both, 0, TOKENIZER, 99), 6)})
    assert long == short + 1
    pairs = FittingPairs(both, 0, TOKENIZER, short)
    assert {len(ids) for ids, _ in islice(pairs, 6)} == {short}
    assert pairs.state()["left_out"] > 0


def test_addition_pairs_teach_the_worked_answer_and_the_end():
    tokenizer = addition_tokenizer()
    for ids, mask in islice(pairs_of(Config(), tokenizer), 20):
        assert mask.dtype == bool and ids.dtype == np.int32
        a, b = (int(x) for x in tokenizer.decode(ids[~mask]).rstrip("=").split("+"))
        assert tokenizer.decode(ids[mask]) == worked_answer(a, b)
        assert ids[-1] == tokenizer.eos_ids[0] and mask[-1]
        assert (np.diff(mask.astype(int)) >= 0).all()


def test_jsonl_pairs_never_hold_a_held_out_record_and_fit_a_row(tmp_path):
    long = {"question": "long", "answer": "x" * 200 + "#### 1"}
    config = Config(
        data=jsonl(tmp_path, [question(0), long, question(2), question(3)], eval_size=1)
    )
    texts = {TOKENIZER.decode(ids) for ids, _ in islice(pairs_of(config), 20)}
    assert texts == {"q0so it is 0 #### 0", "q2so it is 2 #### 2"}


def test_pairs_from_a_file_of_their_own(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps(question(5)))
    config = Config(warm_start={"path": str(path), "steps": 1})
    ids, _ = next(pairs_of(config))
    assert TOKENIZER.decode(ids) == "q5so it is 5 #### 5"


def test_a_warm_start_in_which_no_pair_fits_is_refused(tmp_path):
    long = {"question": "long", "answer": "x" * 200}
    config = Config(data=jsonl(tmp_path, [long, long, long], eval_size=1))
    with pytest.raises(DataError, match="no pair of the warm start fits"):
        next(pairs_of(config))


@pytest.mark.full
@needs_shared
def test_gsm8k_goes_through_the_pipeline_with_a_real_tokenizer():
    tokenizer = load_tokenizer(SHARED / "gpt2_tokenizer")
    data = DataSection(
        max_prompt_tokens=320,
        jsonl=JsonlSection(
            path=str(SHARED / "gsm8k" / "test.jsonl"),
            template="Q: {prompt}\nA:",
            answer_mark="#### ",
        ),
    )
    prompts = list(islice(make_prompts(data, tokenizer, 0), 1319 - 64))
    assert len({p.prompt_id for p in prompts}) == 1319 - 64
    assert all(tokenizer.decode(p.token_ids) == f"Q: {p.text}\nA:" for p in prompts[:50])
    first_held = json.loads((SHARED / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()[-64])
    held = eval_prompts(data, tokenizer)[0]
    assert held.text == first_held["question"]
    assert first_held["answer"].endswith(f"#### {held.reference}")


# ---- hostile files


def test_a_gigantic_line_is_skipped_and_the_lines_after_it_are_read(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 64)
    path = tmp_path / "d.jsonl"
    good = json.dumps({"question": "a", "answer": "b"})
    path.write_bytes(f"{'x' * 1000}\n{good}\n{'y' * 64}\n{' ' * 65}\n{good}z\n{'z' * 65}".encode())
    found = read_records(path, section(max_bad_share=0.9), TOKENIZER)
    assert [record.text for record in found] == ["a"]
    messages = [r.getMessage() for r in caplog.records if "skipped:" in r.getMessage()]
    assert [line.split(": ")[0].rpartition(" ")[2] for line in messages[:-1]] == [
        "1",
        "3",
        "4",
        "5",
        "6",
    ]
    assert "3 x a line of more than 64 MiB, 2 x not a JSON object" in messages[-1]


def test_a_gigantic_line_costs_no_more_memory_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 2**20)
    path = tmp_path / "d.jsonl"
    with path.open("wb") as file:
        file.truncate(2**26)  # NUL bytes that take no room on the disk
        file.seek(2**26)
        file.write(b'\n{"question": "a", "answer": "b"}\n')
    tracemalloc.start()
    read_records(path, section(max_bad_share=0.5), TOKENIZER)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_copies_of_a_record_are_kept_and_logged(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    lines = [json.dumps({"question": q, "answer": "b"}) for q in "abaac"]
    path.write_text("\n".join(lines))
    assert len(read_records(path, section(), TOKENIZER)) == 5
    assert "2 of 5 records are duplicates of earlier ones" in caplog.text


@pytest.mark.parametrize("name", [".", "none", "pipe", "a" * 300, "a\0b"])
def test_what_is_no_file_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"Give (a file of JSON lines|the folder of one split)"):
        read_records(tmp_path / name, section(), TOKENIZER)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
LINES = st.one_of(
    st.binary(max_size=30),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries({}, optional={"question": JSON, "answer": JSON, "x": JSON}).map(
        lambda record: json.dumps(record).encode()
    ),
    st.sampled_from([b'{"question": "' + b"a" * 99 + b'", "answer": "1"}', b"[" * 9999, b"1e999",
                     b'{"question": "\\ud800", "answer": 1}',
                     b'{"question": "\\u0000a", "answer": 1}',
                     b"9" * 5000, b"x" * 300]),
)  # fmt: skip


@pytest.mark.full
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(LINES, max_size=6).map(b"\n".join) | st.binary(max_size=200),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_fuzz_any_bytes_are_records_or_a_data_error(tmp_path, monkeypatch, content, mark, share):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 200)
    path = tmp_path / "d.jsonl"
    path.write_bytes(mark + content)
    try:
        found = read_records(path, section(max_prompt_tokens=16, max_bad_share=share), TOKENIZER)
    except DataError as error:
        assert str(path) in str(error) and len(str(error)) < 1000
        return
    assert found and all(0 < len(record.token_ids) <= 16 for record in found)
    num_lines = sum(bool(line.strip()) for line in content.split(b"\n"))
    assert len(found) >= (1 - share) * num_lines


# ---- columns, and records with other answers than text


def test_a_prompt_carries_its_whole_record_through_a_checkpoint(tmp_path):
    record = {
        "question": "q",
        "answer": ["4", "four"],
        "tests": {"!": "tuple", "items": [1, None, {"x": 1.5}], "": [[]]},
        "id": 10**30,
        "half": "\ud800",
        "flag": True,
    }
    data = jsonl(tmp_path, [record, question(1)], eval_size=1)
    (prompt,) = loads(dumps((next(make_prompts(data, TOKENIZER, 0)),)))
    assert prompt.columns == record
    assert prompt.reference == '["4", "four"]'


@pytest.mark.full
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(columns=st.dictionaries(st.text(max_size=3) | st.just("!"), JSON, max_size=3))
def test_fuzz_any_columns_come_back_from_a_checkpoint(tmp_path, columns):
    record = {**columns, "question": "q", "answer": "a"}
    (found,) = read_records(one_line(tmp_path, record), section(), TOKENIZER)
    again = loads(dumps(prompt_of(found, 0, 0)))
    assert json.dumps(again.columns, sort_keys=True) == json.dumps(record, sort_keys=True)


def one_line(tmp_path, record):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (18, "18"),
        (True, "true"),
        ({"cases": [[1, "é"]]}, '{"cases": [[1, "é"]]}'),
        (" def f():\n#### Tests\nassert f() ", "def f():\n#### Tests\nassert f()"),
    ],
)
def test_a_reference_is_the_whole_answer_and_json_where_that_is_no_text(
    tmp_path, answer, reference
):
    path = one_line(tmp_path, {"question": "q", "answer": answer})
    (found,) = read_records(path, section(), TOKENIZER)
    assert found.reference == reference


def test_answers_without_the_mark_are_logged(tmp_path, caplog):
    data = jsonl(tmp_path, [question(0), {"question": "q", "answer": "7"}, question(2)],
                 answer_mark="#### ", eval_size=1)  # fmt: skip
    assert {p.reference for p in islice(make_prompts(data, TOKENIZER, 0), 2)} == {"0", "7"}
    assert "1 of 3 answers have no data.jsonl.answer_mark '#### '" in caplog.text


def test_records_need_no_answers_where_the_run_says_that_they_have_none(tmp_path):
    data = jsonl(tmp_path, [{"question": "a"}, {"question": "b", "answer": 1}], eval_size=1,
                 answer_field=None)  # fmt: skip
    assert next(make_prompts(data, TOKENIZER, 0)).reference == ""
    assert eval_prompts(data, TOKENIZER)[0].reference == ""


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"job": "sft"}},
        {"warm_start": {"steps": 1}},
        {"algorithm": {"supervised_coefficient": 0.1}},
        {"reward": {"function": "gsm8k"}},
        {"reward": {"function": "exact"}},
    ],
    ids=str,
)
def test_a_run_that_asks_for_answers_is_refused_where_there_are_none(tmp_path, change):
    data = {"jsonl": {"path": "x", "answer_field": None}}
    own = {"reward": {"function": "mine.py:f"}}
    check_rules(Config(data=data, **own))
    check_rules(Config(data=data, run={"job": "preference"}))
    with pytest.raises(ConfigError, match=r"answer_field=null"):
        check_rules(Config(**({"data": data} | own | change)))


def test_an_answer_that_is_no_text_cannot_be_imitated(tmp_path, caplog):
    listed = {"question": "q", "answer": ["1"]}
    data = jsonl(tmp_path, [listed, question(1), question(2)], eval_size=1, max_bad_share=0.5)
    assert len({p.text for p in islice(make_prompts(data, TOKENIZER, 0), 2)}) == 2
    assert "skipped" not in caplog.text
    pairs = islice(pairs_of(Config(data=data)), 3)
    assert {TOKENIZER.decode(ids) for ids, _ in pairs} == {"q1so it is 1 #### 1"}
    assert "line 1: skipped: a field is missing" in caplog.text


@pytest.mark.full
def test_byte_order_marks_inside_of_joined_files_do_no_harm(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    line = b"\xef\xbb\xbf" + json.dumps(question(1)).encode() + b"\r\n"
    path.write_bytes(line + line)
    assert len(read_records(path, section(), TOKENIZER)) == 2
    assert "skipped" not in caplog.text

"""Records as other programs write them: each is read as it is meant, or refused by name."""

import asyncio
import bz2
import datetime
import gzip
import json
import lzma

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl_async.api.arguments import _records
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config, DataSection, JsonlSection
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.chat_formats.chat_messages import as_messages, tools_in
from jaxrl_async.data.examples import ExampleStream
from jaxrl_async.data.preferences import read_preferences
from jaxrl_async.data.prompts import SAMPLED, PromptStream, sampled_records
from jaxrl_async.data.records import digits_of, read_records
from jaxrl_async.data.tokenizer import character_tokenizer, chat_tokenizer
from jaxrl_async.errors import DataError, RolloutError
from jaxrl_async.rollout.chat_env import ChatEnvs, ChatLimits
from jaxrl_async.scorers.graders import check_answers, try_references
from jaxrl_async.scorers.rewards import REWARDS
from jaxrl_async.tasks.task import Environment, Task, conversation_of
from jaxrl_async.tasks.task_source import TaskData
from jaxrl_async.types import Prompt

TOKENIZER = chat_tokenizer()
BARE = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=? :")
ASKED = [{"role": "user", "content": "1+2?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "zq",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
FLAT = {"name": "zq", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}


def section(**jsonl):
    return DataSection(
        max_prompt_tokens=jsonl.pop("max_prompt_tokens", 500),
        jsonl=JsonlSection(path="x", **{"max_bad_share": 0.5, **jsonl}),
    )


def read(tmp_path, content, name="d.jsonl", tokenizer=TOKENIZER, graded=False, **jsonl):
    path = tmp_path / name
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in content))
    return read_records(path, section(**jsonl), tokenizer, graded=graded)


# ---- tools


@pytest.mark.parametrize(
    "given", [[TOOL], [FLAT], json.dumps([TOOL]), json.dumps([FLAT])], ids=lambda g: str(g)[:12]
)
@pytest.mark.parametrize("column", ["tools", "tool_defs"])
def test_the_tools_of_a_record_are_shown(tmp_path, given, column):
    (record,) = read(tmp_path, [{"messages": ASKED, "answer": "3", column: given}])
    assert TOKENIZER.decode_all(record.token_ids).startswith("<tools>zq(a)</tools>")


def test_a_call_of_a_table_is_taught_with_its_own_arguments(tmp_path):
    """A table gives each call the arguments of all others, with null."""

    def turn(**arguments):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]

    def taught(path):
        for record in read_records(path, section(), TOKENIZER, taught=True):
            text = TOKENIZER.decode_all(record.answer_ids)
            yield json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])

    written = [{"a": 1, "deep": [{"x": 1}]}, {"b": "x", "deep": [{"y": {"z": 2}}]}]
    table = pa.table({"messages": [turn(**one) for one in written], "answer": ["1", "2"]})
    pq.write_table(table, tmp_path / "d.parquet")
    assert [call["arguments"] for call in taught(tmp_path / "d.parquet")] == written
    for given in (table, table.to_pandas()):
        for record, right in zip(_records(given, "data"), written, strict=True):
            (call,) = record["messages"][1]["tool_calls"]
            assert call["function"]["arguments"] == right
    own = [{"messages": turn(a=None), "answer": "1"}]
    (tmp_path / "d.jsonl").write_text(json.dumps(own[0]))
    (call,) = taught(tmp_path / "d.jsonl")
    assert call["arguments"] == {"a": None}, "somebody wrote it"
    assert _records(own, "data") == own


def test_tools_of_a_table_are_shown_without_its_empty_keys(tmp_path):
    two = [TOOL, {"type": "function", "function": {"name": "b", "parameters": {"properties": {}}}}]
    table = pa.table({"messages": [ASKED], "answer": ["3"], "tools": [two]})
    (record,) = read(tmp_path, table, "d.parquet")
    assert TOKENIZER.decode_all(record.token_ids).startswith("<tools>zq(a), b()</tools>")


@pytest.mark.parametrize("given", [None, [], "", "[]", "null"])
def test_a_record_without_tools_shows_none(tmp_path, given):
    (record,) = read(tmp_path, [{"messages": ASKED, "answer": "3", "tools": given}])
    assert "<tools>" not in TOKENIZER.decode_all(record.token_ids)


@pytest.mark.full
@pytest.mark.parametrize("given", ["a hammer", ["hammer"], [{"x": 1}], {"zq": 1}, 3])
def test_what_is_no_tool_is_refused_by_the_name_of_its_column(tmp_path, given):
    record = {"messages": ASKED, "answer": "3", "tools": given}
    with pytest.raises(DataError, match="'tools'"):
        read(tmp_path, [record])
    assert len(read(tmp_path, [record], tools_field=None)) == 1


def test_tools_that_nothing_shows_are_refused(tmp_path):
    question = {"question": "1+2?", "answer": "3", "tools": [TOOL]}
    with pytest.raises(DataError, match="without a chat format"):
        read(tmp_path, [question], tokenizer=BARE)
    assert len(read(tmp_path, [{**question, "tools": ["hammer"]}], tokenizer=BARE)) == 1
    template = tmp_path / "bare.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}<assistant>")
    data = section().model_copy(update={"chat_format": str(template)})
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"messages": ASKED, "answer": "3", "tools": [TOOL]}))
    with pytest.raises(DataError, match="the chat format omits them"):
        read_records(path, data, TOKENIZER)


def test_preferences_and_demonstrations_show_tools_too(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": ASKED, "chosen": "3", "rejected": "4", "tools": [TOOL]}))
    (pair,) = read_preferences(path, section(), TOKENIZER, max_tokens=500)
    assert TOKENIZER.decode_all(pair.prompt_ids).startswith("<tools>zq(a)</tools>")


def test_a_tool_without_a_name_is_named_by_its_index():
    with pytest.raises(DataError, match="tool 1 is"):
        tools_in([TOOL, {"function": {}}])


# ---- messages


def test_messages_as_json_text_are_messages(tmp_path):
    text = json.dumps(ASKED)
    records = read(tmp_path, [{"messages": text, "answer": "3"}, {"question": text, "answer": "3"}])
    right = TOKENIZER.decode_all(read(tmp_path, [{"messages": ASKED, "answer": "3"}])[0].token_ids)
    assert [TOKENIZER.decode_all(r.token_ids) for r in records] == [right, right]
    assert conversation_of({"messages": text}) == ASKED
    with pytest.raises(DataError, match="not a conversation in JSON"):
        read(tmp_path, [{"messages": "1+2?", "answer": "3"}])
    (question,) = read(tmp_path, [{"question": "[1, 2]", "answer": "3"}])
    assert question.text == "[1, 2]" == as_messages("[1, 2]")


def test_a_conversation_of_ultrafeedbacks_layout_is_a_pair(tmp_path):
    def turn(text):
        return [*ASKED, {"role": "assistant", "content": text}]

    def pairs(prompt):
        path = tmp_path / "p.jsonl"
        record = {"prompt": prompt, "chosen": turn("3"), "rejected": json.dumps(turn("4"))}
        path.write_text(json.dumps(record))
        return read_preferences(path, section(), TOKENIZER, max_tokens=500)

    (right,) = pairs(None)
    for prompt in ("1+2?", " 1+2?\n", ASKED):
        (pair,) = pairs(prompt)
        assert np.array_equal(pair.prompt_ids, right.prompt_ids)
        assert TOKENIZER.decode(pair.chosen_ids) == "3"
    with pytest.raises(DataError, match="does not begin with `prompt`"):
        pairs("2+2?")


@pytest.mark.parametrize("labels", [(True, False), (1, 0), (1.0, 0.0)])
def test_labels_may_be_numbers(tmp_path, labels):
    path = tmp_path / "p.jsonl"
    records = [{"prompt": "a", "completion": "b", "label": label} for label in labels]
    path.write_text("\n".join(map(json.dumps, records)))
    good, bad = read_preferences(path, section(), BARE, max_tokens=50)
    assert len(good.chosen_ids) and not len(good.rejected_ids)
    assert len(bad.rejected_ids) and not len(bad.chosen_ids)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": 2}, "the label is '2'"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "the label is 'yes'"),
        ({"prompt": "a", "chosen": "b"}, "expected 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "expected 'prompt'"),
    ],
)
def test_a_pair_that_lacks_something_says_what(tmp_path, record, message):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        read_preferences(path, section(), BARE, max_tokens=50)


@pytest.mark.parametrize("label", [1, 0, None, "of the pair"])
def test_a_pair_may_have_a_label_of_its_own(tmp_path, label):
    path = tmp_path / "p.jsonl"
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": None, "label": label}
    path.write_text(json.dumps(pair) + "\n" + json.dumps({**pair, "prompt": "d"}))
    for pair in read_preferences(path, section(), BARE, max_tokens=50):
        assert BARE.decode(pair.chosen_ids) == "b" and BARE.decode(pair.rejected_ids) == "c"


# ---- numbers and answers


@pytest.mark.full
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.0, "5"),
        (-5.0, "-5"),
        (-0.0, "0"),
        (1e16, "10000000000000000"),
        (1e-5, "0.00001"),
        (2.5, "2.5"),
    ],
)
def test_a_float_is_the_number_that_people_write(tmp_path, value, text):
    assert digits_of(value) == text
    (record,) = read(tmp_path, [{"question": "a", "answer": value}])
    assert (record.reference, record.answer) == (text, text)


def test_whole_numbers_of_a_data_frame_stay_whole_next_to_an_empty_cell():
    frame = pd.DataFrame({"question": ["a", "b"], "answer": [5, None], "share": [0.5, None]})
    assert _records(frame, "data") == [
        {"question": "a", "answer": 5, "share": 0.5},
        {"question": "b", "answer": None, "share": None},
    ]
    assert isinstance(_records(frame, "data")[0]["answer"], int)


def test_a_record_with_an_empty_answer_is_bad_where_a_grader_compares_with_it(tmp_path):
    records = [{"question": "a", "answer": "1"}, {"question": "b", "answer": " "}]
    assert len(read(tmp_path, records)) == 2
    assert [r.text for r in read(tmp_path, records, graded=True)] == ["a"]
    with pytest.raises(DataError, match="the answer is empty"):
        read(tmp_path, records, graded=True, max_bad_share=0.1)


def test_empty_answers_of_a_task_are_counted_before_the_run(caplog):
    check_answers(["1", "2"], 0.0)
    check_answers(["1"] * 99 + [""], 0.01)
    assert "1 of 100 records have an empty answer" in caplog.text
    with pytest.raises(DataError, match=r"2 of 100 .* number 98 is one"):
        check_answers(["1"] * 98 + ["", " "], 0.01)


def test_each_grader_says_which_references_it_cannot_read(caplog):
    references = ["18", "1/2", "1/2", "x", ""]
    try_references({"gsm8k": REWARDS["gsm8k"], "exact": REWARDS["exact"]}, references)
    (warning,) = caplog.messages
    assert "'gsm8k' cannot read 3 of 4 references, such as '1/2', 'x'" in warning


# ---- files


def test_a_long_line_is_read(tmp_path):
    records = [{"question": "a", "answer": "1", "tests": ["x" * 3_000_000]}]
    assert len(read(tmp_path, records)) == 1


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_file_is_read(tmp_path, pack):
    packed = pack(b'{"question": "a", "answer": "1"}\n' * 3)
    assert len(read(tmp_path, packed, "d.jsonl.x")) == 3
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path, packed[: len(packed) // 2], "d.jsonl.x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a"}'.encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04abc", "a zip archive"),
        (b"\x28\xb5\x2f\xfdabc", "compressed with zstd"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_its_kind(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", b' [{"question": "a"}]', "a list of records"),
        ("d.json", b'{\n  "question": "a",\n  "answer": "1"\n}\n', "object on several lines"),
        ("d.json", b"\xef\xbb\xbf{\r\n}", "object on several lines"),
        ("d.csv", b"question,answer\na,1\n", r"pandas\.read_csv"),
        ("d.jsonl", b"SQLite format 3", "a database"),
    ],
)
def test_a_packed_file_is_refused_by_what_it_holds(tmp_path, pack, name, content, message):
    ending = {gzip.compress: ".gz", bz2.compress: ".bz2", lzma.compress: ".xz"}.get(pack, "")
    with pytest.raises(DataError, match=message):
        read(tmp_path, pack(content), name + ending)


def test_json_lines_may_be_named_json(tmp_path):
    assert len(read(tmp_path, b'\n{"question": "a", "answer": "1"}\n', "d.json")) == 1


@pytest.mark.parametrize("name", ["d.PARQUET", "d.parquet", "d", "d.jsonl"])
def test_parquet_is_known_by_its_first_bytes(tmp_path, name):
    assert len(read(tmp_path, pa.table({"question": ["a"], "answer": ["1"]}), name)) == 1


def test_columns_of_bytes_are_left_out_and_named_once(tmp_path, caplog):
    table = pa.table(
        {
            "question": ["a", "b"],
            "answer": ["1", "2"],
            "image": [b"x", b"y"],
            "nested": [{"bytes": b"x", "path": "p"}] * 2,
            "took": pa.array([1, 2], pa.duration("s")),
        }
    )
    records = read(tmp_path, table, "d.parquet")
    assert [set(r.columns) for r in records] == [{"question", "answer"}] * 2
    for name in ("image", "nested", "took"):
        assert sum(f"the column {name!r} is dropped" in m for m in caplog.messages) == 1


def test_a_column_of_bytes_is_left_out_of_all_records(tmp_path):
    """Also of those whose cell is empty."""
    some = pa.array([None, b"x"], pa.binary())
    lists = pa.array([[], [{"bytes": b"x"}]], pa.list_(pa.struct({"bytes": pa.large_binary()})))
    texts = pa.array(["binary", None]).dictionary_encode()
    table = {"question": ["a", "b"], "answer": ["1", "2"], "image": some, "images": lists}
    for record in read(tmp_path, pa.table(table | {"kind": texts}), "d.parquet"):
        assert set(record.columns) == {"question", "answer", "kind"}


def test_a_data_frame_of_images_is_read_without_them():
    """Pandas holds a list of a parquet file as an array of dicts."""
    images = [np.array([{"bytes": b"x", "path": None}], object), np.array([], object)]
    frame = pd.DataFrame({"question": ["a", "b"], "images": images, "n": [np.ones(2)] * 2})
    assert [set(row) for row in _records(frame, "data")] == [{"question", "n"}] * 2


def test_columns_of_bytes_of_python_objects_are_left_out_too(caplog):
    rows = [{"question": "a", "image": {"bytes": b"x"}, "took": datetime.timedelta(1)}]
    for given in (rows, pd.DataFrame(rows), pa.Table.from_pylist(rows)):
        caplog.clear()
        assert _records(given, "data") == [{"question": "a"}]
        assert "left out the columns 'image', 'took'" in caplog.text
    assert _records(rows, "data", plain=False) == rows


def test_two_columns_of_one_name_are_refused(tmp_path):
    names = ["question", "answer", "answer"]
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["1"]), pa.array(["2"])], names)
    for given in (table, table.to_pandas()):
        with pytest.raises(DataError, match="named 'answer'"):
            _records(given, "data")
    with pytest.raises(DataError, match="2 columns are named 'answer'"):
        read(tmp_path, table, "d.parquet")


# ---- the longest prompt


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"sampler": {"max_length": 512, "max_new_tokens": 100}}, 412),
        ({"sampler": {"max_length": 512}}, 448),
        ({"sampler": {"max_length": 64}}, 32),
        ({"sampler": {"max_length": 64}, "data": {"max_prompt_tokens": 7}}, 7),
        ({"sampler": {"max_length": 64}, "run": {"job": "sft"}}, 63),
        ({"trainer": {"row_length": 96}, "run": {"job": "preference"}}, 95),
    ],
)
def test_the_longest_prompt_is_what_the_lengths_leave(settings, limit):
    config = Config.model_validate(settings)
    assert config.prompt_limit == config.limited_data.max_prompt_tokens == limit


def test_a_short_max_length_is_not_refused_for_a_setting_that_was_not_written():
    assert load({"sampler": {"max_length": 48, "max_new_tokens": 16}}).prompt_limit == 32


def test_a_prompt_that_is_too_long_says_how_long_it_is(tmp_path):
    with pytest.raises(
        DataError, match=r"10 tokens, but only 4 are allowed.*raise data.max_prompt"
    ) as e:
        read(tmp_path, [{"question": "a" * 10, "answer": "1"}], tokenizer=BARE, max_prompt_tokens=4)
    assert "answer_field" not in str(e.value), "names what mends it alone"


# ---- a digest of the records


def test_a_stream_is_not_restored_over_other_records(tmp_path):
    def stream(*answers):
        records = [{"question": f"{i}+1?", "answer": a} for i, a in enumerate(answers)]
        return PromptStream(read(tmp_path, records), seed=1)

    state = stream("1", "2", "3").state()
    stream("1", "2", "3").restore(state)
    with pytest.raises(DataError, match="records_digest"):
        stream("1", "5", "3").restore(state)
    del state["records_digest"]  # of a checkpoint of before
    stream("1", "5", "3").restore(state)


def test_a_stream_of_examples_is_not_restored_over_others():
    def stream(last):
        arrays = [(np.arange(3), np.ones(3, bool)), (np.array([1, last]), np.ones(2, bool))]
        return ExampleStream(arrays, seed=1)

    stream(2).restore(stream(2).state())
    with pytest.raises(DataError, match="records_digest"):
        stream(3).restore(stream(2).state())


def test_records_that_are_made_on_demand_are_looked_at_in_part():
    class Made:
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            return index

    found = list(sampled_records(Made()))
    assert len(found) == SAMPLED and found[0] == 0 and found[-1] == 10**6 - 1
    assert list(sampled_records(list(range(1000)))) == list(range(1000))


# ---- tools of a task's records


def opened(columns, chat_format_name="auto", **task):
    chat = chat_format(TOKENIZER, None, chat_format_name)
    ids = np.zeros(0, np.int32)
    prompt = Prompt(
        prompt_id=0, position=0, token_ids=ids, text="1+2?", reference="3", columns=columns
    )
    env = ChatEnvs(Task(**task), chat, ChatLimits())(prompt)
    return TOKENIZER.decode_all(asyncio.run(env.open(prompt)))


def test_the_tools_of_a_tasks_record_are_shown_where_no_environment_plays(tmp_path):
    columns = {"messages": ASKED, "answer": "3", "tools": json.dumps([TOOL])}
    assert opened(columns).startswith("<tools>zq(a)</tools>")
    assert opened({**columns, "tools": None}) == opened({"messages": ASKED})
    with pytest.raises(RolloutError, match="the column 'tools'"):
        opened({**columns, "tools": ["hammer"]})
    template = tmp_path / "bare.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}<assistant>")
    with pytest.raises(RolloutError, match="does not show the tools"):
        opened(columns, str(template))

    class Own(Environment):
        """Has a column of its own called tools."""

    assert "<tools>" not in opened({**columns, "tools": ["hammer"]}, environment=Own)


def test_worked_conversations_are_taught_with_their_tools():
    worked = [*ASKED, {"role": "assistant", "content": "3"}]
    chat = chat_format(TOKENIZER, None, "auto")
    task = Task(records=[{"worked": json.dumps(worked), "tools": [FLAT]}] * 2)
    data = TaskData(task=task, chat=chat, tools=())
    token_ids, mask = data.source("train", taught=True)[0].worked
    assert TOKENIZER.decode_all(token_ids).startswith("<tools>zq(a)</tools>")
    assert TOKENIZER.decode(token_ids[mask]) == "3"

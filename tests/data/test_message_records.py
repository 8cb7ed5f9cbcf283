"""Records of chat messages: from JSON lines, parquet, saved data sets and Python objects."""

import datetime
import decimal
import importlib
import json

import pytest
from chat_tokenizers import qwen3_tokenizer

from jaxrl_async.codec import dumps, loads
from jaxrl_async.config.schema import DataSection, JsonlSection, WarmStartSection
from jaxrl_async.data import record_files
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.examples import demonstrations
from jaxrl_async.data.preferences import read_preferences
from jaxrl_async.data.prompts import eval_prompts, make_prompts, prompt_of, warm_start_pairs
from jaxrl_async.data.records import read_records
from jaxrl_async.data.tokenizer import character_tokenizer, chat_tokenizer
from jaxrl_async.errors import ConfigError, DataError, MissingExtraError

TOKENIZER = chat_tokenizer()
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1+2?"}
REPLY = {"role": "assistant", "content": "It is #### 3"}
AGAIN = {"role": "user", "content": "2+2?"}


def section(path="", *, max_prompt_tokens=200, **settings):
    names = JsonlSection.model_fields.keys()
    of_file = {k: v for k, v in settings.items() if k in names}
    rest = {k: v for k, v in settings.items() if k not in names}
    return DataSection(
        max_prompt_tokens=max_prompt_tokens,
        jsonl=JsonlSection(path=str(path), eval_size=1, **of_file),
        **rest,
    )


def lines(tmp_path, *records):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def shown(ids):
    return TOKENIZER.decode_all(ids)


def test_messages_are_a_prompt_and_a_last_answer_is_the_reference(tmp_path):
    path = lines(
        tmp_path,
        {"messages": [SYSTEM, USER, REPLY, AGAIN], "answer": "4", "level": 3},
        {"messages": [USER, REPLY]},
        {"question": [AGAIN], "answer": "4"},
        {"question": "2+2?", "answer": "4", "messages": "not looked at"},
    )
    first, second, third, fourth = read_records(path, section(answer_mark="####"), TOKENIZER)
    assert shown(first.token_ids) == (
        "<system>Be brief.<eos><user>1+2?<eos><assistant>It is #### 3<eos>"
        "<user>2+2?<eos><assistant>"
    )
    assert first.messages == (SYSTEM, USER, REPLY, AGAIN)
    assert (first.text, first.reference, first.columns["level"]) == ("2+2?", "4", 3)
    assert (second.messages, second.reference, second.answer) == ((USER,), "3", REPLY["content"])
    assert shown(third.token_ids) == shown(fourth.token_ids) == "<user>2+2?<eos><assistant>"
    assert third.messages == fourth.messages == (AGAIN,)


def test_a_prompt_of_messages_reaches_the_stream_and_survives_a_checkpoint(tmp_path):
    path = lines(tmp_path, *[{"messages": [USER], "answer": str(i), "n": [i]} for i in range(4)])
    stream = make_prompts(section(path), TOKENIZER, 0)
    prompt = next(stream)
    assert prompt.messages == (USER,) and prompt.columns["messages"] == [USER]
    again = loads(dumps(prompt))
    assert again.messages == prompt.messages and again.columns == prompt.columns
    assert eval_prompts(section(path), TOKENIZER)[0].reference == "3"


def test_a_system_prompt_stands_before_what_has_none(tmp_path):
    path = lines(
        tmp_path,
        {"question": "1+2?", "answer": "3"},
        {"messages": [USER], "answer": "3"},
        {"messages": [SYSTEM, USER], "answer": "3"},
    )
    texts = [
        shown(r.token_ids) for r in read_records(path, section(system_prompt="Add."), TOKENIZER)
    ]
    assert texts[0] == texts[1] == "<system>Add.<eos><user>1+2?<eos><assistant>"
    assert texts[2].startswith("<system>Be brief.<eos><user>")
    with pytest.raises(ConfigError, match=r"data\.system_prompt needs a chat template"):
        read_records(path, section(system_prompt="Add."), character_tokenizer("123"))
    with pytest.raises(ConfigError, match=r"data\.system_prompt needs a chat template"):
        read_records(path, section(system_prompt="Add.", template="{prompt}"), TOKENIZER)


def test_messages_need_a_chat_format(tmp_path):
    path = lines(tmp_path, {"messages": [USER], "answer": "3"})
    with pytest.raises(ConfigError, match="no chat template"):
        read_records(path, section(), character_tokenizer("123"))
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    own = section(chat_format=str(file))
    (record,) = read_records(path, own, character_tokenizer("12+?"))
    assert len(record.token_ids) == 4


BAD = [
    ({"messages": []}, "no chat messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "robot"),
    ({"messages": [REPLY]}, "nothing before the answer"),
    ({"messages": 5}, "not text"),
    ({"messages": [USER], "answer": None}, "missing"),
    ({"messages": [{**USER, "content": "1" * 300}], "answer": "3"}, "too long"),
]


@pytest.mark.full
@pytest.mark.parametrize(("record", "reason"), BAD)
def test_bad_conversations_are_skipped_with_a_reason(tmp_path, caplog, record, reason):
    path = lines(tmp_path, {"messages": [USER], "answer": "3"}, record)
    if reason == "not text":
        record["messages"] = {"a": 1}
        path = lines(tmp_path, {"messages": [USER], "answer": "3"}, record)
    assert len(read_records(path, section(max_bad_share=0.5), TOKENIZER)) == 1
    assert "line 2: skipped" in caplog.text and reason in caplog.text
    with pytest.raises(DataError, match=r"1 of 2 records cannot be used"):
        read_records(path, section(), TOKENIZER)


def test_what_a_template_refuses_is_skipped(tmp_path, caplog):
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
        "{{ messages[0].content }}<eos>"
    )
    path = lines(
        tmp_path,
        {"messages": [USER], "answer": "3"},
        {"messages": [USER, REPLY, AGAIN], "answer": "4"},
    )
    data = section(max_bad_share=0.5, chat_format=str(file))
    assert len(read_records(path, data, TOKENIZER)) == 1
    assert "one only" in caplog.text


# --- answers to imitate --------------------------------------------------------------------------


def test_a_last_answer_is_imitated_with_its_calls_and_thinking(tmp_path):
    tokenizer = qwen3_tokenizer()
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    calling = {"role": "assistant", "tool_calls": [call], "reasoning_content": "so"}
    path = lines(
        tmp_path, *[{"messages": [SYSTEM, USER, calling]}, {"messages": [USER, REPLY]}] * 2
    )
    split = demonstrations(section(path), tokenizer, 0, most_tokens=400)
    ids, mask = split.train[0]
    assert tokenizer.decode_all(ids[mask]) == (
        '<think>\nso\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
        "</tool_call><|im_end|>"
    )
    assert ids[~mask].tolist() == chat_format(tokenizer, None).opening([SYSTEM, USER], ()).tolist()
    ids, mask = split.train[1]
    assert tokenizer.decode_all(ids[mask]) == "It is #### 3<|im_end|>"
    pairs = warm_start_pairs(
        section(path), WarmStartSection(steps=1), tokenizer, seed=0, max_length=400
    )
    lengths = {len(ids) for ids, _ in (next(pairs) for _ in range(8))}
    assert lengths == {len(ids) for ids, _ in split.train}


def test_questions_are_taught_as_before_a_chat_format_was_asked(tmp_path):
    """One user message in the chat template, then the answer as it stands, then the end token."""
    tokenizer = qwen3_tokenizer()
    path = lines(tmp_path, *[{"question": f"{i}?", "answer": f" {i}\n"} for i in range(3)])
    for i, (ids, mask) in enumerate(demonstrations(section(path), tokenizer, 0, 400).train):
        assert ids[~mask].tolist() == tokenizer.encode_prompt(f"{i}?").tolist()
        assert ids[mask].tolist() == tokenizer.encode_answer(f"{i}?", f" {i}\n").tolist()


def test_preferences_may_be_messages(tmp_path):
    text = {"prompt": "1+2?", "chosen": "3", "rejected": "4"}
    listed = {"prompt": [USER], "chosen": [answer("3")], "rejected": [answer("4")]}
    whole = {"chosen": [USER, answer("3")], "rejected": [USER, answer("4")]}
    mixed = {"prompt": [USER], "chosen": "3", "rejected": "4"}
    path = lines(tmp_path, text, listed, whole, mixed)
    pairs = read_preferences(path, section(), TOKENIZER, max_tokens=100)
    ids = {tuple(map(tuple, (p.prompt_ids, p.chosen_ids, p.rejected_ids))) for p in pairs}
    assert len(pairs) == 4 and len(ids) == 1
    assert shown(pairs[0].prompt_ids) == "<user>1+2?<eos><assistant>"
    assert shown(pairs[0].chosen_ids) == "3<eos>"
    (judged,) = read_preferences(
        lines(tmp_path, {"prompt": [USER], "completion": [answer("3")], "label": True}),
        section(), TOKENIZER, max_tokens=100,
    )  # fmt: skip
    assert shown(judged.chosen_ids) == "3<eos>" and not len(judged.rejected_ids)


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": [USER, answer("3")], "rejected": [AGAIN, answer("4")]}, "different messages"),
        (
            {"prompt": [AGAIN], "chosen": [USER, answer("3")], "rejected": [USER, answer("4")]},
            "not a single",
        ),
        (
            {"prompt": [USER], "chosen": [USER], "rejected": "4"},
            "does not end with the assistant",
        ),
        ({"chosen": "3", "rejected": "4"}, "missing"),
    ],
)
def test_preferences_that_do_not_fit_together_are_named(tmp_path, record, reason):
    with pytest.raises(DataError, match=reason):
        read_preferences(lines(tmp_path, record), section(), TOKENIZER, max_tokens=100)


# --- tables --------------------------------------------------------------------------------------

ROWS = [
    {"messages": [{**USER, "name": None}, REPLY | {"name": "x"}], "answer": str(i), "n": i}
    for i in range(5)
]


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="the extra [datasets] is not installed")


def test_parquet_is_read_as_json_lines_are(tmp_path, arrow, monkeypatch):
    monkeypatch.setattr(record_files, "ROWS_AT_ONCE", 2)
    table = arrow.Table.from_pylist(ROWS)
    parquet = importlib_parquet()
    parquet.write_table(table, tmp_path / "d.parquet")
    (tmp_path / "parts").mkdir()
    parquet.write_table(table.slice(0, 3), tmp_path / "parts" / "a-0.parquet")
    parquet.write_table(table.slice(3), tmp_path / "parts" / "a-1.parquet")
    expected = read_records(lines(tmp_path, *ROWS), section(), TOKENIZER)
    for source in (tmp_path / "d.parquet", tmp_path / "parts"):
        found = read_records(source, section(), TOKENIZER)
        assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in expected]
        assert [(r.reference, r.columns["n"]) for r in found] == [(str(i), i) for i in range(5)]
        assert found[0].messages == expected[0].messages == (USER,)


def importlib_parquet():
    return pytest.importorskip("pyarrow.parquet")


def test_a_saved_data_set_is_read_in_its_order(tmp_path, arrow):
    """As datasets' save_to_disk writes one: Arrow streams, and a file that names them."""
    folder = tmp_path / "train"
    folder.mkdir()
    table = arrow.Table.from_pylist(ROWS)
    for name, part in (("data-1.arrow", table.slice(3)), ("data-0.arrow", table.slice(0, 3))):
        with (
            arrow.OSFile(str(folder / name), "wb") as sink,
            arrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(part)
    names = [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    assert [r.columns["n"] for r in read_records(folder, section(), TOKENIZER)] == list(range(5))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))
    with pytest.raises(DataError, match="not a file of the folder"):
        read_records(folder, section(), TOKENIZER)


def test_what_datasets_itself_saves_and_holds_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "train")
    saved.to_parquet(tmp_path / "d.parquet")
    for source in (tmp_path / "train", tmp_path / "d.parquet"):
        found = read_records(source, section(), TOKENIZER)
        assert [r.columns["n"] for r in found] == list(range(5))


def test_torn_tables_and_folders_without_records_are_named(tmp_path, arrow):
    torn = tmp_path / "d.parquet"
    torn.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"d\.parquet: cannot be read"):
        read_records(torn, section(), TOKENIZER)
    with pytest.raises(DataError, match="no such file"):
        read_records(tmp_path / "no.parquet", section(), TOKENIZER)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no state\.json"):
        read_records(tmp_path / "empty", section(), TOKENIZER)


def test_a_value_that_checkpoints_cannot_hold_is_left_out(tmp_path, arrow, caplog):
    rows = [{"question": "1+2?", "answer": "3", "image": None}] * 3 + [
        {"question": "1+2?", "answer": "3", "image": b"x"}
    ]
    importlib_parquet().write_table(arrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    found = read_records(tmp_path / "d.parquet", section(max_bad_share=0.5), TOKENIZER)
    assert [set(record.columns) - {"image"} for record in found] == [{"question", "answer"}] * 4
    assert "the column 'image' is dropped: it holds a bytes" in caplog.text


def test_without_pyarrow_a_table_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "d.parquet").write_bytes(b"")

    imports = importlib.import_module

    def missing(name):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return imports(name)

    monkeypatch.setattr(record_files.importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"\[datasets\]"):
        read_records(tmp_path / "d.parquet", section(), TOKENIZER)


def test_values_of_a_table_are_plain_columns(tmp_path, arrow):
    rows = [
        {
            "question": "1+2?",
            "answer": "3",
            "day": datetime.date(2026, 1, 2),
            "cost": decimal.Decimal("1.5"),
            "numbers": [0, 1, 2],
            "of": {"score": 0.5},
        }
    ]
    importlib_parquet().write_table(arrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    (record,) = read_records(tmp_path / "d.parquet", section(answer_mark="####"), TOKENIZER)
    assert record.columns == {**rows[0], "day": "2026-01-02", "cost": "1.5"}
    prompt = prompt_of(record, 0, 0)
    assert loads(dumps(prompt)).columns == prompt.columns

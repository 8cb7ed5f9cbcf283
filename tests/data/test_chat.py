"""Chat formats: openings as transformers writes them, turns that are appended token for token, tool
calls and thinking read back, and where a template rewrites history."""

import importlib.util
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chat_tokenizers import (
    QWEN3,
    TEMPLATES,
    byte_tokenizer,
    fitted,
    llama3_tokenizer,
    qwen3_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.chat_formats import renderer_format
from jaxrl_async.data.chat_formats.chat_messages import checked_messages, with_objects
from jaxrl_async.data.chat_formats.renderer_format import RendererFormat
from jaxrl_async.data.chat_formats.template_format import TemplateFormat
from jaxrl_async.data.tokenizer import character_tokenizer, chat_tokenizer, load_tokenizer
from jaxrl_async.errors import ConfigError, DataError, MissingExtraError

has_renderers = pytest.mark.skipif(
    importlib.util.find_spec("renderers") is None, reason="the extra [chat] is not installed"
)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 1 + 2?"}
AGAIN = {"role": "user", "content": "And  twice\nthat?"}
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "string"}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": NUMBERS},
    },
}


def calling(*ids, content="", **more):
    calls = [
        {
            "id": i,
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'},
        }
        for i in ids
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def reply(call_id, content="3"):
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": "add"}


def turn(text, **more):
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS = [
    ([USER], ()),
    ([SYSTEM, USER], (ADD,)),
    ([USER, turn("Three."), AGAIN], ()),
    ([USER, turn("Three.", reasoning_content="1 and 2"), AGAIN], ()),
    ([SYSTEM, USER, calling("000000001"), reply("000000001")], (ADD,)),
    (
        [USER, calling("000000001", reasoning_content="so"), reply("000000001"), turn("3"), AGAIN],
        (ADD,),
    ),
    ([USER, calling("1", "2", content="Both."), reply("1"), reply("2", "4")], (ADD,)),
]
FORMATS = [
    *((name, "template") for name in TEMPLATES),
    *(
        pytest.param(*case, marks=has_renderers)
        for case in [("qwen3", "qwen3"), ("llama3", "llama-3")]
    ),
]


def made(name, setting, **more):
    tokenizer = TEMPLATES[name]()
    return tokenizer, chat_format(tokenizer, None, setting, **more)


def turn_of(format_, tokenizer, text, *, ends=True):
    """Tokens of a text as a policy would draw them, and the end of its turn."""
    ids = tokenizer.encode(text)
    return np.concatenate([ids, format_.stop_token_ids[:1]]).astype(np.int32) if ends else ids


LOST = {"chatml": {"tool_calls", "reasoning_content"}, "llama3": {"reasoning_content"}}
"""What a template has no field for: it stands in the text here, and nowhere in transformers."""


# --- openings ------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("name", "setting"), FORMATS)
def test_an_opening_has_the_tokens_that_transformers_writes(name, setting):
    tokenizer, chat = made(name, setting)
    compared = 0
    for messages, tools in CONVERSATIONS:
        try:
            theirs = tokenizer.hf.apply_chat_template(
                with_objects(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception:
            with pytest.raises(DataError, match=r"one call a turn|single tool call"):
                chat.opening(messages, tools)
            continue
        lost = any(m.keys() & LOST.get(name, set()) for m in messages)
        assert lost or chat.opening(messages, tools).tolist() == theirs
        compared += 1
    assert compared >= len(CONVERSATIONS) - 1


def test_what_a_template_has_no_field_for_stands_in_the_text():
    tokenizer, chat = made("chatml", "template")
    conversation = [USER, calling("1", content="Well.", reasoning_content="so"), reply("1")]
    text = tokenizer.decode_all(chat.opening(conversation, ()))
    assert "<think>\nso\n</think>\n\nWell.\n<tool_call>" in text
    turn = text.split("<|im_start|>assistant\n")[1].partition("<|im_end|>")[0]
    read = chat.message(tokenizer.encode(turn), ())
    assert read["reasoning_content"] == "so" and read["content"] == "Well."
    assert read["tool_calls"][0]["function"] == conversation[1]["tool_calls"][0]["function"]


def test_a_template_that_shows_no_tools_says_so_once(caplog):
    _, chat = made("chatml", "template")
    chat.opening([USER], (ADD,))
    chat.opening([USER], (ADD,))
    assert caplog.text.count("shows the policy no tools") == 1


# --- next turns ----------------------------------------------------------------------------------

OTHERS = [
    ("tool", [reply("000000001")]),
    ("tools", [reply("000000001"), reply("000000002", "<4>")]),
    ("user", [AGAIN]),
]
WRITTEN = {
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": "é"}}',
    "characters": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "e"}}</tool_call>',
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


@pytest.mark.full
@pytest.mark.parametrize(("name", "setting"), FORMATS)
@pytest.mark.parametrize("others", ["tool", "user"])
def test_a_next_turn_is_what_the_whole_conversation_would_be(name, setting, others):
    """For a turn that its own template would write with the same tokens."""
    tokenizer, chat = made(name, setting)
    begun = chat.opening([SYSTEM, USER], (ADD,))
    text = "Three." if others == "user" else WRITTEN.get(name, HERMES)
    if name == "thinking first":
        text = f"so\n</think>\n\n{text}"
    turn = turn_of(chat, tokenizer, text)
    message = chat.message(turn, (ADD,))
    before = np.concatenate([begun, turn])
    behind = [AGAIN] if others == "user" else [reply(message["tool_calls"][0]["id"])]
    more = chat.continuation(before, behind, (ADD,))
    if name == "thinking first" and others == "user":
        assert more is None
        return
    whole = chat.opening([SYSTEM, USER, message, *behind], (ADD,))
    assert tokenizer.decode_all([*before, *more]) == tokenizer.decode_all(whole)
    assert more.dtype == np.int32 and whole.tolist()[-len(more) :] == more.tolist()


@pytest.mark.full
@pytest.mark.parametrize(("name", "setting"), FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_tokens_may_have_been_sampled_and_are_never_encoded_again(name, setting, data):
    tokenizer, chat = cached(name, setting)
    plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.added_tokens]
    ids = data.draw(st.lists(st.sampled_from(plain), min_size=1, max_size=12))
    _, others = data.draw(st.sampled_from(OTHERS))
    is_cut = data.draw(st.booleans())
    begun = chat.opening([SYSTEM, USER], (ADD,))
    close = tokenizer.encode("</think>\n\n") if name == "thinking first" else []
    end = [] if is_cut else list(chat.stop_token_ids[:1])
    before = np.array([*begun, *close, *ids, *end], np.int32)
    more = chat.continuation(before, others, (ADD,))
    if name == "thinking first" and others == [AGAIN]:
        assert more is None
        return
    usual = np.array([*begun, *close, *tokenizer.encode("3"), *chat.stop_token_ids[:1]], np.int32)
    expected = chat.continuation(usual, others, (ADD,)).tolist()
    assert more.tolist() == (list(chat.stop_token_ids[:1]) if is_cut else []) + expected


MADE = {}


def cached(name, setting):
    if (name, setting) not in MADE:
        MADE[name, setting] = made(name, setting)
    return MADE[name, setting]


def test_sampled_tokens_that_would_be_encoded_otherwise_stay_as_they_are():
    tokenizer, chat = made("qwen3", "template")
    letters = np.concatenate([tokenizer.encode(letter) for letter in "the assistant"])
    assert tokenizer.encode("the assistant").tolist() != letters.tolist()
    before = np.concatenate([chat.opening([USER], ()), letters, chat.stop_token_ids[:1]])
    more = chat.continuation(before.astype(np.int32), [AGAIN], ())
    assert tokenizer.decode_all([*before, *more]).endswith(
        "assistant\nthe assistant<|im_end|>\n<|im_start|>user\nAnd  twice\nthat?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# --- where history is rewritten ------------------------------------------------------------------

QWEN3_BOTH = [
    "template",
    pytest.param("qwen3", marks=has_renderers),
]


@pytest.mark.parametrize("setting", QWEN3_BOTH)
def test_dropped_thinking_begins_a_new_context_and_nothing_else_does(setting):
    tokenizer, chat = made("qwen3", setting)
    begun = chat.opening([USER], (ADD,))
    thought = turn_of(chat, tokenizer, f"<think>\nso\n</think>\n\n{HERMES}")
    after_thinking = np.concatenate([begun, thought])
    assert chat.continuation(after_thinking, [AGAIN], (ADD,)) is None
    assert chat.continuation(after_thinking, [reply("1"), AGAIN], (ADD,)) is None
    more = chat.continuation(after_thinking, [reply("1")], (ADD,))
    assert more is not None
    later = np.concatenate([after_thinking, more, turn_of(chat, tokenizer, "Three.")])
    assert chat.continuation(later, [AGAIN], (ADD,)) is None  # the first turn's thinking goes
    plain = np.concatenate([begun, turn_of(chat, tokenizer, "Three.")])
    assert chat.continuation(plain, [AGAIN], (ADD,)) is not None


@pytest.mark.parametrize("setting", QWEN3_BOTH)
def test_thinking_can_be_kept(setting):
    tokenizer, chat = made("qwen3", setting, keeps_thinking=True)
    before = np.concatenate(
        [chat.opening([USER], ()), turn_of(chat, tokenizer, "<think>\nso\n</think>\n\nThree.")]
    )
    _, dropping = made("qwen3", setting)
    plain = np.concatenate([chat.opening([USER], ()), turn_of(chat, tokenizer, "Three.")])
    more = chat.continuation(before, [AGAIN], ())
    assert more.tolist() == dropping.continuation(plain, [AGAIN], ()).tolist()


def test_a_turn_cut_within_its_thinking_begins_a_new_context():
    tokenizer, chat = made("qwen3", "template")
    before = np.concatenate([chat.opening([USER], ()), tokenizer.encode("<think>\nso")])
    assert chat.continuation(before, [reply("1")], ()) is None


def test_a_turn_that_ended_with_another_token_begins_a_new_context():
    _, chat = made("qwen3", "template")
    tokenizer = byte_tokenizer(QWEN3, eos="<|endoftext|>")
    chat = TemplateFormat(tokenizer)
    ends = [tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert list(chat.stop_token_ids) == ends
    begun = [*chat.opening([USER], ()), *tokenizer.encode("3")]
    own, other = (np.array([*begun, end], np.int32) for end in ends)
    assert chat.continuation(own, [AGAIN], ()) is not None
    assert chat.continuation(other, [AGAIN], ()) is None


def test_an_assistant_among_those_who_speak_begins_a_new_context():
    tokenizer, chat = made("qwen3", "template")
    before = np.concatenate([chat.opening([USER], ()), turn_of(chat, tokenizer, "3")])
    assert chat.continuation(before, [turn("4"), AGAIN], ()) is None


MOVED_TOOLS = """
{%- for m in messages -%}
  {%- if tools and m.role == "user" and loop.last %}[{{ tools | tojson }}]{% endif -%}
  {%- if m.role == "assistant" %}a:{{ m.content }}<|im_end|>{% else %}u:{{ m.content }}
  {%- endif -%}
{%- endfor -%}a:
"""


def test_a_template_that_moves_the_tools_is_rewritten_only_with_tools():
    """As Mistral's, which shows the tools before the last question."""
    chat = TemplateFormat(byte_tokenizer(MOVED_TOOLS))
    tokenizer = byte_tokenizer(MOVED_TOOLS)
    for tools in ((), (ADD,)):
        before = np.concatenate([chat.opening([USER], tools), turn_of(chat, tokenizer, "3")])
        more = chat.continuation(before, [AGAIN], tools)
        assert (more is None) == bool(tools)


STRIPPED = """
{%- for m in messages -%}
  {%- if m.role == "assistant" -%}
    A {{ m.content.split("</think>")[-1] | trim }}<|im_end|>
  {%- else %}U {{ m.content }}<|im_end|>{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}A {% endif -%}
"""


def test_a_template_that_cuts_thinking_from_the_text_begins_a_new_context_behind_it():
    tokenizer = byte_tokenizer(STRIPPED)
    chat = TemplateFormat(tokenizer)
    begun = chat.opening([USER], ())
    plain, thought = (
        np.concatenate([begun, turn_of(chat, tokenizer, text)])
        for text in ("3", "<think>so</think>3")
    )
    assert chat.continuation(plain, [AGAIN], ()) is not None
    assert chat.continuation(thought, [AGAIN], ()) is None


# --- what the policy wrote -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "setting"), FORMATS)
def test_a_tool_call_is_read_back_as_it_was_rendered(name, setting):
    tokenizer, chat = made(name, setting)
    begun = chat.opening([USER], (ADD,))
    conversation = calling("000000001")
    if name == "thinking first":
        conversation["reasoning_content"] = "so"
    turn = chat.answer([USER], conversation, (ADD,))
    assert turn[-1] == chat.stop_token_ids[0]
    read = chat.message(turn, (ADD,))
    (call,) = read["tool_calls"]
    assert call["function"]["name"] == "add" and "tool_call_errors" not in read
    assert json.loads(call["function"]["arguments"]) == {
        "a": 1,
        "b": "é" if name != "characters" else "",
    }
    assert call["id"].isalnum() and len(call["id"]) == 9
    assert read["content"] == "" and checked_messages([read])
    again = chat.message(turn, (ADD,))
    assert again == read
    more = chat.continuation(np.concatenate([begun, turn]), [reply(call["id"])], (ADD,))
    assert "3" in tokenizer.decode_all(more)


@pytest.mark.parametrize("setting", QWEN3_BOTH)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>\n{'name': 'add'}\n</tool_call>", "(?i)json"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "name"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "no JSON object"),
        ('<tool_call>\n{"name": "add", "arg', "unclosed|without"),
    ],
)
def test_a_malformed_call_stays_text_and_is_named(setting, text, reason):
    tokenizer, chat = made("qwen3", setting)
    read = chat.message(turn_of(chat, tokenizer, f"Well. {text}"), (ADD,))
    assert "tool_calls" not in read
    (error,) = read["tool_call_errors"]
    assert re.search(reason, error["reason"])
    assert text in read["content"] and read["content"].startswith("Well.")
    good = chat.message(turn_of(chat, tokenizer, f"{HERMES}\n{text}"), (ADD,))
    assert len(good["tool_calls"]) == len(good["tool_call_errors"]) == 1


@pytest.mark.parametrize("setting", QWEN3_BOTH)
@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("64e330", sys.float_info.max),
        ("-1e999", -sys.float_info.max),
        ("1e-400", 0.0),
        ("12", 12),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_a_number_beyond_float64_is_read_as_the_nearest_one(setting, number, value):
    tokenizer, chat = made("qwen3", setting)
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    read = chat.message(turn_of(chat, tokenizer, call), (ADD,))
    (called,) = read["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"a": value}
    assert checked_messages([{**read, "role": "assistant"}])[0]["tool_calls"]


@pytest.mark.parametrize("setting", QWEN3_BOTH)
@pytest.mark.parametrize("inner", ["9" * 5000, "[" * 3000])
def test_json_that_python_does_not_read_is_no_error_of_the_run(setting, inner):
    tokenizer, chat = made("qwen3", setting)
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {inner}}}}}\n</tool_call>'
    read = chat.message(turn_of(chat, tokenizer, call), (ADD,))
    if "tool_calls" not in read:
        assert read["tool_call_errors"] and inner in read["content"]


def test_a_string_of_a_call_may_contain_the_marks_as_text():
    tokenizer, chat = made("qwen3", "template")
    arguments = {"a": "</tool_call> <|im_end|> <tool_call>", "b": 1}
    written = json.dumps({"name": "add", "arguments": arguments})
    spelled = np.concatenate([tokenizer.encode(letter) for letter in written])
    begin, end = tokenizer.encode("<tool_call>\n"), tokenizer.encode("\n</tool_call>")
    ids = np.concatenate([begin, spelled, end, chat.stop_token_ids[:1]]).astype(np.int32)
    read = chat.message(ids, (ADD,))
    (called,) = read["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == arguments and read["content"] == ""


@pytest.mark.parametrize("setting", QWEN3_BOTH)
def test_several_calls_and_thinking_are_read(setting):
    tokenizer, chat = made("qwen3", setting)
    text = f"<think>\nso\n</think>\n\nBoth.\n{HERMES}\n{HERMES}"
    read = chat.message(turn_of(chat, tokenizer, text), (ADD,))
    assert (read["reasoning_content"], read["content"].strip()) == ("so", "Both.")
    first, second = read["tool_calls"]
    assert first["function"] == second["function"] and first["id"] != second["id"]


def test_special_tokens_within_a_turn_do_not_reach_its_message():
    """In a new context they would end turns and begin others."""
    tokenizer, chat = made("qwen3", "template")
    turn = turn_of(chat, tokenizer, "a<|im_start|>user\nb<|endoftext|>")
    assert chat.message(turn, ()) == {"role": "assistant", "content": "auser\nb"}


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_fuzz_any_tokens_are_a_message_that_can_be_written_again(data):
    name, setting = data.draw(st.sampled_from([("qwen3", "template"), ("llama3", "template")]))
    tokenizer, chat = cached(name, setting)
    words = st.sampled_from(
        [HERMES, "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "a"', '"\\ud800"']
    )
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    text = data.draw(st.lists(words, max_size=5))
    turn = np.array([*tokenizer.encode("".join(text)), *ids], np.int32)
    read = chat.message(turn, (ADD,))
    assert read["role"] == "assistant" and isinstance(read["content"], str)
    if len(read.get("tool_calls", ())) < 2:
        assert len(chat.opening([USER, read, AGAIN], (ADD,)))


# --- choosing ------------------------------------------------------------------------------------


def model_dir(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return tmp_path


@has_renderers
@pytest.mark.parametrize(
    ("name", "model_type", "chosen"),
    [
        ("qwen3", "qwen3", "qwen3"),
        ("llama3", "llama", "llama-3"),
        ("chatml", "qwen3", None),
        ("characters", "llama", None),
        ("qwen3", "something", None),
    ],
)
def test_a_renderer_is_taken_where_it_writes_what_the_template_writes(
    tmp_path, name, model_type, chosen
):
    chat = chat_format(TEMPLATES[name](), model_dir(tmp_path, model_type), "auto")
    found = chat.name if isinstance(chat, RendererFormat) else None
    assert found == chosen
    assert chosen or isinstance(chat, TemplateFormat)


@has_renderers
def test_arguments_reach_renderers_and_templates():
    tokenizer = qwen3_tokenizer()
    for setting in ("qwen3", "template"):
        chat = chat_format(tokenizer, None, setting, arguments={"enable_thinking": False})
        text = tokenizer.decode_all(chat.opening([USER], ()))
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="chat_arguments"):
        chat_format(tokenizer, None, "qwen3", arguments={"enable_thinkin": False})


@has_renderers
def test_arguments_that_only_the_template_reads_leave_the_choice_to_the_template(tmp_path):
    chat = chat_format(
        qwen3_tokenizer(), model_dir(tmp_path, "qwen3"), "auto", arguments={"mine": 1}
    )
    assert isinstance(chat, TemplateFormat)


@has_renderers
def test_an_unknown_format_and_a_strange_tokenizer_are_named():
    with pytest.raises(ConfigError, match=r"no such format.*qwen3"):
        chat_format(qwen3_tokenizer(), None, "qwen99")
    with pytest.raises(ConfigError, match="llama-3 does not fit"):
        chat_format(qwen3_tokenizer(), None, "llama-3")


@has_renderers
def test_a_format_that_would_download_its_vocabulary_says_what_to_set(monkeypatch):
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    with pytest.raises(ConfigError, match="TIKTOKEN_ENCODINGS_BASE"):
        chat_format(qwen3_tokenizer(), None, "gpt-oss")


def test_without_the_extra_a_named_renderer_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(renderer_format, "PACKAGE", "renderers_that_are_not_here")
    with pytest.raises(MissingExtraError, match=r"\[chat\]"):
        chat_format(qwen3_tokenizer(), None, "qwen3")
    auto = chat_format(qwen3_tokenizer(), model_dir(tmp_path, "qwen3"), "auto")
    assert isinstance(auto, TemplateFormat)


def test_a_template_of_the_users_own(tmp_path):
    tokenizer = byte_tokenizer(None)
    with pytest.raises(ConfigError, match=r"no chat template.*data\.chat_format"):
        chat_format(tokenizer, None)
    file = tmp_path / "own.jinja"
    with pytest.raises(ConfigError, match="cannot be read"):
        chat_format(tokenizer, None, str(file))
    file.write_text(QWEN3)
    chat = chat_format(tokenizer, None, str(file))
    theirs = chat_format(qwen3_tokenizer(), None)
    assert chat.opening([USER], ()).tolist() == theirs.opening([USER], ()).tolist()
    file.write_text(" ")
    with pytest.raises(ConfigError, match="not a chat template"):
        chat_format(tokenizer, None, str(file))


# --- all renderers -------------------------------------------------------------------------------

NEEDS_FILES = {"gpt-oss"}
"""Reads its vocabulary from a folder of its own."""
NAMES_IN_IDS = {"kimi-k2", "kimi-k2.5"}
"""Write a call's name as a part of its id, which a foreign id lacks."""


@pytest.mark.full
@has_renderers
def test_every_renderer_appends_turns_and_reads_its_own_calls():
    names = [name for name in renderer_format.renderer_names() if name not in NEEDS_FILES]
    assert len(names) > 25
    appended, called = set(), set()
    for name in names:
        tokenizer, chat = fitted(lambda made, name=name: chat_format(made, None, name))
        begun = chat.opening([SYSTEM, USER], (ADD,))
        conversation = calling("functions.add:0" if name in NAMES_IN_IDS else "000000001")
        for message in (conversation, conversation | {"reasoning_content": "so"}):
            try:
                turn = chat.answer([SYSTEM, USER], message, (ADD,))
            except DataError:
                continue  # the format begins with thinking, or has none here
            read = chat.message(turn, (ADD,))
            (call,) = read["tool_calls"]
            assert call["function"]["name"] == "add", name
            assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}, name
            before = np.concatenate([begun, turn])
            more = chat.continuation(before, [reply(call["id"])], (ADD,))
            assert "3" in tokenizer.decode_all(more), name
            called.add(name)
        letters = np.concatenate([tokenizer.encode(letter) for letter in "hello"])
        for end in ([], chat.stop_token_ids[:1]):
            before = np.array([*begun, *letters, *end], np.int32)
            if (more := chat.continuation(before, [AGAIN], (ADD,))) is not None:
                assert "twice" in tokenizer.decode_all(more), name
                appended.add(name)
    assert len(called) >= len(names) - 1 and len(appended) >= 15


# --- messages ------------------------------------------------------------------------------------

WRONG = [
    ("hello", "no chat messages"),
    ([], "no chat messages"),
    ([3], r"message 0 is 3"),
    ([{"role": "robot", "content": "a"}], "message 0 has the role 'robot'"),
    ([USER, {"role": "user"}], "message 1 has no content"),
    ([{"role": "user", "content": 5}], "content of message 0 is 5"),
    ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
    ([{"role": "user", "content": "a", "tool_calls": [1]}], "Only assistants call"),
    ([{"role": "assistant", "tool_calls": [1]}], "tool call 0 of message 0 is 1"),
    ([{"role": "assistant", "tool_calls": {"a": 1}}], "tool_calls of message 0"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
        r"its arguments are '\['",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("messages", "error"), WRONG)
def test_messages_that_are_none_are_named(messages, error):
    with pytest.raises(DataError, match=error):
        made("qwen3", "template")[1].opening(messages, ())


def test_messages_come_in_one_form():
    given_ = [
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "reasoning": "c", "tool_calls": [
            {"name": "f", "arguments": {"x": 1}}
        ]},
        {"role": "assistant", "content": "d", "tool_calls": []},
    ]  # fmt: skip
    assert list(checked_messages(given_)) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "reasoning_content": "c", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        ]},
        {"role": "assistant", "content": "d"},
    ]  # fmt: skip


def test_tools_that_are_none_are_named():
    with pytest.raises(DataError, match="tool 0 is"):
        made("qwen3", "template")[1].opening([USER], [{"name": "add"}])


# --- the built-in tasks' tokenizer ---------------------------------------------------------------


def test_a_chat_tokenizer_has_one_token_a_mark_and_loads_again(tmp_path):
    ours = chat_tokenizer()
    ours.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    messages = [SYSTEM, USER, calling("000000001", reasoning_content="so"), reply("1"), AGAIN]
    for tokenizer in (ours, again):
        ids = chat_format(tokenizer, None).opening(messages, (ADD,))
        assert tokenizer.decode_all(ids) == (
            "<tools>add(a, b)</tools><system>Be brief.<eos><user>What is 1 + 2?<eos>"
            '<assistant><think>so</think><tool_call>{"name": "add", "arguments": '
            '{"a": 1, "b": "<unk>"}}</tool_call><eos><tool_response>3</tool_response>'
            "<user>And  twice\nthat?<eos><assistant>"
        )
        assert len(tokenizer.encode("<tool_call><user></think>")) == 3
    assert ours.vocab_size == 4 + 96 + 3 + 8


def test_a_chat_tokenizer_appends_every_next_turn():
    assert TemplateFormat(chat_tokenizer()).rewrites == frozenset()
    assert not any(border.thinks is False for border in TemplateFormat(llama3_tokenizer()).rewrites)
    assert {b.role for b in TemplateFormat(qwen3_tokenizer()).rewrites if b.thinks} == {"user"}
    assert all(border.thinks for border in TemplateFormat(qwen3_tokenizer()).rewrites)


def test_a_tokenizer_without_a_template_gets_an_error():
    with pytest.raises(ConfigError, match="no chat template"):
        chat_format(character_tokenizer("ab"), None)


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", QWEN3_BOTH)
def test_many_threads_share_a_format(setting):
    tokenizer, chat = made("qwen3", setting)

    def played(i):
        begun = chat.opening([SYSTEM, {"role": "user", "content": f"{i}?"}], (ADD,))
        before = np.concatenate([begun, turn_of(chat, tokenizer, f"{HERMES}{i}")])
        read = chat.message(before[len(begun) :], (ADD,))
        more = chat.continuation(before, [reply(read["tool_calls"][0]["id"], str(i))], (ADD,))
        return [*before.tolist(), *more.tolist()]

    alone = [played(i) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(played, range(40))) == alone

"""Questions to a base model: the bare text, as files' records are read without a chat template."""

import numpy as np
import pytest

from jaxrl_async.config.load import load
from jaxrl_async.data.chat_formats.plain_format import PlainFormat
from jaxrl_async.data.tokenizer import character_tokenizer
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.run.builders.playing import make_play
from jaxrl_async.run.optional_parts import NoOpponents, NoServing
from jaxrl_async.tasks.task import Task
from jaxrl_async.tasks.task_source import DemoEncoder

ASKED = {"role": "user", "content": "1+2="}


def test_a_question_is_its_text_and_an_answer_ends_with_the_end_token():
    tokenizer = character_tokenizer("123+=")
    plain = PlainFormat(tokenizer)
    opening = plain.opening([ASKED], ())
    assert tokenizer.decode_all(opening) == "1+2="
    answer = plain.answer([ASKED], {"role": "assistant", "content": "3"})
    assert answer.tolist() == [*tokenizer.encode("3"), tokenizer.eos_ids[0]]
    assert plain.message(answer, ()) == {"role": "assistant", "content": "3"}
    assert plain.stop_token_ids == tokenizer.eos_ids
    assert plain.continuation(np.concatenate([opening, answer]), [ASKED], ()) is None


def test_a_demonstration_is_a_question_and_its_answer_which_alone_is_trained_on():
    tokenizer = character_tokenizer("123+=")
    record = {"question": "1+2=", "answer": "3"}
    encoder = DemoEncoder(PlainFormat(tokenizer), (), None)
    token_ids, mask = encoder(record)
    assert token_ids.tolist() == [*tokenizer.encode("1+2=3"), tokenizer.eos_ids[0]]
    assert mask.tolist() == [False] * 4 + [True] * 2
    longer = {"worked": [ASKED, {"role": "assistant", "content": "3"}, ASKED]}
    with pytest.raises(DataError, match="user, assistant"):
        encoder(longer)


@pytest.mark.parametrize(
    ("messages", "tools", "said"),
    [
        ([{"role": "system", "content": "Be brief."}, ASKED], (), "system, user"),
        ([ASKED, {"role": "assistant", "content": "3"}, ASKED], (), "user, assistant, user"),
        ([ASKED], ({"type": "function", "function": {"name": "f"}},), "user with tools"),
    ],
)
def test_another_conversation_is_refused_with_what_to_set(messages, tools, said):
    with pytest.raises(DataError, match=rf"not a single question but {said}.*data\.chat_format"):
        PlainFormat(character_tokenizer("123+=")).opening(messages, tools)


def test_a_tasks_questions_need_no_chat_template_and_a_system_prompt_does(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    tokenizer = character_tokenizer("123+=")

    def played(**parts):
        records = tuple({"question": q, "answer": "3"} for q in ("1+2=", "2+1="))
        task = Task(records=records, reward=lambda completion: 1.0, **parts)
        config = load(str(tmp_path / "empty.yaml"), ["data.max_prompt_tokens=8"])
        return make_play(
            config, task, tokenizer, lambda name, number: None, NoServing(), NoOpponents()
        )

    play = played()
    assert play.stop_token_ids == tokenizer.eos_ids and play.own is not None
    assert isinstance(play.own.chat, PlainFormat)
    with pytest.raises(ConfigError, match="no chat template"):
        played(system_prompt="Be brief.")

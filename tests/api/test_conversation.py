"""A conversation keeps the sampled tokens of its earlier turns, whatever they read as."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from chat_tokenizers import CHATML, byte_tokenizer, qwen3_tokenizer

import jaxrl_async as jr
from jaxrl_async.api.conversation import Transcript, with_answer, with_question
from jaxrl_async.config.schema import SamplerSection
from jaxrl_async.data.chat import chat_format
from jaxrl_async.types import StopReason

TOKENIZER = byte_tokenizer(CHATML)
SPEC = tiny_spec(TOKENIZER.vocab_size)
POLICY = jr.Policy(SPEC, tiny_params(SPEC), TOKENIZER)
SECTION = SamplerSection(slots=2, max_length=192, max_new_tokens=191, block=2, page_tokens=16)
GREEDY = jr.SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def asker() -> Iterator[jr.Asker]:
    with jr.Asker(POLICY, section=SECTION) as opened:
        yield opened


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).tolist()


def test_a_turn_continues_the_tokens_that_were_sampled():
    """Half a character, two tokens that would be one if written again, an end that was cut off."""
    chat = chat_format(TOKENIZER, None)
    asked = with_question(Transcript(), "Hi", chat, TOKENIZER)
    whole = ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert asked.token_ids.tolist() == whole and asked.messages[-1]["content"] == "Hi"
    (end,) = ids("<|im_end|>")
    drawn = np.array([*ids("\N{LATIN SMALL LETTER E WITH ACUTE}")[:1], *ids("t"), *ids("h")])
    for answer, tail in ((drawn, "<|im_end|>\n"), (np.append(drawn, end), "\n")):
        said = with_answer(asked, answer, chat)
        then = with_question(said, "More", chat, TOKENIZER)
        after = ids(f"{tail}<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n")
        assert then.token_ids.tolist() == [*whole, *answer.tolist(), *after]
        assert [m["role"] for m in then.messages] == ["user", "assistant", "user"]


def test_where_a_template_drops_reasoning_a_turn_begins_anew():
    tokenizer = qwen3_tokenizer()
    chat = chat_format(tokenizer, None)
    asked = with_question(Transcript(), "Hi", chat, tokenizer)
    answer = tokenizer.encode("<think>\nhm\n</think>\n\nHello<|im_end|>")
    then = with_question(with_answer(asked, answer, chat), "More", chat, tokenizer)
    text = tokenizer.decode_all(then.token_ids)
    assert "hm" not in text and "Hello" in text
    assert then.messages[1]["reasoning_content"] == "hm"


def test_without_a_template_each_question_is_a_text_of_its_own():
    tokenizer = byte_tokenizer(None)
    said = with_answer(with_question(Transcript(), "1+", None, tokenizer), np.array([5, 6]), None)
    assert (
        with_question(said, "2+", None, tokenizer).token_ids.tolist()
        == tokenizer.encode("2+").tolist()
    )


@pytest.mark.full
def test_answers_are_those_of_the_whole_conversation_in_one_request(asker):
    talk = asker.conversation(system="Be brief.")
    pieces: list[str] = []
    first = talk.ask("Hi", sampling=GREEDY, max_new_tokens=12, on_text=pieces.append)
    assert "".join(pieces) == first.text and len(first.token_ids) <= 12
    before = talk.token_ids.tolist()
    second = talk.ask("More", sampling=GREEDY, max_new_tokens=9)
    then = talk.token_ids.tolist()
    assert then[: len(before)] == before
    assert second.prompt_tokens == len(then) - len(second.token_ids)
    request = jr.Request(
        request_id="whole",
        token_ids=np.array(then[: second.prompt_tokens], np.int32),
        max_new_tokens=9,
        sampling=GREEDY,
        stop_token_ids=TOKENIZER.eos_ids,
    )
    with jr.Sampler(POLICY, section=SECTION) as alone:
        (whole,) = alone.generate([request])
    assert whole.token_ids.tolist() == second.token_ids.tolist()
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]


@pytest.mark.full
def test_an_answer_is_replaced_after_the_same_prompt(asker):
    talk = asker.conversation()
    with pytest.raises(jr.JaxrlError, match="no answer yet"):
        talk.regenerate()
    with pytest.raises(jr.JaxrlError, match="no answer yet"):
        talk.logprobs()
    talk.ask("Hi", max_new_tokens=8)
    first = talk.ask("More", max_new_tokens=8)
    others = [talk.regenerate(max_new_tokens=8) for _ in range(3)]
    assert {o.prompt_tokens for o in others} == {first.prompt_tokens}
    assert len({tuple(o.token_ids.tolist()) for o in (first, *others)}) > 1, "sampled again"
    assert talk.token_ids[first.prompt_tokens :].tolist() == others[-1].token_ids.tolist()
    assert len(talk.messages) == 4


@pytest.mark.full
def test_log_probs_are_those_of_the_answer_at_temperature_one(asker):
    talk = asker.conversation()
    said = talk.ask("Hi", sampling=jr.SamplingParams(temperature=0.3), max_new_tokens=6)
    found = talk.logprobs(top=2)
    prompt = talk.token_ids[: said.prompt_tokens]
    (wanted,) = asker.score([(prompt, said.token_ids)], top=2)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-6)
    assert np.isnan(found.logprobs[: said.prompt_tokens]).all()
    assert found.top_ids.shape == (len(talk.token_ids), 2)


@pytest.mark.full
def test_an_answer_that_is_stopped_keeps_its_tokens_and_continues(asker):
    talk, stopped = asker.conversation(), threading.Event()
    said = talk.ask("Hi", stopped=stopped, on_text=lambda text: stopped.set())
    assert said.stop is StopReason.CANCELLED and 0 < len(said.token_ids) < 180
    assert talk.token_ids[said.prompt_tokens :].tolist() == said.token_ids.tolist()
    before = talk.token_ids.tolist()
    talk.ask("More", max_new_tokens=4)
    assert talk.token_ids.tolist()[: len(before)] == before


@pytest.mark.full
def test_a_conversation_that_fills_the_sampler_is_refused_and_stays(asker):
    talk = asker.conversation()
    said = talk.ask("Hi")  # as long as it fits, or up to an end
    before = talk.token_ids.tolist()
    with pytest.raises(jr.JaxrlError, match="at most 192 fit"):
        talk.ask("x" * 200)
    assert talk.token_ids.tolist() == before and said.text == talk.messages[-1]["content"]
    plain = jr.Policy(SPEC, POLICY.params, byte_tokenizer(None))
    with (
        jr.Asker(plain, section=SECTION) as other,
        pytest.raises(jr.JaxrlError, match="no system message"),
    ):
        other.conversation(system="x")

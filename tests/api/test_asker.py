"""jaxrl_async.generate and Asker: what may be asked of whom."""

from pathlib import Path

import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from chat_tokenizers import qwen3_tokenizer
from gemma_vision import IMAGE, saved
from PIL import Image
from whole_rows import logprobs_of

import jaxrl_async as jr
from jaxrl_async.data.chat_formats.template_format import TemplateFormat

TOKENIZER = qwen3_tokenizer()
SPEC = tiny_spec(TOKENIZER.vocab_size)
POLICY = jr.Policy(SPEC, tiny_params(SPEC), TOKENIZER)
QUESTION = [{"role": "user", "content": "a question"}]


def asked_tokens(asker: jr.Asker, prompt: object) -> list[int]:
    """Return the tokens of the request that a prompt becomes."""
    return asker._request(prompt, 4, jr.SamplingParams()).token_ids.tolist()


@pytest.mark.full
def test_a_directory_is_asked_as_its_policy_and_what_is_none_is_refused(tmp_path: Path) -> None:
    POLICY.save_pretrained(tmp_path / "policy")
    answers = [
        jr.generate(asked, "a question", max_new_tokens=3, temperature=0)
        for asked in (POLICY, tmp_path / "policy", str(tmp_path / "policy"))
    ]
    assert answers[0] == answers[1] == answers[2]
    (tmp_path / "run").mkdir()
    with pytest.raises(jr.JaxrlError, match=r"is a Run\. Give a Policy, such as run\.policy"):
        jr.generate(jr.Run(tmp_path / "run"), "a question")  # type: ignore[arg-type]


def test_arguments_of_the_chat_template_reach_texts_and_conversations() -> None:
    arguments = {"enable_thinking": False}
    wanted = TemplateFormat(TOKENIZER, arguments=arguments).opening(QUESTION, ()).tolist()
    with jr.Asker(POLICY, chat_arguments=arguments) as asker, jr.Asker(POLICY) as plain:
        for prompt in ("a question", QUESTION):
            assert asked_tokens(asker, prompt) == wanted != asked_tokens(plain, prompt)


@pytest.mark.full
def test_texts_and_completions_have_the_log_probs_of_the_trainer() -> None:
    """Of a text and its ids all tokens, of a pair those of the completion alone."""
    text, prompt, answer = "wörld, and more", "wörld,", " and more"
    ids = TOKENIZER.encode(text)
    opened = TemplateFormat(TOKENIZER).opening(QUESTION, ())
    with jr.Asker(POLICY) as asker:
        texts = [
            text,
            ids,
            (prompt, answer),
            (QUESTION, answer),
            (opened, TOKENIZER.encode(answer)),
        ]
        found = asker.score(texts, top=3, ids=(5,))
        (greedy,) = asker.score([(opened, asked_greedy(asker))], top=1)
        assert [one.token_ids.tolist() for one in asker.score(text)] == [ids.tolist()]
        (pair,) = asker.score((prompt, answer))
        (apart,) = asker.score("aéa")
    assert pair.total == found[2].total
    assert [apart.text[i] for i in apart.starts] == list("aééa"), "a token starts inside é"
    wanted = logprobs_of(SPEC, POLICY.params, ids)
    for one in found[:2]:
        assert one.token_ids.tolist() == ids.tolist() and one.text == text and not one.greedy
        assert np.isnan(one.logprobs[0]) and one.version == 0
        np.testing.assert_allclose(one.logprobs[1:], wanted[1:], atol=1e-5, rtol=0)
        assert one.total == pytest.approx(float(wanted[1:].sum()), abs=1e-4)
        assert one.top_ids.shape == (len(ids), 3) and one.id_logprobs.shape == (len(ids), 1)
    first = len(TOKENIZER.encode(prompt))
    assert found[2].token_ids.tolist() == ids.tolist() and np.isnan(found[2].logprobs[:first]).all()
    assert found[2].total == pytest.approx(float(wanted[first:].sum()), abs=1e-4)
    assert text[found[2].starts[first] :] == answer
    of_chat = logprobs_of(SPEC, POLICY.params, found[3].token_ids)[len(opened) :]
    for one in found[3:]:
        assert one.token_ids[: len(opened)].tolist() == opened.tolist()
        assert one.total == pytest.approx(float(of_chat.sum()), abs=1e-4)
    assert greedy.greedy and greedy.total == pytest.approx(np.nansum(greedy.top_logprobs))


def asked_greedy(asker: jr.Asker) -> list[int]:
    """Return the four likeliest tokens after the question."""
    request = asker._request(QUESTION, 4, jr.SamplingParams(temperature=0))
    return asker._sampler.generate([request])[0].token_ids.tolist()


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (5, "texts is a int"),
        ([{"role": "user"}], r"texts\[0\] is .* Give a text, token ids"),
        ([("a", "b", "c")], r"texts\[0\] is"),
        (("a", "b", "c"), r"texts\[0\] is"),
        ([b"a"], r"texts\[0\] is b'a'"),
        ([("a", None)], r"texts\[0\]: the completion is None"),
        ([(3, "a")], r"texts\[0\]: the prompt is 3"),
        ([("a", "")], r"texts\[0\]: the completion has no tokens"),
        ([[10**6]], "token_ids must be from 0"),
        (["a " * 4000], "a slot holds"),
    ],
)
def test_what_cannot_be_scored_is_refused(texts, problem) -> None:
    with pytest.raises(jr.JaxrlError, match=problem):
        jr.score(POLICY, texts)


def test_an_image_for_a_policy_that_reads_text_alone_is_refused() -> None:
    asked = [{"role": "user", "content": [{"type": "image", "image": np.zeros((4, 4, 3), "u1")}]}]
    with pytest.raises(jr.JaxrlError, match="reads text alone"):
        jr.generate(POLICY, asked)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_gemma_answers_about_an_image_as_transformers_does(tmp_path: Path) -> None:
    import torch
    import transformers

    model = saved(tmp_path)
    rows = np.random.default_rng(0).integers(0, 255, (IMAGE, IMAGE, 3), np.uint8)
    parts = [{"type": "image", "image": Image.fromarray(rows)}, {"type": "text", "text": "what"}]
    asked = [{"role": "user", "content": parts}]
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil.from_pretrained(tmp_path),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        chat_template=transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template,
        image_seq_length=4,
    )
    inputs = processor.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=8)[0]
    with jr.Asker(tmp_path) as asker:
        request = asker._request(asked, 8, jr.SamplingParams(temperature=0))
        (answer,) = asker._sampler.generate([request])
        assert len(asker.generate([asked, "what"], max_new_tokens=2)) == 2
    theirs = tokens[inputs["input_ids"].shape[1] :].tolist()
    assert answer.token_ids.tolist() == theirs[: len(answer.token_ids)] and len(theirs) > 1

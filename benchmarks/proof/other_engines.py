"""The same answers by transformers and by vLLM, with random weights of the same shape."""

import os
from typing import Any

import numpy as np
from proof.decoding import sizes
from proof.shared import THETA, Work, fastest_s, without


def hf(work: Work) -> None:
    """Sample as many answers at the same time as the argument says by transformers' generate."""
    if without("torch", work) or without("transformers", work):
        return
    import torch
    from transformers import AutoModelForCausalLM

    slots, prompt, answer = sizes(work, int(work.argument))
    answer = min(answer, 64)  # its steps all cost the same, and it is slow
    where = "cpu" if work.tiny else "cuda"
    if not work.tiny and not torch.cuda.is_available():
        work.report("not run", {"why": "torch sees no GPU"})
        return
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(
            config_of(work), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    ids = torch.randint(0, work.vocab, (slots, prompt), device=where)

    def generate() -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer,
            min_new_tokens=answer,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        if not work.tiny:
            torch.cuda.synchronize()

    generate()
    report(work, slots, answer, fastest_s(generate, 2))


def vllm(work: Work) -> None:
    """Sample as many answers at the same time as the argument says by vLLM."""
    if without("vllm", work):
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    slots, prompt, answer = sizes(work, int(work.argument))
    folder = work.scratch / "vllm"
    config_of(work).save_pretrained(folder)
    engine = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=prompt + answer,
        max_num_seqs=slots,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.8,
    )
    sampling = SamplingParams(
        temperature=1.0, ignore_eos=True, max_tokens=answer, detokenize=False, logprobs=0
    )
    texts = np.random.default_rng(0).integers(0, work.vocab, (slots, prompt)).tolist()
    prompts = [{"prompt_token_ids": text} for text in texts]

    def generate() -> None:
        engine.generate(prompts, sampling, use_tqdm=False)

    generate()
    report(work, slots, answer, fastest_s(generate, 2))


def config_of(work: Work) -> Any:
    """Return transformers' configuration of the model."""
    from transformers import Qwen3Config

    shape = work.shape
    return Qwen3Config(
        hidden_size=shape["width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["mlp"],
        vocab_size=work.vocab,
        rope_theta=THETA,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )


def report(work: Work, slots: int, answer: int, taken: float) -> None:
    """Report the rate, as the stage decode does."""
    facts = {
        "slots": slots,
        "tokens_per_s": round(slots * answer / taken),
        "ms_a_step": round(1e3 * taken / answer, 3),
    }
    work.report("tokens", facts)

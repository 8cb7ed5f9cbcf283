"""Write a model of transformers as a GGUF file, in the conventions of llama.cpp's converter: names
by gguf's table, heads permuted, experts stacked, Gemma's norms plus 1. Written from the converter,
not from what reads it here."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
}
PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "granite")
KindOf = Callable[[str, np.ndarray], str]
"""(llama.cpp's name, numbers) -> the type in which a tensor is written."""


def all_float32(name: str, numbers: np.ndarray) -> str:
    return "F32"


def write_gguf(
    path: Path,
    model: Any,
    kind: KindOf = all_float32,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a model; return the path.

    tokenizer: writes one; None: a byte-level one, with ChatML.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    write_header(writer, config)
    (tokenizer or byte_level)(writer)
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    for name, numbers in converted(model):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        chosen = kind(theirs, numbers) if numbers.ndim > 1 else "F32"
        write_tensor(writer, theirs, numbers, chosen)
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, np.asarray(factors, np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


def write_tensor(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    try:
        data = gguf.quantize(np.ascontiguousarray(numbers), number)
    except NotImplementedError:  # the K types, which gguf only reads
        data = random_blocks(numbers.shape, kind)
    writer.add_tensor(name, data, raw_dtype=number)


def random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random bytes as blocks of a K type, with scales that are small numbers."""
    rng = np.random.default_rng(0)
    inputs, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // inputs, size), np.uint8)
    scales = slice(-2, None) if kind == "Q6_K" else slice(0, 4)
    count = blocks[..., scales].shape[-1] // 2
    small = rng.uniform(1e-5, 1e-4, (*blocks.shape[:2], count)).astype(np.float16)
    blocks[..., scales] = small.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_header(writer: gguf.GGUFWriter, config: Any) -> None:
    said = config.to_dict()
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if said.get("head_dim") and config.model_type not in ("granite", "phi3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    experts = said.get("num_local_experts") or said.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    OWN.get(config.model_type, lambda *_: None)(writer, config)


def own_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def own_phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    share = rope.get("partial_rotary_factor", 1.0)
    width = config.hidden_size // config.num_attention_heads
    original = config.original_max_position_embeddings
    writer.add_rope_dimension_count(int(share * width))
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / original
        factor = np.sqrt(1 + np.log(scale) / np.log(original))
        writer.add_rope_scaling_attn_factors(float(factor))


def own_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def own_olmo3(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])


OWN = {
    "gemma2": own_gemma,
    "gemma3_text": own_gemma,
    "phi3": own_phi3,
    "granite": own_granite,
    "olmo3": own_olmo3,
}


def rope_factors(config: Any) -> dict[str, list[float]]:
    """The tensors of factors that the converter generates."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{k}.weight": rope[f"{k}_factor"] for k in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    context, factors = rope["original_max_position_embeddings"], []
    for i in range(config.head_dim // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * i / config.head_dim)
        smooth = (context / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if wave < context / high else factor if wave > context / low else between)
    return {"rope_freqs.weight": factors}


def converted(model: Any) -> list[tuple[str, np.ndarray]]:
    """All tensors as the converter gives them to gguf's table of names."""
    config, stacked, found = model.config, {}, []
    for name, tensor in model.state_dict().items():
        numbers = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type in PERMUTED:
            numbers = permuted(name, numbers, config)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers + 1
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(numbers, 2, axis=1)
            stacked[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            stacked[name.replace("gate_up_proj", "up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            stacked[f"{name}.weight"] = numbers
        else:
            found.append((name, numbers.squeeze()))
    return found + [(expert_name(config, name), numbers) for name, numbers in stacked.items()]


def expert_name(config: Any, name: str) -> str:
    if config.model_type != "mixtral":
        return name
    old = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    layer, kind = re.findall(r"layers\.(\d+)\..+\.(\w+)\.weight", name)[0]
    return f"layers.{layer}.feed_forward.experts.{old[kind]}.weight"


def permuted(name: str, numbers: np.ndarray, config: Any) -> np.ndarray:
    """LlamaModel.permute of the converter."""
    if not re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        return numbers
    heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
    split = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
    return split.swapaxes(1, 2).reshape(numbers.shape)


# ---- tokenizers


def byte_alphabet() -> list[str]:
    """The 256 signs of bytes, in GPT-2's order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    signs, more = {byte: chr(byte) for byte in plain}, 256
    for byte in range(256):
        if byte not in signs:
            signs[byte], more = chr(more), more + 1
    return [signs[byte] for byte in range(256)]


MERGES = ("Ġ Ġ", "h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "1 2")
SPECIAL, ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<think>"
VOCAB = len(SPECIAL) + 256 + len(MERGES) + 1


def byte_level(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    """SmolLM's kind of tokenizer, of VOCAB tokens: special, bytes, of merges, one added."""
    made = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL, *byte_alphabet(), *made, ADDED]
    normal, control, added = 1, 3, 4
    types = [control] * len(SPECIAL) + [normal] * (256 + len(made)) + [added]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_ML)


def sentence_piece(writer: gguf.GGUFWriter) -> None:
    """Llama 2's kind of tokenizer: scores, and a token for each byte."""
    normal, unknown, control, byte = 1, 2, 3, 6
    words = ["▁a", "▁the", "th", "the", "▁t", "an", "▁an", "▁▁", "hen", "he"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,?"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters]
    types = [unknown, control, control, *[byte] * 256, *[normal] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def tiny_llama(vocab: int = VOCAB, **more: Any) -> Any:
    """A small Llama of transformers with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": vocab,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            **more,
        }
    )
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()

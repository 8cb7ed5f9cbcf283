"""A tiny Gemma 3 with a SigLIP tower and random weights, as transformers makes and saves it."""

from pathlib import Path
from typing import Any

SOFT, BOI, EOI = 3, 4, 5
TOKENS = 4
IMAGE = 16
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<u>' if m['role'] == 'user' else '<m>' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}{{ '<boi>' }}"
    "{% else %}{{ p['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<m>' }}{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<soft>", "<boi>", "<eoi>", "<u>", "<m>", "<end>"]


def tokenizer() -> Any:
    """Return a tokenizer of characters, with the special tokens of a model with images."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, "<unk>", "\n", *"abcdefghijklmnopqrstuvwxyz ?"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", bos_token="<bos>",
        unk_token="<unk>", chat_template=TEMPLATE,
        extra_special_tokens={
            "image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"
        },
    )  # fmt: skip


def saved(
    folder: Path, *, window: int = 3, width: int = 32, moved: float = 0.2, **more: Any
) -> Any:
    """Save a random model with its tower, image processor and tokenizer; return the model."""
    import torch
    import transformers

    text = transformers.Gemma3TextConfig(
        vocab_size=48, hidden_size=width, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=window,
        query_pre_attn_scalar=8, layer_types=KINDS, max_position_embeddings=256, **more,
    )  # fmt: skip
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=IMAGE, patch_size=4, vision_use_head=False,
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=TOKENS, image_token_index=SOFT,
        boi_token_index=BOI, eoi_token_index=EOI, attn_implementation="eager",
    )  # fmt: skip
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 8, 0, 2
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += moved * torch.randn_like(parameter)
    model.save_pretrained(folder)
    processor = transformers.Gemma3ImageProcessorPil(size={"height": IMAGE, "width": IMAGE})
    processor.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model

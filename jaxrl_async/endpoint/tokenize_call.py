"""vLLM's /tokenize and /detokenize: convert bodies to calls, and tokens to bodies. Pure."""

from dataclasses import dataclass, replace
from typing import Any

from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.call_messages import MAX_TOOLS, read_tool
from jaxrl_async.endpoint.http_answers import AnswerFormat
from jaxrl_async.endpoint.openai_chat import ChatCall, read_conversation, template_of
from jaxrl_async.endpoint.openai_text import MAX_PROMPT
from jaxrl_async.endpoint.request_fields import DETOKENIZE, TOKENIZE
from jaxrl_async.endpoint.sampling_request import SamplingOptions
from jaxrl_async.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """A checked call of /tokenize."""

    prompt: str | ChatCall
    adds_special: bool = True  # whether a text begins with the tokenizer's initial tokens
    texts: bool = False  # whether the tokens' texts are returned


def tokenize_call(body: object) -> TokenizeCall:
    """Convert a body with a prompt or messages to a call. Raises CallRefused that names the
    field."""
    fields = BodyFields(body)
    prompt: str | ChatCall
    is_chat = fields.value("messages") is not None
    adds_special = fields.flag("add_special_tokens", not is_chat)
    if is_chat:
        if adds_special or fields.value("prompt") is not None:
            name = "add_special_tokens" if adds_special else "prompt"
            fields.refuse(name, "absent: messages are written by the chat template")
        messages, prefix = read_conversation(fields)
        prompt = ChatCall(
            messages=messages,
            prefix=prefix,
            tools=tuple(map(read_tool, fields.objects("tools", MAX_TOOLS))),
            template=template_of(fields, {}),
            options=SamplingOptions(),
        )
    else:
        prompt = fields.needed_text("prompt")
        for name in ("add_generation_prompt", "continue_final_message", "tools"):
            fields.value(name)
        fields.value("chat_template_kwargs")
    texts = fields.flag("return_token_strs")
    ignored = fields.settle(TOKENIZE)
    if isinstance(prompt, ChatCall):
        prompt = replace(prompt, ignored=ignored)
    return TokenizeCall(prompt=prompt, adds_special=adds_special, texts=texts)


def tokenize_body(
    call: TokenizeCall, token_ids: IntArray, words: AnswerFormat, max_length: int
) -> dict[str, Any]:
    """Return the answer.

    Args:
        call: the call.
        token_ids: of its text or messages, [length] int32.
        words: texts of tokens.
        max_length: of a sequence, tokens.
    """
    ids = token_ids.tolist()
    return {
        "count": len(ids),
        "max_model_len": max_length,
        "tokens": ids,
        "token_strs": [words.text_of(token) for token in ids] if call.texts else None,
    }


def tokenizer_info(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the answer of vLLM's /tokenizer_info: class, chat template and special tokens."""
    hf = tokenizer.hf
    named = {name: str(token) for name, token in hf.special_tokens_map.items()}
    return {
        "tokenizer_class": type(hf).__name__,
        "chat_template": hf.chat_template,
        "model_max_length": tokenizer.max_tokens,
        **named,
    }


def detokenize_call(body: object) -> list[int]:
    """Return the token ids of a body. Raises CallRefused that names the field."""
    fields = BodyFields(body)
    if fields.value("tokens") is None:
        fields.refuse("tokens", "a list of token ids")
    tokens = fields.token_ids("tokens", MAX_PROMPT)
    fields.settle(DETOKENIZE)
    return tokens

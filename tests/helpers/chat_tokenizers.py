"""Small byte-level tokenizers with the special tokens and chat templates of known models."""

import copy
import functools
import json
import re

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxrl_async.data.tokenizer import Tokenizer, chat_tokenizer
from jaxrl_async.errors import ConfigError

QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_MARKS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
LLAMA_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>",
)  # fmt: skip
QWEN_TOOLS = (
    "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>"
)
QWEN_CALLS = (
    "\\n</tools>\\n\\nFor each function call, return a json object with function name and "
    "arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
QWEN3 = f"""
{{%- set lead = messages[0].content if messages[0].role == "system" else none -%}}
{{%- if tools -%}}
  <|im_start|>system{{{{ "\\n" }}}}
  {{%- if lead is not none %}}{{{{ lead + "\\n\\n" }}}}{{% endif -%}}
  {{{{- "{QWEN_TOOLS}" }}}}
  {{%- for tool in tools %}}{{{{ "\\n" }}}}{{{{ tool | tojson }}}}{{% endfor -%}}
  {{{{- "{QWEN_CALLS}" }}}}<|im_end|>{{{{ "\\n" -}}}}
{{%- elif lead is not none -%}}
  {{{{- "<|im_start|>system\\n" + lead + "<|im_end|>\\n" -}}}}
{{%- endif -%}}
{{%- set ns = namespace(last=-1) -%}}
{{%- for m in messages %}}{{% if m.role == "user" %}}{{% set ns.last = loop.index0 %}}{{% endif %}}
{{%- endfor -%}}
{{%- for m in messages -%}}
  {{%- if m.role == "user" or (m.role == "system" and not loop.first) -%}}
    {{{{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" -}}}}
  {{%- elif m.role == "assistant" -%}}
    {{{{- "<|im_start|>assistant\\n" -}}}}
    {{%- set thought = m.reasoning_content or "" -%}}
    {{%- if loop.index0 > ns.last and (loop.last or thought) -%}}
      {{{{- "<think>\\n" + thought.strip("\\n") + "\\n</think>\\n\\n" -}}}}
      {{{{- m.content.lstrip("\\n") -}}}}
    {{%- else -%}}{{{{- m.content -}}}}{{%- endif -%}}
    {{%- for call in m.tool_calls or [] -%}}
      {{%- if not loop.first or m.content %}}{{{{ "\\n" }}}}{{% endif -%}}
      {{{{- '<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' -}}}}
      {{{{- call.function.arguments | tojson }}}}{{{{ "}}\\n</tool_call>" -}}}}
    {{%- endfor -%}}
    {{{{- "<|im_end|>\\n" -}}}}
  {{%- elif m.role == "tool" -%}}
    {{%- if loop.previtem.role != "tool" %}}<|im_start|>user{{% endif -%}}
    {{{{- "\\n<tool_response>\\n" + m.content + "\\n</tool_response>" -}}}}
    {{%- if loop.last or loop.nextitem.role != "tool" -%}}{{{{- "<|im_end|>\\n" -}}}}{{%- endif -%}}
  {{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
  {{{{- "<|im_start|>assistant\\n" -}}}}
  {{%- if enable_thinking is defined and not enable_thinking -%}}
    {{{{- "<think>\\n\\n</think>\\n\\n" -}}}}
  {{%- endif -%}}
{{%- endif -%}}
"""
"""As Qwen3 writes messages: the thinking of turns before the last question is dropped."""
THINKING_FIRST = QWEN3.replace('{{- "<think>\\n\\n</think>\\n\\n" -}}', "{}").replace(
    "{%- if enable_thinking is defined and not enable_thinking -%}\n    {}\n  {%- endif -%}",
    '{{- "<think>\\n" -}}',
)
"""As QWEN3, but the prompt opens the thinking."""
CHATML = """
{%- for m in messages -%}
  {{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}
"""
"""Knows neither thinking nor tools."""
LLAMA_FORMAT = (
    'Respond in the format {\\"name\\": function name, \\"parameters\\": dictionary of argument '
    "name and its value}.Do not use variables.\\n\\n"
)
LLAMA3 = f"""
{{%- set first = "<|start_header_id|>" %}}{{% set second = "<|end_header_id|>\\n\\n" -%}}
{{%- set date = date_string if date_string is defined else "26 Jul 2024" -%}}
{{%- if messages[0].role == "system" -%}}
  {{%- set lead = messages[0].content | trim %}}{{% set rest = messages[1:] -%}}
{{%- else %}}{{% set lead = "" %}}{{% set rest = messages %}}{{% endif -%}}
{{{{- "<|begin_of_text|>" + first + "system" + second -}}}}
{{%- if tools is not none and tools %}}{{{{ "Environment: ipython\\n" }}}}{{% endif -%}}
{{{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date + "\\n\\n" -}}}}
{{{{- lead + "<|eot_id|>" -}}}}
{{%- if tools -%}}
  {{{{- first + "user" + second + "Given the following functions, please respond with a JSON for a "
      + "function call with its proper arguments that best answers the given prompt.\\n\\n"
      + "{LLAMA_FORMAT}" -}}}}
  {{%- for tool in tools %}}{{{{ tool | tojson(indent=4) + "\\n\\n" }}}}{{% endfor -%}}
  {{{{- (rest[0].content | trim) + "<|eot_id|>" -}}}}
  {{%- set rest = rest[1:] -%}}
{{%- endif -%}}
{{%- for m in rest -%}}
  {{%- if m.role == "tool" -%}}
    {{{{- first + "ipython" + second + (m.content | tojson) + "<|eot_id|>" -}}}}
  {{%- elif m.tool_calls -%}}
    {{%- if m.tool_calls | length != 1 -%}}
      {{{{- raise_exception("one call a turn") -}}}}
    {{%- endif -%}}
    {{%- set call = m.tool_calls[0].function -%}}
    {{{{- first + "assistant" + second + '{{"name": "' + call.name + '", "parameters": ' -}}}}
    {{{{- (call.arguments | tojson) + "}}" + "<|eot_id|>" -}}}}
  {{%- else -%}}
    {{{{- first + m.role + second + (m.content | trim) + "<|eot_id|>" -}}}}
  {{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt %}}{{{{ first + "assistant" + second }}}}{{% endif -%}}
"""
"""As Llama 3.2 writes messages: tools in the first question, one call a turn, as bare JSON."""


def byte_tokenizer(
    template: str | None, *, tokens: tuple[str, ...] = QWEN_TOKENS, eos: str = "<|im_end|>"
) -> Tokenizer:
    """Return a byte-level tokenizer with a few merges, the tokens and the template: one of its
    own, since whoever serves it bounds its texts."""
    return Tokenizer(_byte_level(template, tokens, eos))


@functools.cache
def _byte_level(template: str | None, tokens: tuple[str, ...], eos: str) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "the assistant asked a question and the user answered a call with arguments " * 3
    backend.train_from_iterator([text, QWEN_TOOLS, json.dumps({"name": "add"})], trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    hf.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    if tokens is QWEN_TOKENS:
        hf.add_tokens([AddedToken(mark, normalized=False) for mark in QWEN_MARKS])
    hf.eos_token = eos
    hf.chat_template = template
    return hf


def qwen3_tokenizer() -> Tokenizer:
    return byte_tokenizer(QWEN3)


def llama3_tokenizer() -> Tokenizer:
    return byte_tokenizer(LLAMA3, tokens=LLAMA_TOKENS, eos="<|eot_id|>")


TEMPLATES = {
    "qwen3": qwen3_tokenizer,
    "thinking first": lambda: byte_tokenizer(THINKING_FIRST),
    "chatml": lambda: byte_tokenizer(CHATML),
    "llama3": llama3_tokenizer,
    "characters": chat_tokenizer,
}
"""Tokenizers by what their template is like."""


def fitted(make):
    """Return a tokenizer and what `make` makes of it, with every token added that it misses."""
    hf = copy.deepcopy(byte_tokenizer(None, tokens=("<|ends|>",), eos="<|ends|>").hf)
    for _ in range(60):
        try:
            return Tokenizer(hf), make(Tokenizer(hf))
        except ConfigError as error:
            missed = re.search(r"[Tt]oken (?:for )?'([^']+)'", str(error))
            if missed is None:
                raise
            hf.add_tokens([AddedToken(missed[1], special=True, normalized=False)])
    raise AssertionError("it misses more than 60 tokens")

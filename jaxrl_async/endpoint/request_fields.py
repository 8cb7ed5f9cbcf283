"""The meaning of every field of a request, by protocol: the newest of OpenAI's, Anthropic's and
vLLM's. Pure.

A field without a row is refused by name: it may be misspelt, or change the answer. vLLM ignores
such a field, also `guided_json` since its removal, and then answers without the schema.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FieldUse(StrEnum):
    """What the endpoint does with a field."""

    HONOURED = "honoured"
    GUESTS = "honoured for guests"  # counted in a session whose run fixes its settings
    COUNTED = "counted"  # accepted without effect, and counted
    LABEL = "label"  # accepted: no server's answer depends on it
    REFUSED = "refused"


HONOURED, GUESTS, COUNTED, LABEL, REFUSED = FieldUse


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """The meaning of one field."""

    use: FieldUse
    note: str = ""  # why it is refused, or what to use instead
    neutral: tuple[Any, ...] = ()  # values that ask for what is done in any case


def _rules(use: FieldUse, names: str, note: str = "", *neutral: object) -> dict[str, FieldRule]:
    return dict.fromkeys(names.split(), FieldRule(use=use, note=note, neutral=neutral))


def _refused(note: str, names: str, *neutral: object) -> dict[str, FieldRule]:
    return _rules(REFUSED, names, note, *neutral)


def _counted(note: str, names: str, *neutral: object) -> dict[str, FieldRule]:
    return _rules(COUNTED, names, note, *neutral)


_LABELS = _rules(
    LABEL,
    "model user metadata service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention cache_salt priority request_id session_id return_token_offsets "
    "return_mm_kwargs",
)
_ELSEWHERE = _refused(
    "prompts and caches of other servers are not read",
    "kv_transfer_params ec_transfer_params mm_payload",
)
_SAMPLING = {
    **_rules(GUESTS, "temperature top_p top_k min_p seed frequency_penalty presence_penalty"),
    **_rules(GUESTS, "repetition_penalty logit_bias min_tokens"),
    **_rules(HONOURED, "n stop stop_token_ids ignore_eos prompt_logprobs logprob_token_ids"),
    **_rules(HONOURED, "response_format structured_outputs guided_json guided_regex"),
    **_rules(HONOURED, "guided_choice guided_grammar guided_json_object"),
    **_rules(LABEL, "guided_decoding_backend detokenize"),
    **_counted("only the form of free white space", "guided_whitespace_pattern"),
    **_counted("parts are sent as blocks end", "stream_interval"),
    **_counted("the thinking is not cut", "thinking_token_budget", -1),
    **_counted("without beams it has no effect", "length_penalty", 1),
    **_counted("a fast tokenizer adds none", "spaces_between_special_tokens", True),
    **_counted("it is for a cut prompt", "truncation_side"),
    **_counted("/inference/v1/generate returns experts", "routed_experts_prompt_start", 0),
    **_refused("beams are not sampled", "use_beam_search", False),
    **_refused("a stop string is not part of the answer", "include_stop_str_in_output", False),
    **_refused("use return_token_ids for special tokens", "skip_special_tokens", True),
    **_refused("a prompt is never cut", "truncate_prompt_tokens"),
    **_refused("use logit_bias", "allowed_token_ids"),
    **_refused("use logit_bias", "bad_words", []),
    **_refused("code of a client does not run here", "logits_processors", []),
    **_refused("code of a client does not run here", "vllm_xargs extra_args", {}),
    **_refused("repetitions do not end an answer", "repetition_detection"),
    **_refused("answers have no watermark", "watermarking", False),
}
_OUTPUT = _rules(
    HONOURED,
    "stream stream_options logprobs return_token_ids return_tokens_as_token_ids",
)
_TEMPLATE = _rules(GUESTS, "chat_template_kwargs")
_OTHER_TEMPLATE = {
    **_refused("set it for the server: --chat-format, data.chat_format", "chat_template"),
    **_refused("the server prepares images", "media_io_kwargs mm_processor_kwargs", {}),
}
_NO_MEDIA = {
    **_refused("answers are texts", "audio image"),
    **_refused("answers are not moderated", "moderation"),
}

CHAT: Mapping[str, FieldRule] = {
    **_LABELS,
    **_SAMPLING,
    **_OUTPUT,
    **_TEMPLATE,
    **_OTHER_TEMPLATE,
    **_ELSEWHERE,
    **_NO_MEDIA,
    **_rules(LABEL, "store"),
    **_rules(GUESTS, "reasoning_effort"),
    **_rules(HONOURED, "messages max_tokens max_completion_tokens top_logprobs tools"),
    **_rules(HONOURED, "tool_choice parallel_tool_calls continue_final_message"),
    **_rules(HONOURED, "add_generation_prompt"),
    **_counted("no model here has such a level", "verbosity"),
    **_counted("nothing is guessed in advance", "prediction"),
    **_counted("the reasoning is always returned", "include_reasoning", True),
    **_counted("use return_token_ids, or /detokenize", "return_prompt_text", False),
    **_refused("answers are texts", "modalities", ["text"]),
    **_refused("the server does not search", "web_search_options"),
    **_refused("use tools", "functions", []),
    **_refused("use tool_choice", "function_call", "none", "auto"),
    **_refused("the client has its own messages", "echo", False),
    **_refused("the chat template writes them", "add_special_tokens", False),
    **_refused("write them into a message", "documents", []),
}
"""Fields of /v1/chat/completions."""
TEXT: Mapping[str, FieldRule] = {
    **_LABELS,
    **_SAMPLING,
    **_OUTPUT,
    **_ELSEWHERE,
    **_rules(HONOURED, "prompt max_tokens max_completion_tokens echo add_special_tokens"),
    **_refused("answers follow their prompt", "suffix", ""),
    **_refused("use n", "best_of", 1),
    **_refused("send the prompt's text or token ids", "prompt_embeds"),
}
"""Fields of /v1/completions."""
RESPONSES: Mapping[str, FieldRule] = {
    **_SAMPLING,
    **_refused("use /v1/chat/completions", "n", 1),
    **_refused("use /v1/chat/completions", "prompt_logprobs logprob_token_ids"),
    **_LABELS,
    **_TEMPLATE,
    **_OTHER_TEMPLATE,
    **_ELSEWHERE,
    **_NO_MEDIA,
    **_rules(LABEL, "client_metadata access_programs"),
    **_rules(GUESTS, "reasoning"),
    **_rules(HONOURED, "input instructions include max_output_tokens parallel_tool_calls"),
    **_rules(HONOURED, "previous_response_id store stream stream_options text tool_choice"),
    **_rules(HONOURED, "tools max_tokens max_completion_tokens"),
    **_counted("it limits tools of a server, which are refused", "max_tool_calls"),
    **_counted("a prompt is never cut: one that is too long is refused", "truncation", "disabled"),
    **_counted("a prompt is never shortened", "context_management", []),
    **_counted("no model here has such a level", "verbosity"),
    **_counted("the reasoning is always returned", "include_reasoning", True),
    **_refused("the answer is returned by the call", "background", False),
    **_refused("the answer is returned by the call", "background_options"),
    **_refused("use previous_response_id, or input items", "conversation"),
    **_refused("prompts are not stored: send their text", "prompt"),
    **_refused("use /v1/chat/completions", "top_logprobs", 0),
    **_refused("use input items", "previous_input_messages"),
    **_refused("use return_token_ids of other paths", "enable_response_messages", False),
}
"""Fields of /v1/responses."""
MESSAGES: Mapping[str, FieldRule] = {
    **{name: rule for name, rule in _LABELS.items() if name != "user"},
    **_TEMPLATE,
    **_ELSEWHERE,
    **_rules(LABEL, "inference_geo betas cache_control diagnostics user_profile_id"),
    **_rules(LABEL, "workspace_id billing_policy fallback_credit_token"),
    **_rules(GUESTS, "temperature top_p top_k thinking"),
    **_rules(HONOURED, "messages system max_tokens stop_sequences stream tools tool_choice"),
    **_rules(HONOURED, "output_config output_format"),
    **_counted("there is one speed", "speed", "standard"),
    **_counted("there is one model", "fallbacks", []),
    **_counted("a prompt is never shortened", "context_management compaction"),
    **_refused("answers have no watermark", "watermarking", False),
    **_refused("code of a client does not run here", "vllm_xargs", {}),
    **_refused("tools run at the client", "container"),
    **_refused("tools run at the client", "mcp_servers", []),
    **_refused("send all messages of a conversation", "thread"),
}
"""Fields of /v1/messages and /v1/messages/count_tokens."""
GENERATE: Mapping[str, FieldRule] = {
    **_LABELS,
    **_ELSEWHERE,
    **_rules(HONOURED, "token_ids sampling_params return_sampling_mask return_token_ids"),
    **_rules(HONOURED, "request_id"),
    **_counted("tokens are not parsed", "reasoning_ended reasoning_parser_kwargs output_mode"),
    **_counted("positions are counted in tokens", "token_offsets"),
    **_refused("use /v1/completions for a stream", "stream", False),
    **_refused("use /v1/completions for a stream", "stream_options"),
    **_refused("images are read by /v1/chat/completions", "features content_parts", []),
}
"""Fields of /inference/v1/generate."""
SAMPLING_PARAMS: Mapping[str, FieldRule] = {
    **_SAMPLING,
    **_rules(HONOURED, "max_tokens max_completion_tokens logprobs"),
    **_rules(HONOURED, "routed_experts_prompt_start"),
    **_rules(LABEL, "skip_special_tokens output_kind output_text_buffer_length skip_clone"),
    **_rules(LABEL, "skip_reading_prefix_cache trace_decode_token_ids"),
    **_refused("log-probs are a list for each position", "flat_logprobs", False),
    **_refused("use logprob_token_ids", "prompt_logprob_token_ids"),
    **_refused("prompt_logprobs cover the whole prompt", "prompt_logprob_start", 0),
}
"""Fields of sampling_params of /inference/v1/generate."""
_COMMON = _rules(LABEL, "model")
TOKENIZE: Mapping[str, FieldRule] = {
    **_COMMON,
    **_TEMPLATE,
    **_OTHER_TEMPLATE,
    **_rules(HONOURED, "prompt messages tools add_special_tokens return_token_strs"),
    **_rules(HONOURED, "add_generation_prompt continue_final_message"),
}
"""Fields of /tokenize, with a prompt or with messages."""
DETOKENIZE: Mapping[str, FieldRule] = {**_COMMON, **_rules(HONOURED, "tokens")}
"""Fields of /detokenize."""
TABLES: Mapping[str, Mapping[str, FieldRule]] = {
    "chat": CHAT,
    "completions": TEXT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "generate": GENERATE,
    "sampling_params": SAMPLING_PARAMS,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}
"""The tables, by the end of their path."""


def table_lines() -> Iterator[str]:
    """Yield the lines of the whole table: a row for fields of the same paths and meaning."""
    yield "| fields | paths | meaning |"
    yield "| --- | --- | --- |"
    paths: dict[tuple[str, str], list[str]] = {}
    for path, rules in TABLES.items():
        for name, rule in rules.items():
            meaning = rule.use + (f": {rule.note}" if rule.note else "")
            if rule.neutral:
                usual = " or ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
                meaning += f"; {usual} has no effect"
            paths.setdefault((meaning, name), []).append(path)
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (meaning, name), named in paths.items():
        rows.setdefault((meaning, tuple(named)), []).append(f"`{name}`")
    for (meaning, where), names in sorted(rows.items()):
        yield f"| {', '.join(sorted(names))} | {', '.join(where)} | {meaning} |"


def summary_lines() -> Iterator[str]:
    """Yield the lines of the table in docs/endpoint.md: a row for each use without an
    error for the client. A field of several uses has its paths in brackets."""
    by_name: dict[str, dict[FieldUse, list[str]]] = {}
    for path, rules in TABLES.items():
        for name, rule in rules.items():
            by_name.setdefault(name, {}).setdefault(rule.use, []).append(path)
    yield "| | fields |"
    yield "| --- | --- |"
    for use in (GUESTS, COUNTED):
        names = (
            f"`{name}`" + (f" ({', '.join(uses[use])})" if len(uses) > 1 else "")
            for name, uses in sorted(by_name.items())
            if use in uses
        )
        yield f"| **{use}** | {', '.join(names)} |"


if __name__ == "__main__":
    for line in table_lines():
        print(line)

"""The tables of request fields: complete for the clients' types, and read by the code."""

from pathlib import Path

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as Beta
from anthropic.types.message_create_params import MessageCreateParamsBase as Messages
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
from openai.types.completion_create_params import CompletionCreateParamsBase as Text
from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.request_fields import (
    TABLES,
    FieldRule,
    FieldUse,
    summary_lines,
    table_lines,
)

VLLM = {
    "chat": "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt "
    "chat_template chat_template_kwargs continue_final_message documents ec_transfer_params echo "
    "ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty "
    "logprob_token_ids media_io_kwargs min_p min_tokens mm_payload mm_processor_kwargs priority "
    "prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id "
    "return_mm_kwargs return_prompt_text return_token_ids return_token_offsets "
    "return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens "
    "spaces_between_special_tokens stop_token_ids stream_interval structured_outputs "
    "thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs "
    "watermarking",
    "completions": "add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params "
    "ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids "
    "min_p min_tokens mm_payload priority prompt_embeds prompt_logprobs repetition_detection "
    "repetition_penalty request_id response_format return_mm_kwargs return_token_ids "
    "return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id "
    "skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval "
    "structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side "
    "use_beam_search vllm_xargs watermarking",
    "responses": "cache_salt chat_template_kwargs ec_transfer_params enable_response_messages "
    "frequency_penalty ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params "
    "logit_bias media_io_kwargs min_p mm_payload mm_processor_kwargs presence_penalty "
    "previous_input_messages priority repetition_penalty request_id return_mm_kwargs seed "
    "session_id skip_special_tokens stop stop_token_ids structured_outputs top_k vllm_xargs "
    "watermarking",
    "messages": "cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params mm_payload "
    "return_mm_kwargs temperature top_k top_p vllm_xargs watermarking",
    "generate": "cache_salt content_parts ec_transfer_params features kv_transfer_params model "
    "output_mode priority reasoning_ended reasoning_parser_kwargs request_id return_token_ids "
    "sampling_params stream stream_options token_ids token_offsets",
    "sampling_params": "allowed_token_ids bad_words detokenize extra_args flat_logprobs "
    "frequency_penalty ignore_eos include_stop_str_in_output logit_bias logprob_token_ids logprobs "
    "max_tokens min_p min_tokens n output_kind output_text_buffer_length presence_penalty "
    "prompt_logprob_start prompt_logprob_token_ids prompt_logprobs repetition_detection "
    "repetition_penalty routed_experts_prompt_start seed skip_clone skip_reading_prefix_cache "
    "skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream_interval "
    "structured_outputs temperature thinking_token_budget top_k top_p trace_decode_token_ids "
    "watermarking",
    "tokenize": "add_generation_prompt add_special_tokens chat_template chat_template_kwargs "
    "continue_final_message media_io_kwargs messages mm_processor_kwargs model prompt "
    "return_token_strs tools",
    "detokenize": "model tokens",
}
"""Fields of vLLM 0.32's requests, besides the clients'."""
CLIENTS = {
    "chat": (Chat,),
    "completions": (Text,),
    "responses": (Responses,),
    "messages": (Messages, Beta),
}
NEWER = {
    "responses": {"access_programs", "background_options", "image"},  # openai 3.57
    "messages": {"output_format"},  # anthropic before output_config
}
SMALLEST = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "generate": {"token_ids": [5]},
    "sampling_params": {"token_ids": [5], "sampling_params": {}},
    "tokenize": {"prompt": "Hi"},
    "detokenize": {"tokens": [5]},
}


def read(path: str, body: dict) -> object:
    """What the code makes of a body."""
    from jaxrl_async.endpoint.anthropic_messages import messages_call
    from jaxrl_async.endpoint.openai_chat import chat_call
    from jaxrl_async.endpoint.openai_text import text_call
    from jaxrl_async.endpoint.responses_call import responses_call
    from jaxrl_async.endpoint.token_generate import token_call
    from jaxrl_async.endpoint.tokenize_call import detokenize_call, tokenize_call

    readers = {
        "chat": chat_call,
        "completions": text_call,
        "responses": responses_call,
        "messages": messages_call,
        "generate": token_call,
        "sampling_params": token_call,
        "tokenize": tokenize_call,
        "detokenize": detokenize_call,
    }
    return readers[path](body)


@pytest.mark.parametrize("path", sorted(TABLES))
def test_every_field_of_the_clients_has_a_row(path):
    named = set(VLLM[path].split()) | NEWER.get(path, set())
    for kind in CLIENTS.get(path, ()):
        named |= set(kind.__annotations__)
    assert named <= set(TABLES[path]), named - set(TABLES[path])


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, rules in sorted(TABLES.items()) for name in rules]
)
def test_a_field_does_what_its_row_says(path, name):
    """A wrong value of a field that is read is refused by its name; others are taken or refused."""
    rule, body = TABLES[path][name], {**SMALLEST[path]}
    odd = {"odd": {"nested": [1]}}
    record = body
    if path == "sampling_params":
        record = body["sampling_params"] = {}
    if name in record:
        return
    if (path, name) == ("tokenize", "messages"):
        del record["prompt"]
    record[name] = odd
    field = f"sampling_params.{name}" if path == "sampling_params" else name
    if rule.use is FieldUse.REFUSED:
        with pytest.raises(CallRefused, match="is not supported") as refused:
            read(path, body)
        assert refused.value.field == field and rule.note in str(refused.value)
        for neutral in rule.neutral:
            record[name] = neutral
            read(path, body)
    elif rule.use in (FieldUse.LABEL, FieldUse.COUNTED):
        call = read(path, body)
        counted = getattr(getattr(call, "chat", call), "ignored", ())
        assert (field in counted) == (rule.use is FieldUse.COUNTED)
    elif name not in ("chat_template_kwargs", "guided_json"):  # any object is a value
        try:
            read(path, body)
        except CallRefused as refused:
            assert (refused.field or "").startswith(field.split(".")[0]), refused
        else:
            assert path == "tokenize", f"{name} is not read"


def test_a_field_without_a_row_is_refused():
    fields = BodyFields({"a": 1, "b": 1, "c": 0, "d": None}, "inner")
    rules = {
        "a": FieldRule(use=FieldUse.COUNTED),
        "b": FieldRule(use=FieldUse.LABEL),
        "c": FieldRule(use=FieldUse.REFUSED, note="no", neutral=(0,)),
    }
    assert fields.settle(rules) == ("inner.a",)
    with pytest.raises(CallRefused, match=r"inner\.b: is not supported"):
        fields.settle({**rules, "b": FieldRule(use=FieldUse.REFUSED)})
    del rules["b"]
    with pytest.raises(CallRefused, match=r"inner\.b: is not supported"):
        fields.settle(rules)


def test_the_page_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "endpoint.md"
    assert "\n".join(["", *summary_lines(), ""]) in page.read_text("utf-8")


def test_the_whole_table_names_each_field_with_its_paths_and_reason():
    lines = list(table_lines())
    named = {
        (path, name.strip("`"))
        for names, paths, _ in (line[2:-2].split(" | ") for line in lines[2:])
        for name in names.split(", ")
        for path in paths.split(", ")
    }
    assert named == {(path, name) for path, rules in TABLES.items() for name in rules}
    assert "| `best_of` | completions | refused: use n; `1` has no effect |" in lines

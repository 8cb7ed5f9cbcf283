"""What a config.json leaves out: the table against transformers' classes."""

import copy
import json

import pytest

from jaxrl_async.model.families.defaults import DEFAULTS
from jaxrl_async.model.families.family_registry import ALSO, FAMILIES, WRAPPED
from jaxrl_async.model.hf_config import spec_from_hf

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

WHOLE = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6}}
"""Families whose own defaults make no model: numbers that do."""
NAMES = {"num_experts": "num_local_experts"}
"""Keys that a class may write under another name."""
PUBLISHED = {  # text_config as google/gemma-3-*-it has it
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "12b": {
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
SIZES = {  # layers, width, heads, kv heads, head width, vocabulary
    "4b": (34, 2560, 8, 4, 256, 262_208),
    "12b": (48, 3840, 16, 8, 256, 262_208),
    "27b": (62, 5376, 32, 16, 128, 262_208),
}


def filled(said):
    """Return a config.json as transformers writes it after it has read `said`."""
    cls = transformers.CONFIG_MAPPING[said["model_type"]]
    return json.loads(json.dumps(cls.from_dict(copy.deepcopy(said)).to_dict()))


def test_the_table_has_every_family():
    assert DEFAULTS.keys() == FAMILIES.keys()


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_entry_is_what_transformers_takes(family):
    theirs = filled({"model_type": family})
    for key, value in DEFAULTS[family].items():
        there = theirs[key] if key in theirs else theirs[NAMES[key]]
        if isinstance(value, dict):
            assert value.items() <= there.items(), key
        else:
            assert there == value, key


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_key_may_be_left_out(family):
    whole = filled({"model_type": family, **WHOLE.get(family, {})})
    sparse = {"model_type": family, **WHOLE.get(family, {})}
    wrong = [] if spec_from_hf(sparse, "") == spec_from_hf(whole, "") else ["all of them"]
    for key in whole.keys() - sparse.keys():
        said = {k: v for k, v in whole.items() if k != key}
        if spec_from_hf(said, "") != spec_from_hf(filled(said), ""):
            wrong.append(key)
    assert not wrong


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_each_entry_of_nested_rope_parameters_may_be_left_out(family, kind):
    ropes = filled({"model_type": family})["rope_parameters"]
    for key in (None, *ropes[kind]):
        less = {k: v for k, v in ropes[kind].items() if k != key} if key else None
        said = {"model_type": family, "rope_parameters": {**ropes, kind: less}}
        assert spec_from_hf(said, "") == spec_from_hf(filled(said), ""), key


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("family", sorted(f for f, record in FAMILIES.items() if record.routed))
def test_experts_have_the_names_that_the_class_takes(family, name):
    said = {"model_type": family, **WHOLE.get(family, {}), name: 16}
    assert spec_from_hf(said, "").experts == spec_from_hf(filled(said), "").experts


def test_a_number_of_experts_by_another_familys_name_is_left_out():
    assert spec_from_hf({"model_type": "deepseek_v3", "num_experts": 16}, "").experts == 256
    assert spec_from_hf({"model_type": "deepseek_v3", "num_local_experts": 16}, "").experts == 16


@pytest.mark.parametrize("size", PUBLISHED)
def test_gemma_3_is_read_as_published(size):
    text = {"model_type": "gemma3_text", **PUBLISHED[size]}
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
    spec = spec_from_hf(outer, "config.json")
    read = (spec.layers, spec.width, spec.heads, spec.kv_heads, spec.head_dim, spec.vocab)
    assert read == SIZES[size]
    assert (spec.eos_ids, spec.bos_id, spec.pad_id) == ((1, 106), 2, 0)
    theirs = filled(outer)
    assert spec_from_hf(theirs, "config.json") == spec


@pytest.mark.parametrize("outer", sorted(WRAPPED))
def test_a_text_config_without_a_type_is_what_transformers_takes_it_for(outer):
    said = {"model_type": outer, "text_config": {"num_hidden_layers": 3}, "eos_token_id": 7}
    spec = spec_from_hf(said, "config.json")
    theirs = filled(said)["text_config"]
    assert spec.family == theirs["model_type"]
    assert spec == spec_from_hf({**theirs, "eos_token_id": 7}, "config.json")


def test_tokens_of_the_outer_config_count_for_any_inner_type():
    for inner in ("mistral", "ministral3"):
        said = {"model_type": "mistral3", "text_config": {"model_type": inner}, "eos_token_id": 9}
        assert spec_from_hf(said, "config.json").eos_ids == (9,)


def test_null_in_a_file_is_not_left_out():
    assert spec_from_hf({"model_type": "llama", "eos_token_id": None}, "").eos_ids == ()
    assert spec_from_hf({"model_type": "llama"}, "").eos_ids == (2,)


@pytest.mark.parametrize("key", ["pad_token_id", "bos_token_id", "eos_token_id"])
def test_old_files_say_minus_one_for_no_token(key):
    spec = spec_from_hf({"model_type": "llama", key: -1}, "")
    assert {"pad_token_id": spec.pad_id, "bos_token_id": spec.bos_id}.get(key) is None
    assert key != "eos_token_id" or spec.eos_ids == ()


@pytest.mark.parametrize("kind", sorted(ALSO))
def test_other_types_have_the_defaults_of_their_family(kind):
    family = ALSO[kind]
    assert spec_from_hf({"model_type": kind}, "") == spec_from_hf({"model_type": family}, "")

"""Rules that settings must keep to together: each can be broken, and says what to do."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config.function_facts import COMPARED_IN_GROUP, DIVIDED_IN_GROUP
from jaxrl_async.config.load import load
from jaxrl_async.config.rules import RULES, check_rules
from jaxrl_async.config.schema import Config
from jaxrl_async.config.several import section_of
from jaxrl_async.errors import ConfigError
from jaxrl_async.trainer.learning_settings import rows_per_micro_batch

CONFIGS = Path(__file__).parents[2] / "configs"


def sections_checks(section=Config):
    """Return the checks of a section and of all in it, by name."""
    inner = filter(None, map(section_of, section.model_fields.values()))
    found = dict(section.checks())
    for name, check in ((n, c) for one in inner for n, c in sections_checks(one).items()):
        assert found.setdefault(name, check) is check, f"two checks are called {name}"
    return found


def test_impossible_combinations_name_both_keys_and_a_way_out(write, refusal):
    message = refusal(write("staleness: {max_staleness: 0, lookahead: 2}"))
    assert "staleness.lookahead (2)" in message
    assert "Set staleness.lookahead=0" in message
    message = refusal(write("buffer: {reuse: 3}\nstaleness: {max_staleness: 1}"))
    assert "buffer.reuse (3)" in message and "raise staleness.max_staleness" in message
    message = refusal(write("buffer: {select: recent}"))
    assert "staleness.lookahead=0" in message and "set buffer.select=strict" in message
    message = refusal(write("staleness: {max_staleness: 0, when_too_old: drop}"))
    assert "Set staleness.when_too_old=wait" in message and "max_staleness=1" in message
    message = refusal(write("staleness: {max_staleness: 1, lookahead: 8, adapt: ess}"))
    assert "can be 1 at least" in message and "set staleness.adapt=none" in message
    assert "1 at least" in refusal(write("staleness: {when_too_old: drop, adapt: ess}"))


@pytest.mark.full
@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 3), st.data())
def test_the_lowest_staleness_to_aim_at_is_the_smallest_that_fills_a_step(s, p, reuse, data):
    lookahead = data.draw(st.integers(0, s * p))
    sections = {
        "staleness": {"max_staleness": s, "lookahead": lookahead},
        "algorithm": {"groups_per_step": p},
        "buffer": {"reuse": reuse},
    }
    fills = [v for v in range(20) if (v + 1) * p - reuse * lookahead >= reuse * p]
    if s >= fills[0]:
        assert Config(**sections).lowest_limit == fills[0]
    else:
        with pytest.raises(ConfigError, match="could never be filled"):
            check_rules(Config(**sections))


@given(st.integers(1, 12), st.integers(2, 200), st.integers(1, 300), st.integers(1, 4), st.data())
def test_a_row_that_shares_prompts_holds_a_group_if_a_micro_batch_does(
    members, most, new, by, data
):
    shards, context = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2]))
    longest, budget = 4 * most, shards * 4 * most * by
    config = Config(
        mesh={"trainer": {"fsdp": shards, "context": context}},
        sampler={"max_length": longest, "max_new_tokens": new},
        algorithm={"group_size": members},
        trainer={"share_prefixes": True, "micro_batch_tokens": budget},
    )
    row, share = config.row_length, budget // shards
    assert longest <= row <= share, "a device's part of a micro-batch"
    assert context == 1 or row % (2 * context) == 0
    # the longest context, and each further answer after a repeated token
    group = longest + (members - 1) * (1 + min(new, longest))
    most = min(share, max(2048, 2 * longest))
    if group + 2 * context <= most:
        assert row >= group
    longer = row + (2 * context if context > 1 else 1)
    assert longer > most or share // row * longer > share, "they fill a micro-batch"
    rows = rows_per_micro_batch(budget, row, shards)
    assert rows * row <= budget and rows % shards == 0
    assert config.longest_example == longest


def test_a_row_shares_no_more_than_a_mask_allows_and_only_where_it_is_asked_to():
    wide = {"sampler": {"max_length": 4096, "max_new_tokens": 4000}}
    budget = {"micro_batch_tokens": 1_048_576}
    assert Config(**wide, trainer=budget | {"share_prefixes": True}).row_length == 8192
    short = {"sampler": {"max_length": 512, "max_new_tokens": 448}}
    assert Config(**short, trainer=budget | {"share_prefixes": True}).row_length == 2048
    turns = {"sampler": {"max_length": 512, "max_new_tokens": 8}, "algorithm": {"group_size": 3}}
    many_turns = Config(**turns, task="calculator", trainer=budget | {"share_prefixes": True})
    assert many_turns.row_length >= 512 + 2 * 513, "an answer of several turns may be as long"
    longer = {"sampler": {"max_length": 10_000}, "trainer": budget | {"share_prefixes": True}}
    assert Config(**longer).row_length == 10_000
    assert Config(**wide, trainer=budget).row_length == 4096
    set_by_hand = budget | {"share_prefixes": True, "row_length": 5000}
    assert Config(**wide, trainer=set_by_hand).row_length == 5000
    others = Config(run={"job": "sft"}, **wide, trainer=budget | {"share_prefixes": True})
    assert others.row_length == 4096


def test_where_what_is_too_old_is_dropped_the_window_may_be_any():
    dropping = {"when_too_old": "drop", "max_staleness": 2, "lookahead": 99, "adapt": "ess"}
    config = Config(staleness=dropping, buffer={"reuse": 3})
    check_rules(config)
    assert config.lowest_limit == 1


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.kl_target=0.1"], "has no effect without algorithm.kl_coefficient above 0"),
        (["reference.ema=0.9"], "reference.ema (0.9) has no effect without algorithm.kl_c"),
        (["critic.path=somewhere"], "has no effect without algorithm.advantage=gae"),
        (["algorithm.dynamic_sampling=true", "algorithm.group_size=1"], "always has equal rewards"),
        (["algorithm.loss=topr", "algorithm.anchor=proximal"], "whole ratio to the policy that"),
        (["algorithm.loss=vespo", "algorithm.anchor=proximal"], "loss=vespo weighs an answer"),
        (
            ["algorithm.supervised_coefficient=0.1", "sampler.temperature=0.7"],
            "demonstrations need temperature 1",
        ),
        (["reward.function_weight=0"], "has no effect without reward.model"),
        (
            ["algorithm.advantage=gdpo", "reward.model=x", "reward.model_weight=2"],
            "weighs the parts",
        ),
        (["algorithm.kl=full", "algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"], "kl_in"),
        (["teacher.source=path"], "do not match"),
        (
            [
                "teacher.source=self",
                "teacher.form=loss",
                "algorithm.kl=full",
                "algorithm.kl_coefficient=0.1",
            ],
            "allows one such comparison",
        ),
        (["mesh.sampler.context=2"], "mesh.sampler.context (2) must be 1"),
        (
            ["mesh.trainer.context=8", "trainer.row_length=136"],
            "multiple of 2 * mesh.trainer.context (16)",
        ),
        (
            ["sampler.matmul=int8", "weights.dtype=float8_e4m3fn"],
            "multiplies with int8 weights, and weights.dtype=float8_e4m3fn has none",
        ),
        (
            ["sampler.matmul=int8", "model.lora={rank: 2, base: nf4}"],
            "multiplies with int8 weights, and model.lora.base=nf4 has none",
        ),
        (["trainer.offload=[reference]"], "trainer.offload=reference needs a reference"),
        (["model.architecture.experts=4"], "exactly with family=qwen3_moe"),
        (["model.architecture.head_dim=3"], "a whole number >= 1 and a multiple of 2"),
        (
            ["model.architecture.family=qwen3_moe", "model.architecture.experts=1"],
            "experts_per_token (2) must be at most",
        ),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_settings_that_would_silently_do_nothing_are_refused(overrides, told, refusal):
    assert told in refusal(CONFIGS / "addition.yaml", *overrides)


NOTHING_LEARNED = [
    *(
        (["algorithm.group_size=1", f"algorithm.advantage={name}"], "all advantages would be 0")
        for name in sorted(COMPARED_IN_GROUP)
    ),
    (["algorithm.group_size=1", "teacher.source=self"], "for distillation alone teacher.rewards=0"),
    (["sampler.temperature=0"], "leave one token to sample"),
    (["sampler.top_k=1"], "leave one token to sample"),
    (["algorithm.kl=k1", "algorithm.kl_coefficient=0.1"], "expected gradient of 0"),
    (["trainer.warmup_steps=121"], "must be at most run.steps (120)"),
    (
        ["trainer.warmup_steps=116", "algorithm.advantage=gae", "critic.warmup_steps=5"],
        "must be at most run.steps less critic.warmup_steps (115)",
    ),
    (
        ["algorithm.minibatches=129"],
        "must be at most algorithm.groups_per_step * group_size (128): some minibatches",
    ),
    (["algorithm.group_size=1", "algorithm.advantage=discounted"], "tokens of a group"),
    (
        [
            "algorithm.group_size=1",
            "algorithm.groups_per_step=1",
            "algorithm.advantage=reinforce_pp",
        ],
        "tokens of a step",
    ),
    (
        [
            "algorithm.group_size=1",
            "algorithm.groups_per_step=1",
            "algorithm.advantage={discounted_batch: {gamma: 1.0}}",
        ],
        "tokens of a step",
    ),
    (
        ["algorithm.advantage=gae", "critic.warmup_steps=120"],
        "must be below run.steps (120): no steps would be left to train the policy",
    ),
    (
        ["teacher.source=self", "teacher.coefficient=0"],
        "teacher.coefficient = 0 is not allowed; it must be a number > 0",
    ),
    (
        ["teacher.source=self", "teacher.rewards=0", "algorithm.dynamic_sampling=true"],
        "which teacher.rewards=0 ignores",
    ),
    (["algorithm.shaping=[{overlong_filter: {max_tokens: 48}}]"], "it would never act"),
    (
        ["algorithm.shaping=[{soft_overlong: {max_tokens: 60, cache_tokens: 12}}]"],
        "more than 48 tokens, and sampler.max_new_tokens allows 48",
    ),
    *(
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", f"algorithm.advantage={n}"],
            "amplifies the KL of a group of equal rewards",
        )
        for n in sorted(DIVIDED_IN_GROUP)
    ),
]


@pytest.mark.parametrize(
    ("overrides", "told"), NOTHING_LEARNED, ids=["-".join(words) for words, _ in NOTHING_LEARNED]
)
def test_settings_with_which_nothing_or_noise_is_learned_are_refused(overrides, told, refusal):
    assert told in refusal(CONFIGS / "addition.yaml", *overrides)


def test_a_broken_rule_of_one_section_is_reported_beside_a_wrong_field_of_another(write, refusal):
    message = refusal(write("run: {steps: 0}\nreward: {function: [exact, exact]}\n"))
    assert message.startswith("2 problems:") and "run.steps" in message and "reward" in message


def test_all_broken_rules_are_reported_at_once(write, refusal):
    path = write("algorithm: {group_size: 1, entropy_clip: 1.0}\nsampler: {temperature: 0}\n")
    message = refusal(path, "buffer.select=recent", "reference.ema=0.5", "run.job=rl")
    assert message.startswith("5 problems:")
    for told in (
        "entropy_clip",
        "group_size=1",
        "temperature",
        "buffer.select=recent",
        "reference.ema",
    ):
        assert told in message


VLLM = {"engine": "vllm", "engine_urls": ("http://a:8000",)}
BROKEN: dict[str, dict | tuple[dict, ...]] = {
    "colocated_samplers_are_threads": {"mesh": {"colocated": True, "samplers_in": "processes"}},
    "the_folder_transfer_has_a_folder": {
        "mesh": {"samplers_in": "external"},
        "remote": {"transfer": "folder"},
    },
    "weights_have_a_port_of_their_own": {
        "mesh": {"samplers_in": "external"},
        "remote": {"listen": "127.0.0.1:7077", "data_port": 7077},
    },
    "encryption_reaches_the_weights": {
        "mesh": {"samplers_in": "external"},
        "remote": {
            "transfer": "device",
            "tls_certificate": "a.pem",
            "tls_key": "key.pem",
            "tls_authority": "ca.pem",
        },
    },
    "tls_has_all_its_files": {
        "mesh": {"samplers_in": "external"},
        "remote": {"tls_key": "key.pem"},
    },
    "a_sampler_has_no_context_axis": {"mesh": {"sampler": {"context": 2}}},
    "colocated_slices_have_one_size": {
        "mesh": {"colocated": True, "trainer": {"data": 2}},
        "distributed": {"detect": False},
    },
    "one_sampler_is_colocated": {"mesh": {"colocated": True, "samplers": 2}},
    "experts_belong_to_their_family": {"model": {"architecture": {"experts": 2}}},
    "query_heads_share_kv_heads_evenly": {"model": {"architecture": {"heads": 3}}},
    "a_students_top_tokens_are_looked_at": {"teacher": {"source": "self", "top_k_of": "student"}},
    "a_teacher_at_a_path_has_one": {"teacher": {"source": "path"}},
    "teachers_are_those_of_the_source": {"teachers": {"a": {"path": "x"}}},
    "a_named_teacher_has_one_source": {"teacher": {"source": "teachers"}, "teachers": {"a": {}}},
    "a_teacher_can_be_the_reference": {
        "algorithm": {"kl_coefficient": 0.1},
        "reference": {"teacher": "a"},
    },
    "servers_give_what_the_loss_compares": {
        "teacher": {"source": "teachers", "form": "loss"},
        "teachers": {"a": {"path": "x"}},
    },
    "a_reward_function_takes_one_weight": {"reward": {"function": {"exact": {"wieght": 1}}}},
    "reward_functions_are_listed_once": {"reward": {"function": ["exact", "exact"]}},
    "something_gives_rewards": {"reward": {"function": "none"}},
    "the_reference_moves_in_one_way": {
        "algorithm": {"kl_coefficient": 0.1},
        "reference": {"refresh_every": 2, "ema": 0.5},
    },
    "prompts_have_one_source": {"data": {"addition": None}},
    "a_step_can_be_filled": {"staleness": {"lookahead": 9}},
    "dropping_leaves_rollouts_a_chance": {
        "staleness": {"when_too_old": "drop", "max_staleness": 0}
    },
    "an_adapting_staleness_has_room": {"staleness": {"adapt": "ess", "max_staleness": 0}},
    "a_selection_has_a_choice": {"buffer": {"select": "recent"}},
    "context_devices_share_a_row_evenly": {"mesh": {"trainer": {"context": 3}}},
    "records_have_the_needed_answers": {"data": {"jsonl": {"path": "x", "answer_field": None}}},
    "sft_needs_no_warm_start": {"run": {"job": "sft"}, "warm_start": {"steps": 1}},
    "products_in_eight_bits_take_weights_in_eight_bits": {
        "sampler": {"matmul": "int8"},
        "weights": {"dtype": "float8_e4m3fn", "probe": False},
    },
    "rounding_needs_bfloat16_weights": {"trainer": {"rounding": "nearest"}},
    "an_offloaded_reference_is_looked_up_by_token": {"trainer": {"offload": ("reference",)}},
    "one_whole_distribution_is_compared": {
        "algorithm": {"kl": "full", "kl_coefficient": 0.1},
        "teacher": {"source": "self", "form": "loss"},
    },
    "a_whole_kl_is_in_the_loss": {
        "algorithm": {"kl": "full", "kl_coefficient": 0.1, "kl_in": "reward", "advantage": "rloo"}
    },
    "masked_sampling_compares_no_whole_distribution": {
        "algorithm": {"kl": "full", "kl_coefficient": 0.1},
        "sampler": {"top_p": 0.9},
    },
    "a_kl_in_the_loss_has_a_gradient": {"algorithm": {"kl": "k1", "kl_coefficient": 0.1}},
    "a_kl_in_the_reward_is_not_blown_up": {"algorithm": {"kl_in": "reward", "kl_coefficient": 0.1}},
    "each_component_has_an_effect": {
        "algorithm": {"losses": {"a": {"loss": "nll", "coefficient": 0}}}
    },
    "one_kl_looks_at_tokens": {
        "algorithm": {"kl": "full", "kl_coefficient": 0.1, "losses": {"a": {"loss": "kl"}}}
    },
    "answers_are_sampled_at_random": {"sampler": {"temperature": 0}},
    "a_loss_of_whole_ratios_has_the_behavior_as_anchor": {
        "algorithm": {"loss": "topr", "anchor": "proximal"}
    },
    "a_group_has_answers_to_compare": (
        {"algorithm": {"group_size": 1}},
        {"algorithm": {"min_members": 1}},
        {"pairs": {"loss": "dpo"}, "algorithm": {"min_members": 1}},
        {
            "algorithm": {
                "min_members": 1,
                "dynamic_sampling": True,
                "advantage": "reinforce_pp",
            }
        },
    ),
    "tokens_have_different_advantages": {"algorithm": {"group_size": 1, "advantage": "discounted"}},
    "dynamic_sampling_keeps_some_groups": {
        "algorithm": {"group_size": 1, "dynamic_sampling": True, "advantage": "reinforce_pp"}
    },
    "dynamic_sampling_selects_by_trained_rewards": {
        "algorithm": {"dynamic_sampling": True},
        "teacher": {"source": "self", "rewards": 0},
    },
    "demonstrations_are_trained_at_temperature_1": {
        "algorithm": {"supervised_coefficient": 0.1},
        "sampler": {"temperature": 0.5},
    },
    "each_run_serves_its_own_metrics": {
        "model": {"lora": {"rank": 4}},
        "metrics": {"prometheus": "127.0.0.1:9100"},
        "runs": {"a": {}, "b": {}},
    },
    "runs_share_model_and_samplers": {
        "model": {"lora": {"rank": 4}},
        "runs": {"a": {"model": {"dtype": "bfloat16"}}},
    },
    "the_base_of_an_adapter_stays_as_it_was_loaded": {
        "model": {"path": "somewhere", "lora": {"rank": 4}},
        "warm_start": {"steps": 10},
    },
    "an_adapter_leaves_routers_as_they_are": {
        "model": {"lora": {"rank": 4}, "balance": {"loss": 0.01}}
    },
    "a_correction_is_not_rounded_away": {
        "model": {"balance": {"bias_rate": 0.001}, "param_dtype": "bfloat16"},
        "trainer": {"rounding": "nearest"},
    },
    "trainer_and_samplers_share_a_quantised_base": {
        "model": {"lora": {"rank": 4, "base": "nf4"}},
        "weights": {"dtype": "int8", "probe": False},
    },
    "continuations_are_compared": {
        "algorithm": {"pivots": {"continuations": 2}, "advantage": "reinforce"},
    },
    "an_engine_has_addresses": {"sampler": {"engine_urls": ("http://a:8000",)}},
    "an_engine_has_devices_of_its_own": {"sampler": VLLM},
    "an_engines_tokens_are_corrected": {
        "sampler": VLLM,
        "mesh": {"samplers_in": "external"},
        "algorithm": {"loss": "gpg"},
    },
    "a_pairs_loss_learns_from_pairs": {"pairs": {"loss": "kto"}},
    "a_judge_has_one_rubric": {"reward": {"judge": {"model": "m"}}},
    "a_judges_scale_rises": {
        "reward": {"judge": {"model": "m", "rubric": "x", "scale": (1.0, 1.0)}}
    },
    "a_judges_call_keeps_its_form": {
        "reward": {"judge": {"model": "m", "rubric": "x", "extra": {"n": 2}}}
    },
    "each_seat_is_filled_once": {"task": "nim", "seats": {"second": {}}},
    "an_endpoint_names_its_model": {
        "task": "nim",
        "seats": {"second": {"endpoint": "http://h/v1"}},
    },
    "seats_are_of_a_run_that_plays": {"seats": {"second": "policy"}},
    "each_evaluation_by_name_can_be_made": {"evals": {"x": {"samples": 2}}},
    "opponents_have_devices": {
        "task": "nim",
        "seats": {"second": "initial"},
        "mesh": {"samplers_in": "processes"},
    },
    "a_ranking_judge_has_answers_to_compare": {
        "reward": {"judge": {"model": "m", "rubric": "x", "mode": "rank"}},
        "algorithm": {"group_size": 1, "advantage": "reinforce"},
    },
    "a_judge_judges_something": {"reward": {"judge": {"model": "m", "weight": 0.0}}},
    "process_rewards_come_from_somewhere": {"reward": {"process": {"function": "judge"}}},
    "own_layers_have_no_family": {
        "model": {"decoder": "mine.py:Mine", "architecture": {"family": "llama"}}
    },
    "gdpo_weighs_the_parts_itself": {
        "algorithm": {"advantage": "gdpo"},
        "reward": {"function": {"exact": {"weight": 2}}},
    },
    "folders_that_are_written_are_on_this_machine": {"run": {"dir": "gs://bucket/runs"}},
    "traced_steps_are_made": {"run": {"profile": (2, 2)}},
    "jetstream_samples_in_one_way": {"sampler": {"engine": "jetstream"}},  # eval.temperature
    "a_copy_goes_to_an_address": {"run": {"copy_to": "s3://key:secret@bucket/runs"}},
    "a_bucket_holds_all_that_a_resumed_run_needs": {
        "checkpoint": {"dir": "gs://bucket/runs"},
        "warm_start": {"steps": 2},
    },
    "a_copy_and_checkpoints_are_separate": {
        "run": {"name": "a", "copy_to": "gs://bucket/runs"},
        "checkpoint": {"dir": "gs://bucket/runs/"},
    },
    "what_is_continued_is_not_replaced": {"run": {"resume_or_start": True, "overwrite": True}},
    "shaping_by_length_can_act": {
        "algorithm": {"shaping": ({"overlong_filter": {"max_tokens": 64}},)}
    },
    "each_task_could_be_a_run_of_its_own": {"tasks": {"a": {"sampling": {"temperature": 0.0}}}},
    "tasks_replace_the_single_task": {"task": "calculator", "tasks": {"a": {}}},
    "shared_settings_of_tasks_are_set_once": {
        "tasks": {"a": {"data": {"tokenizer": "x"}}, "b": {}}
    },
    "process_rewards_have_one_age": {
        "tasks": {
            "a": {"reward": {"process": {"function": "x.py:f", "max_age": 1}}},
            "b": {"reward": {"process": {"function": "x.py:f"}}},
        }
    },
    "a_step_is_filled_by_tasks_that_the_trainer_waits_for": {
        "tasks": {"a": {"trainer_waits": False}}
    },
    "several_tasks_have_no_opponents": {
        "tasks": {"a": {}},
        "endpoint": {"external_agents": True},
    },
    "tasks_of_different_temperatures_compare_tokens": {
        "tasks": {"a": {"sampling": {"temperature": 0.5}}, "b": {}},
        "algorithm": {"kl": "full", "kl_coefficient": 0.1},
    },
    "shared_settings_of_tasks_are_read_by_one": {
        "tasks": {"a": {"reward": {"timeout_s": 9.0}}},
        "reward": {"timeout_s": 5.0},
    },
    "unmatched_tokens_are_those_of_one_tokenizer": {
        "teacher": {"source": "teachers", "form": "loss", "top_k": 4, "unmatched_weight": 0.5},
        "teachers": {
            name: {"url": "http://x/v1", "model": "m", "tokenizer": name} for name in ("a", "b")
        },
    },
    "loss_components_are_of_tasks_of_the_run": {
        "tasks": {"a": {}},
        "algorithm": {"losses": {"x": {"loss": "nll", "tasks": ("b",)}}},
    },
    "teachers_on_samplers_compute_at_one_temperature": {
        "tasks": {"a": {"sampling": {"temperature": 0.5}}, "b": {}},
        "teacher": {"source": "teachers"},
        "teachers": {"t": {"path": "x", "chips": "sampler"}},
    },
    "some_task_has_the_samplers_settings": {
        "tasks": {"a": {"sampling": {"top_k": 3}}},
        "sampler": {"top_k": 5},
    },
    "a_task_is_left_out_of_a_warm_start": {"tasks": {"a": {"warm_start": False}}},
    "each_evaluation_names_one_of_several_tasks": {
        "tasks": {"a": {}, "b": {}},
        "evals": {"x": {}},
    },
    "settings_are_within_their_limits": (
        {
            "mesh": {"samplers_in": "processes", "samplers": 2},
            "remote": {"min_samplers": 3},
        },
        {"model": {"architecture": {"family": "qwen3_moe", "experts": 1}}},
        {"data": {"max_prompt_tokens": 128}},
        {"sampler": {"max_new_tokens": 128}},
        {"trainer": {"row_length": 127}},
        {"trainer": {"micro_batch_tokens": 127}},
        {"trainer": {"warmup_steps": 101}},
        {
            "algorithm": {
                "baseline": "unmasked",
                "least_compared": 9,
                "shaping": ("mask_truncated",),
            }
        },
        {"algorithm": {"minibatches": 65}},
        {
            "algorithm": {"advantage": "gae"},
            "critic": {"warmup_steps": 100},
        },
        {"reward": {"judge": {"model": "m", "rubric": "x", "patience_s": 595.0}}},
        {"reward": {"process": {"function": "x.py:f", "max_age_s": 600.0}}},
        {"tasks": {"a": {"max_staleness": 5}}},
        {"algorithm": {"group_size": 4, "min_members": 5}},
        {"reward": {"judge": {"model": "m", "rubric": "x", "timeout_s": 301.0}}},
        {
            "teacher": {"source": "teachers"},
            "teachers": {"a": {"url": "http://x/v1", "model": "m", "max_wait_s": 600.0}},
        },
        {"tasks": {"a": {"sampling": {"max_new_tokens": 65}}}},
        {"evals": {"x": {"max_new_tokens": 65}}},
    ),
    "a_replay_can_be_followed": (
        {
            "run": {"replay_schedule": "schedule.jsonl"},
            "mesh": {"samplers_in": "external"},
        },
        {"run": {"resume": True, "replay_schedule": "x"}},
        {
            "run": {"replay_schedule": "x"},
            "algorithm": {"oversample": 2},
        },
        {
            "run": {"replay_schedule": "schedule.jsonl"},
            "tasks": {"a": {"max_in_flight": 3}},
        },
        {
            "run": {"replay_schedule": "x"},
            "sampler": {"engine": "jetstream"},
            "eval": {"temperature": 1.0},
        },
    ),
    "several_runs_can_be_one": (
        {"runs": {"a": {}}},
        {
            "model": {"lora": {"rank": 4}},
            "mesh": {"colocated": True},
            "runs": {"a": {}},
        },
        {
            "model": {"lora": {"rank": 4}},
            "run": {"callbacks": ["own.py:Upload"]},
            "runs": {"a": {}},
        },
        {"model": {"lora": {"rank": 4}}, "mesh": {"samplers_in": "processes"}, "runs": {"a": {}}},
        {"model": {"lora": {"rank": 4}}, "distributed": {"num_processes": 2}, "runs": {"a": {}}},
        {"model": {"lora": {"rank": 4}}, "run": {"replay_schedule": "x"}, "runs": {"a": {}}},
        {"model": {"lora": {"rank": 4}}, "run": {"job": "sft"}, "runs": {"a": {}}},
        {
            "model": {"lora": {"rank": 4}},
            "task": "nim",
            "seats": {"second": "policy"},
            "runs": {"a": {}},
        },
    ),
    "an_engine_supports_the_settings": (
        {
            "model": {"lora": {"rank": 4}},
            "sampler": VLLM,
            "mesh": {"samplers_in": "external"},
        },
        {
            "algorithm": {"pivots": {"continuations": 2}},
            "sampler": VLLM,
            "mesh": {"samplers_in": "external"},
        },
        {
            "sampler": VLLM,
            "mesh": {"samplers_in": "external"},
            "model": {"decoder": "mine.py:Mine"},
        },
        {
            "sampler": {**VLLM, "slots": None},
            "mesh": {"samplers_in": "external"},
        },
        {"sampler": VLLM | {"top_p": 0.9}, "mesh": {"samplers_in": "external"}},
        {"sampler": VLLM, "mesh": {"samplers_in": "external"}, "algorithm": {"keep_routing": True}},
        {"sampler": VLLM, "mesh": {"samplers_in": "external"}, "weights": {"dtype": "int8"}},
        {"sampler": VLLM, "mesh": {"samplers_in": "external"}, "remote": {"transfer": "tcp"}},
    ),
    "pairs_fit_the_algorithm": (
        {"pairs": {"loss": "dpo"}, "algorithm": {"epochs": 2}},
        {
            "pairs": {"loss": "simpo"},
            "algorithm": {"kl_coefficient": 0.1, "kl": "full"},
        },
        {
            "pairs": {"loss": "dpo"},
            "teacher": {"source": "self"},
        },
        {
            "pairs": {"loss": "dpo"},
            "algorithm": {"pivots": {"continuations": 2}},
        },
        {"pairs": {"loss": "dpo"}, "algorithm": {"group_size": 1}},
        {"pairs": {"loss": "dpo"}, "teacher": {"source": "self", "form": "loss", "rewards": 0.0}},
    ),
    "every_setting_is_read": (
        {"critic": {"warmup_steps": 1}},
        {
            "run": {"job": "reward_model"},
            "checkpoint": {"hugging_face": True},
        },
        {"run": {"job": "sft", "replay_schedule": "x"}},
        {"run": {"job": "sft"}, "evals": {"x": {}}},
        {"mixing": "x.py:f"},
        {
            "task": "nim",
            "seats": {"second": {"mixture": [{"policy": True}, {"model": "d", "retries": 2}]}},
        },
        {"run": {"job": "sft"}, "teachers": {"a": {"path": "x"}}},
        {"run": {"job": "sft"}, "seats": {"second": "policy"}},
        {"task": "nim", "seats": {"second": {"model": "d", "timeout_s": 3.0}}},
        {"evals": {"x": {"answer_mark": "#"}}},
        {"evals": {"x": {"top_k": 5}}},
        {"tasks": {"a": {"env": {"max_turns": 3}}}},
        {"algorithm": {"losses": {"a": {"loss": "nll", "ramp_steps": 3}}}},
        {"algorithm": {"losses": {"a": {"loss": "nll", "right_reward": 0.1}}}},
    ),
    "a_tasks_settings_fit_the_runs": {"tasks": {"a": {"kl_weight": 2.0}}},
    "each_setting_of_a_task_is_read": {"tasks": {"a": {"data": {"system_prompt": "x"}}}},
}


def test_a_group_goes_on_with_a_part_of_its_members_and_enough_to_compare(write, refusal):
    more = refusal(write("algorithm: {group_size: 4, min_members: 5}"))
    assert "min_members (5) must be at most algorithm.group_size (4)" in more
    own = {"advantage": "reinforce_pp", "min_members": 1}
    check_rules(Config(algorithm=own))
    with pytest.raises(ConfigError, match=r"dynamic_sampling compares .*min_members=1"):
        check_rules(Config(algorithm={**own, "dynamic_sampling": True}))


CHECKS = sections_checks()


def test_every_rule_has_a_configuration_that_breaks_it():
    assert set(BROKEN) == {*RULES, *CHECKS} and not RULES.keys() & CHECKS.keys()


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        pytest.param(name, one, id=f"{name}-{number}")
        for name, cases in BROKEN.items()
        for number, one in enumerate(cases if isinstance(cases, tuple) else (cases,))
    ],
)
def test_a_rule_is_broken_alone_and_kept_by_the_defaults(name, sections):
    """Each configuration breaks its rule and no other; what is said names a setting and a way."""
    config = Config(**sections)
    (violation,) = RULES.violations(config)
    assert violation.name == name and violation.sentence.endswith(".")
    assert not RULES.violations(Config())
    with pytest.raises(ConfigError) as caught:
        check_rules(config)
    assert str(caught.value) == violation.sentence


SERVED = {"url": "http://x/v1", "model": "m"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"teacher": {"source": "teachers"}}, "the section teachers is empty"),
        ({"teacher": {"source": "self"}, "teachers": {"a": SERVED}}, "have no effect without"),
        (
            {"run": {"job": "sft"}, "teachers": {"a": SERVED}},
            "teachers (a) has no effect without run.job=rl",
        ),
        ({"teachers": {"a": {**SERVED, "path": "x"}}}, "set exactly one of url, path and policy"),
        ({"teachers": {"a": {"url": "http://x/v1"}}}, "needs the name of the model"),
        ({"teachers": {"a": {"path": "x", "policy": {"every": 2}}}}, "one of url, path and policy"),
        ({"teachers": {"a": {"policy": {}}}}, "exactly one of average and every"),
        ({"teachers": {"a": {"policy": {"every": 2, "average": 0.9}}}}, "one of average and every"),
        ({"teachers": {"a": {"policy": {"every": 2}, "chips": "sampler"}}}, "has no effect"),
        ({"teachers": {"a": {"path": "x", "timeout_s": 3.0}}}, "timeout_s (3.0) has no effect"),
        ({"teachers": {"a": {"path": "x", "tokenizer": "y"}}}, "tokenizer (y) has no effect"),
        (
            {"teachers": {"a": {**SERVED, "adapter": "x"}}},
            "adapter (x) has no effect without teachers.a.path",
        ),
        ({"teacher": {"form": "loss", "top_k": 0}}, "teacher.top_k=0 asks for none"),
        ({"teacher": {"form": "loss", "top_k": 2, "top_k_of": "student"}}, "top_k_of=student"),
        ({"sampler": {"temperature": 0.7}}, "sampler.temperature is 0.7"),
        (
            {
                "teacher": {"form": "loss", "top_k": 2},
                "teachers": {"a": {**SERVED, "protocol": "echo"}},
            },
            "protocol=echo gives no token ids",
        ),
        ({"teachers": {"a": {**SERVED, "max_wait_s": 1e6}}}, "must be below faults.scorer_timeout"),
    ],
    ids=str,
)
def test_teachers_that_cannot_be_asked_are_refused(changes, reason):
    given = {"teacher": {"source": "teachers"}, "teachers": {"a": SERVED}}
    if changes == {"teacher": {"source": "teachers"}}:
        given["teachers"] = {}
    given = {**given, **changes}
    if given["teacher"] is not None:
        given["teacher"] = {"source": "teachers", **given["teacher"]}
    config = Config(**given)
    found = [v.sentence for v in RULES.violations(config)]
    assert any(reason in sentence for sentence in found), found


HERE = {"path": "x", "chips": "sampler"}
REFERRED = {"algorithm": {"kl_coefficient": 0.1}, "reference": {"teacher": "r"}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"teachers": {"a": SERVED}}, "reference.teacher=r is not in teachers (a)"),
        ({"teachers": {"r": {"path": "x"}}}, "Give its path as reference.path"),
        ({"reference": {"teacher": "r", "ema": 0.9}}, "reference.ema has no effect"),
        ({"teachers": {"r": {**HERE, "context": "c"}}}, "teachers.r.context has no effect"),
        ({"teachers": {"r": {**HERE, "tokenizer": "c"}}}, "teachers.r.tokenizer has no effect"),
        ({"algorithm": {"kl_coefficient": 0.1, "kl": "full"}}, "algorithm.kl=full compares all"),
        ({"sampler": {"top_p": 0.9}}, "over the whole vocabulary"),
        ({"trainer": {"offload": ["reference"]}}, "without reference.teacher"),
        ({"teacher": {"source": "teachers"}}, "the section teachers is empty"),
        ({"teachers": {"r": HERE, "b": HERE}}, "teachers (b) have no effect without"),
        ({"teachers": {"r": SERVED}, "sampler": {"temperature": 0.7}}, "temperature is 0.7"),
        ({"mesh": {"samplers_in": "processes"}}, "chips=sampler computes in this process"),
        (
            {"teachers": {"r": {**HERE, "timeout_s": 3.0}}},
            "timeout_s (3.0) has no effect without teachers.r.url",
        ),
        (
            {"teachers": {"r": {**SERVED, "chips": "sampler"}}},
            "chips (sampler) has no effect without teachers.r.path",
        ),
    ],
    ids=str,
)
def test_a_reference_that_no_teacher_can_be_is_refused(changes, reason):
    config = Config(**{**REFERRED, "teachers": {"r": HERE}, **changes})
    found = [v.sentence for v in RULES.violations(config)]
    assert any(reason in sentence for sentence in found), found


@pytest.mark.parametrize("one", [HERE, SERVED, {**SERVED, "protocol": "echo"}], ids=str)
def test_a_teacher_at_an_address_or_on_the_sampler_can_be_the_reference(one):
    teacher = {"source": "teachers", "form": "loss", "top_k": 4}
    both = {"r": one, "b": {**HERE, "tokenizer": "y", "context": "c"}}
    for more in ({"teachers": {"r": one}}, {"teachers": both, "teacher": teacher}):
        assert not RULES.violations(Config(**REFERRED, **more))


def test_teachers_that_can_be_asked_are_not_refused():
    config = Config(
        teacher={"source": "teachers", "form": "loss", "top_k": 4, "rewards": 0.0},
        teachers={
            "a": SERVED,
            "b": {"path": "x", "weight": 0.5, "context": "c"},
            "c": {"policy": {"average": 0.9}, "context": "c"},
        },
    )
    names = {v.rule.name for v in RULES.violations(config)}
    assert not names & {
        "teachers_are_those_of_the_source",
        "a_named_teacher_has_one_source",
        "servers_give_what_the_loss_compares",
    }


@pytest.mark.parametrize("teacher", [{"form": "loss"}, {"top_k": 4}], ids=str)
def test_whose_top_tokens_they_are_is_refused_where_nobody_looks_at_them(teacher):
    config = Config(teacher={"source": "self", "top_k_of": "student", **teacher})
    assert "a_students_top_tokens_are_looked_at" in {one.name for one in RULES.violations(config)}


@pytest.mark.parametrize("name", [*RULES, *CHECKS])
def test_a_rule_says_what_it_demands(name):
    broken = RULES[name].check if name in RULES else CHECKS[name]
    assert (broken.__doc__ or "").strip().endswith(".")


def test_rules_of_one_section_hide_no_others(write, refusal):
    """And are told with the line of their section."""
    path = write("mesh:\n  sampler: {context: 2}\nmodel:\n  architecture: {heads: 3}\n")
    message = refusal(path, "buffer.select=recent")
    assert message.startswith("3 problems:")
    for told in ("line 1: mesh.sampler", "line 4: model.architecture.heads", "buffer.select"):
        assert told in message


@pytest.mark.parametrize("key", ["algorithm.loss.ppo_clip.x", "reward.function.exact.weight"])
def test_a_number_that_python_does_not_print_is_refused_in_words(write, key, refusal):
    override = f"{key}=0x{'f' * 9000}"
    assert "very long number" in refusal(write("run: {job: sft}"), override)


ELSEWHERE = (
    "mesh.samplers_in=external",
    "sampler.engine=vllm",
    'sampler.engine_urls=["http://a"]',
)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("algorithm.keep_sampling_mask=true", "sampling mask of each token"),
        ("sampler.top_p=0.9", "sampling mask of each token"),
        ("algorithm.keep_routing=true", "experts of each token"),
        ("weights.dtype=int8", "a format of our sampler"),
        ("remote.transfer=tcp", "reads weights from files"),
        (
            "sampler.block=4",
            "sampler.block (4) has no effect without sampler.engine=native or",
        ),
        ("mesh.samplers=2", "mesh.samplers (2) has no effect without sampler.engine=native"),
        ("remote.fanout=3", "remote.fanout (3) has no effect without sampler.engine=native"),
        ('sampler.engine_urls=["http://a", "http://a/"]', "must be different addresses"),
        ('sampler.engine_urls=["a:8000"]', "begin with http:// or https://"),
    ],
)
def test_what_somebody_elses_engine_does_not_do_is_refused(write, refusal, override, told):
    assert told in refusal(write(""), *ELSEWHERE, "weights.probe=false", override)


def test_a_loss_without_a_ratio_is_corrected_with_an_engine(write, refusal):
    gpg = [*ELSEWHERE, "algorithm.loss=gpg"]
    assert "Set algorithm.correction=tis" in refusal(write(""), *gpg, "algorithm.anchor=proximal")
    load(write(""), [*gpg, "algorithm.anchor=proximal", "algorithm.correction=tis"])


@pytest.mark.parametrize("setting", ["top_k=5", "top_p=0.5"])
def test_a_greedy_evaluation_by_name_reads_no_bounds_of_sampling(write, refusal, setting):
    name = setting.partition("=")[0]
    told = refusal(write(""), f"evals.hard.{setting}")
    assert f"evals.hard.{name} ({setting.partition('=')[2]}) has no effect without" in told
    assert "Set that" in told and "evals.hard.temperature above 0" in told
    assert load(write(""), [f"evals.hard.{setting}", "evals.hard.temperature=0.7"])

"""Settings that nothing would read: refused, or told where their feature is turned off."""

from pathlib import Path
from typing import get_args

import pytest
import yaml

from jaxrl_async.config.load import dump, load
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import ReadWith
from jaxrl_async.config.several import section_of
from jaxrl_async.config.unused import unread_with_records, unused_settings

CONFIGS = Path(__file__).parents[2] / "configs"

UNREAD = [
    (["algorithm.max_resampled=5"], "algorithm.dynamic_sampling=true"),
    (["algorithm.signal_std=0.1"], "algorithm.dynamic_sampling=true"),
    (["algorithm.signal_part=length"], "algorithm.dynamic_sampling=true"),
    (["algorithm.advantage=rloo", "algorithm.baseline=unmasked"], "a shaping that masks answers"),
    (
        [
            "algorithm.shaping=[mask_truncated]",
            "algorithm.advantage=reinforce",
            "algorithm.baseline=unmasked",
        ],
        "a shaping that masks answers",
    ),
    (["algorithm.least_compared=3"], "algorithm.baseline=unmasked"),
    (["algorithm.entropy_clip=1"], "algorithm.entropy_coefficient or entropy_target"),
    (["algorithm.entropy_step=0.1"], "algorithm.entropy_target"),
    (["algorithm.kl=k1"], "algorithm.kl_coefficient above 0"),
    (["algorithm.kl_in=reward"], "algorithm.kl_coefficient above 0"),
    (["algorithm.kl_coefficient=0.1", "algorithm.kl_horizon=5"], "algorithm.kl_target"),
    (["algorithm.supervised_batch=4"], "algorithm.supervised_coefficient above 0"),
    (["critic.warmup_steps=3"], "algorithm.advantage=gae"),
    (["critic.learning_rate=1e-4"], "algorithm.advantage=gae"),
    (["critic.clip=null"], "algorithm.advantage=gae"),
    (["reference.refresh_every=3"], "algorithm.kl_coefficient above 0"),
    (["teacher.source=self", "teacher.kind=forward"], "teacher.form=loss"),
    (["teacher.source=self", "teacher.top_k=4"], "teacher.form=loss"),
    (
        ["teacher.source=self", "teacher.form=loss", "teacher.beta=0.25"],
        "teacher.form=loss and kind=js",
    ),
    (["staleness.overcommit=2"], "staleness.when_too_old=drop"),
    (["staleness.ess_target=0.5"], "staleness.adapt=ess"),
    (["data.curriculum_pool=8"], "data.curriculum"),
    (["reward.processes=2"], "your own reward function"),
    (["remote.data_port=7078"], "mesh.samplers_in=processes or external"),
    (["warm_start.path=x"], "warm_start.steps above 0"),
    (["algorithm.loss=gpg", "algorithm.anchor=proximal"], "another algorithm.loss or a correction"),
    (["reward.model_weight=0.5"], "reward.model"),
    (["sft.batch_size=4"], "run.job=sft"),
    (["preference.loss=ipo"], "run.job=preference"),
    (["pairs.loss=dpo", "algorithm.loss=cispo"], "pairs=null"),
    (["pairs.loss=dpo", "algorithm.advantage=rloo"], "pairs=null"),
    (["pairs.loss=dpo", "algorithm.correction=tis"], "pairs=null"),
    (["pairs.loss=dpo", "algorithm.losses={a: {loss: nll}}"], "pairs=null"),
    (["pairs.loss=dpo", "algorithm.aggregate=sequence_mean"], "pairs=null, or a KL"),
    (["pairs.loss=simpo", "reference.ema=0.5"], "algorithm.kl_coefficient above 0 or a pairs"),
    (["run.job=sft", "pairs.loss=dpo"], "run.job=rl"),
    (["run.job=preference", "reward_model.margin=0.5"], "run.job=reward_model"),
]


@pytest.mark.parametrize(("overrides", "wanted"), UNREAD, ids=[words[-1] for words, _ in UNREAD])
def test_what_nothing_reads_is_refused_with_what_would_make_it_read(
    write, overrides, wanted, refusal
):
    message = refusal(write(""), *overrides)
    key = overrides[-1].partition("=")[0]
    assert f"{key} (" in message and f"has no effect without {wanted}" in message
    assert f"leave {key} out" in message


TURNED_OFF = [
    ("grpo", ["algorithm.kl_coefficient=0"], []),  # the file's k3 is the default
    ("rloo", ["algorithm.kl_coefficient=0"], ["algorithm.kl (k1)", "algorithm.kl_in (reward)"]),
    (
        "grpo",
        ["algorithm.kl_coefficient=0.0", "algorithm.kl_target=0.1"],
        ["algorithm.kl_target (0.1)"],
    ),
    (
        "self_distill",
        ["teacher=null"],
        [],
    ),
    ("addition", ["teacher.source=self", "teacher.form=loss", "teacher.rewards=0"], []),
    (
        "rloo",
        [
            "algorithm.kl_coefficient=0",
            "algorithm.kl=k3",
            "algorithm.kl_in=loss",
            "algorithm.anchor=proximal",
            "teacher.source=self",
            "teacher.form=loss",
            "teacher.rewards=0",
        ],
        [
            "algorithm.advantage (rloo)",
            "algorithm.loss (reinforce)",
            "algorithm.correction ({'truncate': {'cap': 2.0}})",
            "algorithm.anchor (proximal)",
        ],
    ),
    ("opd", ["model.path=x"], []),  # whose shape is another's, as everybody expects
    (
        "ppo_critic",
        ["algorithm.advantage=rloo"],
        ["critic.learning_rate (0.0005)", "critic.warmup_steps (5)"],
    ),
    ("self_distill", ["teacher.kind=reverse", "teacher.beta=0.25"], ["teacher.beta (0.25)"]),
    ("opd", ["teacher.refresh_every=3"], ["teacher.refresh_every (3)"]),
    (
        "addition",
        ["weights.probe=false", "weights.probe_tolerance=1"],
        ["weights.probe_tolerance (1.0)"],
    ),
]


@pytest.mark.parametrize(
    ("name", "overrides", "told"), TURNED_OFF, ids=[f"{n} {o[0]}" for n, o, _ in TURNED_OFF]
)
def test_settings_of_a_feature_that_is_turned_off_are_logged_and_not_refused(
    write, caplog, name, overrides, told
):
    config = load(CONFIGS / f"{name}.yaml", overrides)
    lines = [r.getMessage().partition(": ")[2].split(", ") for r in caplog.records]
    assert [key for line in lines for key in line] == told
    assert load(write(dump(config))) == config


@pytest.mark.parametrize(
    ("setting", "section", "key"),
    [
        ("teacher.kind=js", "teacher", "source"),
        ("pairs.choose=all", "pairs", "loss"),
        ("model.lora.alpha=16", "model.lora", "rank"),
        ("reward.judge.weight=0.5", "reward.judge", "model"),
        ("reward.process.weight=0.5", "reward.process", "function"),
        ("metrics.wandb.entity=x", "metrics.wandb", "project"),
        ("metrics.mlflow.tracking_uri=x", "metrics.mlflow", "experiment"),
        ("algorithm.pivots.where=mark", "algorithm.pivots", "continuations"),
    ],
)
def test_a_section_without_what_it_needs_is_refused_with_both_ways_out(
    write, refusal, setting, section, key
):
    message = refusal(write(""), setting)
    assert f"{section} is given without {key}. Set {section}.{key} (" in message
    assert message.endswith(f"or {section}=null.")


def test_a_default_that_is_written_down_is_refused_nowhere(write):
    load(write(""), ["algorithm.kl=k3", "critic.clip=0.2"])


READ = [
    ["algorithm.dynamic_sampling=true", "algorithm.max_resampled=5", "algorithm.signal_std=0.1"],
    ["algorithm.entropy_target=1", "algorithm.entropy_clip=1", "algorithm.entropy_step=0.1"],
    ["algorithm.kl_coefficient=0.1", "algorithm.kl=k3", "algorithm.kl_target=0.1",
     "algorithm.kl_horizon=5", "reference.refresh_every=3"],
    ["algorithm.advantage=gae", "critic.warmup_steps=3", "critic.learning_rate=1e-5"],
    ["teacher.source=self", "teacher.form=loss", "teacher.kind=js", "teacher.beta=0.5"],
    ["staleness.when_too_old=drop", "staleness.overcommit=2"],
    ["staleness={adapt: ess, max_staleness: 2}", "staleness.ess_target=0.5"],
    ["warm_start.steps=0", "algorithm.supervised_coefficient=0.1", "warm_start.path=x"],
    ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", "algorithm.kl=k1",
     "algorithm.advantage={group_normalized: {floor: 0.1}}"],
    ["algorithm.group_size=1", "algorithm.advantage=reinforce_pp"],
    ["algorithm.group_size=1", "teacher.source=self", "teacher.rewards=0"],
    ["trainer.warmup_steps=120"],
    ["trainer.share_prefixes=true"],
    ["trainer.warmup_steps=115", "algorithm.advantage=gae", "critic.warmup_steps=5"],
    ["trainer.warmup_steps=480", "algorithm.minibatches=2", "algorithm.epochs=2"],
    ["algorithm.minibatches=128"],
    ["algorithm.group_size=1", "algorithm.advantage={discounted: {gamma: 0.9}}"],
    ["algorithm.group_size=1", "algorithm.advantage=discounted", "reward.function=my.py:reward"],
    ["algorithm.group_size=1", "algorithm.advantage=discounted_batch"],
    ["algorithm.group_size=1", "algorithm.groups_per_step=1", "algorithm.advantage=reinforce_pp",
     "algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"],
    ["algorithm.loss=gpg", "algorithm.anchor=proximal", "algorithm.correction=tis"],
    ["warm_start.path=x", "data.jsonl.prompt_field=x", "data.jsonl.template=x {prompt}"],
    ["algorithm.shaping=[{overlong_filter: {max_tokens: 47}}]"],
    ["metrics.wandb.project=x", "metrics.wandb.mode=offline"],
    ["metrics.mlflow.experiment=x", "metrics.mlflow.tracking_uri=x"],
    ["mesh.samplers_in=external", "remote.transfer=tcp", "remote.data_port=7078"],
    ["algorithm.losses.a={loss: nll, coefficient: 1, coefficient_end: 0.0, ramp_steps: 50}"],
]  # fmt: skip


@pytest.mark.parametrize("overrides", READ, ids=lambda words: words[-1])
def test_the_same_settings_are_taken_where_something_reads_them(overrides):
    load(CONFIGS / "addition.yaml", overrides)


@pytest.mark.parametrize(
    ("job", "setting"),
    [
        ("sft", "algorithm.kl_coefficient=0.1"),
        ("sft", "preference.batch_size=2"),
        ("preference", "teacher.source=self"),
        ("preference", "reward_model.margin=0.1"),
        ("rl", "reward_model.batch_size=8"),
        ("preference", "sft.batch_size=2"),
        ("reward_model", "preference.loss=ipo"),
        ("reward_model", "algorithm.loss=cispo"),
        ("sft", "critic.clip=1"),
        ("sft", "trainer.share_prefixes=true"),
    ],
)
def test_what_another_job_would_read_is_refused(write, job, setting, refusal):
    assert f"{setting.partition('=')[0]} (" in refusal(write(""), f"run.job={job}", setting)


@pytest.mark.parametrize("table", ["teachers", "evals", "seats"])
def test_a_table_without_an_entry_is_no_setting_of_another_job(write, table, refusal):
    load(write(""), ["run.job=sft", f"{table}={{}}"])
    one = {"teachers": "{path: x}", "evals": "{samples: 1}", "seats": "policy"}[table]
    told = refusal(write(""), "run.job=sft", f"{table}={{own: {one}}}")
    assert f"{table} (own) has no effect without run.job=rl" in told


def test_a_reference_is_refused_beside_a_preference_loss_without_one(write, refusal):
    words = ["run.job=preference", "preference.reference=x"]
    load(write(""), words)
    assert "preference.reference (x)" in refusal(write(""), *words, "preference.loss=simpo")


def test_a_section_that_is_written_out_in_full_says_only_what_is_not_the_default(write, caplog):
    """As --print-config prints it, and a run's config.yaml holds it."""
    whole = Config().model_dump()
    assert load(write(yaml.safe_dump(whole))) == Config()
    assert not caplog.records
    whole["critic"] = {"warmup_steps": 3, "clip": 0.2}
    assert load(write(yaml.safe_dump(whole))) == Config()
    assert "critic.warmup_steps (3)" in caplog.text


def test_one_configuration_may_say_how_rollouts_are_made_for_several_jobs(write):
    shared = ["sampler.slots=4", "staleness.max_staleness=2", "algorithm.group_size=2"]
    for job in ("sft", "preference", "reward_model"):
        load(write(""), [f"run.job={job}", *shared])


def test_records_of_a_task_leave_no_source_of_data_with_an_effect():
    assert unread_with_records(Config(), "x") == []
    assert unread_with_records(Config(data={"addition": None}), "x") == []
    told = unread_with_records(load({"data": {"jsonl": {"path": "y"}}}), "x")
    assert [one.partition(" has no effect")[0] for one in told] == ["data.jsonl.path (y)"]
    told = unread_with_records(load({"data": {"addition": {"digits": 3}}}), "x")
    assert [one.partition(" has no effect")[0] for one in told] == ["data.addition.digits (3)"]


def marked(section=Config):
    """Yield section and name of each setting that is read only with another one, with the mark."""
    for name, target in section.model_fields.items():
        yield from ((section, name, mark) for mark in target.metadata if isinstance(mark, ReadWith))
        inner = section_of(target)
        if inner is not None:
            yield from marked(inner)


@pytest.mark.parametrize(
    ("section", "name", "mark"), list(marked()), ids=[f"{s.__name__}.{n}" for s, n, _ in marked()]
)
def test_a_mark_of_a_setting_names_another_one_and_values_that_it_may_have(section, name, mark):
    target = section.model_fields.get(mark.setting)
    if target is None:
        assert isinstance(getattr(section, mark.setting), property) and mark.needs
    else:
        assert set(mark.values) <= set(get_args(target.annotation) or mark.values)
    assert set(mark.switches or ()) <= section.model_fields.keys()


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("model", {"lora": {"rank": 4, "base": "int8", "group_size": 32}},
         "model.lora.group_size (32) has no effect without model.lora.base in 4 bits"),
        ("model", {"balance": {"each_layer": True}},
         "model.balance.each_layer (True) has no effect without model.balance.loss above 0"),
        ("endpoint", {"agent_tries": 5},
         "endpoint.agent_tries (5) has no effect without endpoint.external_agents=true"),
        ("remote", {"transfer": "shared_memory", "data_port": 7000},
         "remote.data_port (7000) has no effect without remote.transfer=auto, tcp or device"),
        ("sampler", {"engine": "jetstream", "page_tokens": 64},
         "sampler.page_tokens (64) has no effect without sampler.engine=native"),
        ("sampler", {"engine_class": "a.py:A"},
         "sampler.engine_class (a.py:A) has no effect without sampler.engine=jetstream"),
        ("reward", {"process": {"function": "a.py:f", "rubric": "x"}},
         "reward.process.rubric (x) has no effect without reward.process.function=judge"),
        ("algorithm", {"pivots": {"continuations": 2, "mark": "x"}},
         "algorithm.pivots.mark (x) has no effect without algorithm.pivots.where=mark"),
    ],
)  # fmt: skip
def test_what_another_setting_of_the_section_makes_ineffective_is_said(section, values, told):
    config = Config(**{section: values, "mesh": {"samplers_in": "processes"}})
    unused = unused_settings(config)
    setting = told.partition(" has no effect")[0]
    excused = [one for settings in unused.turned_off.values() for one in settings]
    assert setting in excused or any(one.startswith(told) for one in unused.refused)

"""Settings that earlier runs and versions have written, beside those of now."""

import itertools

import pytest
import yaml

from jaxrl_async.config.changes import changes
from jaxrl_async.config.field_help import help_text, setting_names
from jaxrl_async.config.load import dump, flattened, load
from jaxrl_async.config.recipes import recipe_file
from jaxrl_async.config.renamed_settings import NAMES, OFF, VALUES
from jaxrl_async.config.schema import Config
from jaxrl_async.config.several import runs_of
from jaxrl_async.errors import ConfigError


@pytest.fixture
def older(tmp_path):
    """The config.yaml of a run by the version in which our own engine was called ours."""
    tree = yaml.safe_load(dump(load(recipe_file("addition"))))
    assert tree["sampler"]["engine"] == "native"
    tree["sampler"]["engine"] = "ours"
    del tree["sampler"]["engine_class"], tree["run"]["profile"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_an_engine_is_read_by_its_former_name(older, write):
    assert load(older) == load(recipe_file("addition"))
    assert load(older, ["sampler.slots=8"]).sampler.slots == 8
    assert load(write(""), ["sampler.engine=ours"]).sampler.engine == "native"
    several = load(write("model: {lora: {rank: 4}}\nruns: {a: {sampler: {engine: ours}}, b: {}}"))
    assert several.runs["a"] == several.runs["b"] == {}


def test_other_values_are_refused_as_before(refusal, write):
    message = refusal(write("sampler: {engine: theirs}"))
    allowed = "it must be one of native, jetstream"
    assert f"sampler.engine = 'theirs' is not allowed; {allowed}" in message
    assert "sampler.engine = 3" in refusal(write("sampler: {engine: 3}"))


def test_what_an_older_version_wrote_otherwise_is_no_change(older):
    before = flattened(yaml.safe_load(older.read_text()))
    now = flattened(yaml.safe_load(dump(load(older, ["sampler.block=4", "run.profile=[3]"]))))
    assert list(changes(before, now)) == [("run.profile", [], [3]), ("sampler.block", 8, 4)]
    assert list(changes({**before, "gone": 1}, before)) == [
        ("gone", 1, None),
        ("sampler.engine", "native", "ours"),  # `now` is of this version
    ]


def test_each_former_name_stands_for_a_setting_of_now():
    known = set(setting_names())
    assert known >= {*NAMES.values(), *VALUES} and not known & NAMES.keys()
    assert known >= {f"{section}.{key}" for section, (key, _) in OFF.items()}


def test_a_former_name_is_read_with_a_warning_that_shows_the_new_form(write, caplog):
    file = write("eval:\n  beside: true\nmesh: {samplers_in: elsewhere}\n")
    config = load(file, ["remote.least=3", "algorithm={least_members: 2}"])
    assert config.eval.asynchronous and config.mesh.samplers_in == "external"
    assert config.remote.min_samplers == 3 and config.algorithm.min_members == 2
    assert f"{file}, line 2: eval.beside is now written eval.asynchronous=true" in caplog.text
    assert "line 3: mesh.samplers_in is now written mesh.samplers_in=external" in caplog.text
    assert "command line: remote.least is now written remote.min_samplers=3" in caplog.text
    assert "algorithm.least_members is now written algorithm.min_members=2" in caplog.text


def test_the_current_name_counts_where_both_are_given_and_values_are_checked(
    write, refusal, caplog
):
    both = write("eval: {beside: true, asynchronous: false}")
    assert not load(both).eval.asynchronous
    assert "eval.beside is not read: it is now written eval.asynchronous, which is" in caplog.text
    message = refusal(write("run: {name: x}\neval:\n  every: 3\n  beside: 3\n"))
    assert "line 4: eval.asynchronous = 3 is not allowed" in message


@pytest.mark.full
def test_the_later_place_counts_however_it_names_a_setting(write, tmp_path):
    def file(shared, own):
        runs = f"runs: {{a: {{eval: {{{own}: false}}}}, b: {{}}}}\n"
        return write(f"model: {{lora: {{rank: 4}}}}\neval: {{{shared}: true}}\n{runs}")

    assert load(write("eval: {asynchronous: true}"), ["eval={beside: false}"]) == Config()
    assert load(write("eval: {beside: true}"), ["eval={asynchronous: false}"]) == Config()
    for shared, own in itertools.product(("beside", "asynchronous"), repeat=2):
        several = load(file(shared, own))
        assert several.runs == {"a": {"eval": {"asynchronous": False}}, "b": {}}
        assert several.eval.asynchronous
    apart = tmp_path / "own.yaml"
    apart.write_text("eval: {beside: false}")
    text = f"model: {{lora: {{rank: 4}}}}\neval: {{asynchronous: true}}\nruns: {{a: {apart}}}"
    assert load(write(text)).runs == {"a": {"eval": {"asynchronous": False}}}
    text = "model: {lora: {rank: 4}}\neval: {asynchronous: true}\nruns: {a: {}}"
    own = load(write(text), ["runs.a.eval={beside: false}"]).runs
    assert own == {"a": {"eval": {"asynchronous": False}}}


def test_a_run_turns_on_what_is_turned_off_beside_runs(write, caplog):
    shared = "model: {lora: {rank: 4}}\nteacher: {source: none, refresh_every: 3}\n"
    several = load(write(shared + "runs: {a: {teacher: {source: self}}, b: {}}\n"))
    assert several.teacher is None and several.runs["b"] == {}
    own = runs_of(several)["a"].teacher
    assert own is not None and (own.source, own.refresh_every) == ("self", 3)
    assert caplog.text.count("teacher.source=none is now written teacher=null") == 1
    assert load(write(dump(several))) == several


@pytest.mark.full
@pytest.mark.parametrize(
    "switch",
    [f"{section}.{key}" for section, (key, off) in OFF.items() if off is None],
)
@pytest.mark.parametrize("null", ["null", "~"])
def test_null_on_a_command_line_turns_a_section_off_and_is_no_name(write, switch, null):
    assert load(write(""), [f"{switch}={null}"]) == Config()


def test_false_is_not_the_number_that_turned_a_section_off(write, refusal):
    assert "model.lora.rank = false is not allowed" in refusal(
        write("model: {lora: {rank: false}}")
    )
    assert load(write("model: {lora: {rank: 0.0}}")) == Config()


@pytest.mark.parametrize(
    ("section", "before"),
    [
        ("model.lora", {"rank": 0, "alpha": 32.0}),
        ("pairs", {"loss": None, "choose": "best_worst"}),
        ("teacher", {"source": "none", "kind": "reverse"}),
        ("reward.judge", {"model": None, "weight": 1.0}),
        ("reward.process", {"function": None}),
        ("algorithm.pivots", {"continuations": 0, "members": 1}),
        ("metrics.wandb", {"project": None, "entity": None}),
        ("metrics.mlflow", {"experiment": None}),
        ("metrics.trackio", {"project": None}),
    ],
)
def test_a_section_that_was_turned_off_is_null_now(write, caplog, section, before):
    tree = before
    for name in reversed(section.split(".")):
        tree = {name: tree}
    assert load(write(yaml.safe_dump(tree))) == Config()
    assert f"is now written {section}=null" in caplog.text


def test_a_command_line_still_turns_a_section_off_and_on(write):
    file = write("model: {lora: {rank: 4}}\nteacher: {source: none, path: x}\n")
    assert load(file, ["model.lora.rank=0"]).model.lora is None
    assert load(file, ["model.lora=null"]).model.lora is None
    assert load(file).teacher is None
    config = load(file, ["teacher.source=path"])
    assert config.teacher is not None and config.teacher.path == "x"
    assert load(write(dump(config))) == config


def test_a_run_of_before_without_a_section_has_not_changed():
    before = flattened({"teacher": {"source": "none"}, "model": {"lora": {"rank": 0, "alpha": 32}}})
    now = {"teacher": None, "model.lora": None}
    assert list(changes(before, now)) == []


def test_a_section_that_is_added_or_removed_differs_by_what_it_sets():
    on = {"teacher.source": "self", "teacher.top_k": 0, "teacher.refresh_every": 3}
    off = {"teacher": None}
    assert list(changes(off, on)) == [
        ("teacher.refresh_every", 10, 3),
        ("teacher.source", None, "self"),
    ]
    assert list(changes(on, off)) == [("teacher.source", "self", None)]
    of_older = {"teacher.source": "self", "teacher.refresh_every": 3}  # without top_k
    assert list(changes(of_older, on)) == []


OLD_DATA = {
    "addition": {"digits": 4, "eval_size": 256, "worked_share": 1.0},
    "jsonl": {"path": "", "eval_path": None, "eval_size": 64, "prompt_field": "question"},
}
"""Both sections of data, as a version with data.source wrote them."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "overrides", "now"),
    [
        ({"source": "addition", **OLD_DATA}, [], {}),
        ({"source": "addition", "addition": {"digits": 2}}, [], {"addition": {"digits": 2}}),
        (
            {"source": "jsonl", **OLD_DATA, "jsonl": {"path": "x"}},
            [],
            {"jsonl": {"path": "x"}},
        ),
        ({"source": "addition", **OLD_DATA}, ["data.source=jsonl", "data.jsonl.path=x"],
         {"jsonl": {"path": "x", "eval_size": 64}}),
        ({"source": "addition", **OLD_DATA}, ["data.jsonl.path=x", "data.source=jsonl"],
         {"jsonl": {"path": "x", "eval_size": 64}}),
        ({"source": "addition", **OLD_DATA}, ["data={source: jsonl, jsonl: {path: x}}"],
         {"jsonl": {"path": "x"}}),
        ({"source": "jsonl", "jsonl": {"path": "x"}}, ["data.source=addition"], {}),
        ({"source": "jsonl", "addition": {"digits": 2}}, ["data.source=addition"],
         {"addition": {"digits": 2}}),
        ({"source": "addition", "jsonl": {"path": "x"}}, ["data.source=jsonl"],
         {"jsonl": {"path": "x"}}),
        ({"source": "jsonl", "jsonl": {"path": "x"}}, ["data.jsonl.path=y"],
         {"jsonl": {"path": "y"}}),
        ({"source": "addition", **OLD_DATA}, ["data.addition=null", "data.jsonl.path=x"],
         {"jsonl": {"path": "x", "eval_size": 64}}),
    ],
)  # fmt: skip
def test_a_former_source_chooses_one_section(write, caplog, before, overrides, now):
    assert load(write(yaml.safe_dump({"data": before})), overrides) == load({"data": now})
    assert f"data.source={before['source']} is now written data." in caplog.text
    given = load({"data": before}, overrides)  # from Python
    assert given == load({"data": now}) and load(write(dump(given))) == given


def test_a_former_source_keeps_how_demonstrations_are_read(write):
    own = {"source": "addition", "jsonl": {"path": "", "prompt_field": "q"}}
    config = load(write(yaml.safe_dump({"data": own, "warm_start": {"path": "x", "steps": 3}})))
    assert config.data.problems is not None and config.data.record_fields.prompt_field == "q"


def test_runs_of_several_may_have_other_sources(write):
    text = "model: {lora: {rank: 4}}\ndata: {source: addition, addition: {digits: 2}}\nruns:\n"
    several = load(write(text + "  a: {data: {source: jsonl, jsonl: {path: x}}}\n  b: {}\n"))
    one = runs_of(several)
    assert one["a"].data.records_path == "x" and one["a"].data.addition is None
    assert one["b"].data.problems == several.data.addition
    text = text.replace("source: addition", "source: jsonl, jsonl: {path: y}")
    one = runs_of(load(write(text + "  a: {data: {source: addition}}\n  b: {}\n")))
    assert one["a"].data.problems is not None and one["a"].data.problems.digits == 2
    assert one["b"].data.records_path == "y"


def test_a_shared_section_that_one_run_alone_has_is_refused_once(write, refusal):
    text = "model: {lora: {rank: 4}}\nruns: {a: {endpoint: {port: 80}}, b: {}}\n"
    message = refusal(write(text))
    assert message.count("is shared by all runs") == 1 and "runs.a.endpoint is shared" in message


@pytest.mark.parametrize(
    ("before", "overrides", "now"),
    [
        ({"enabled": True}, [], {}),
        ({"enabled": False}, [], None),
        ({"enabled": False, "port": 80}, [], None),
        ({"enabled": True, "port": 80}, [], {"port": 80}),
        ({"enabled": True, "port": 80}, ["endpoint.enabled=false"], None),
        ({"enabled": False, "port": 80}, ["endpoint.enabled=true"], {"port": 80}),
        ({"enabled": False, "port": 80}, ["endpoint={}"], {"port": 80}),
        ({"enabled": False, "port": 80}, ["endpoint.stall_s=5"], {"port": 80, "stall_s": 5}),
        ({"enabled": False, "port": 80}, ["endpoint.enabled=true", "endpoint=null"], None),
        ({"enabled": False, "external_agents": True}, [], {"external_agents": True}),
        (None, ["endpoint.enabled=true", "endpoint.port=80"], {"port": 80}),
        ({"port": 80}, ["endpoint.enabled=true"], {"port": 80}),
        ({"port": 80}, ["endpoint={}"], {"port": 80}),
        (None, ["endpoint={}"], {}),
        (None, ["endpoint={enabled: true, port: 80}"], {"port": 80}),
    ],
)
def test_a_former_switch_of_the_endpoint_is_its_section(write, before, overrides, now):
    file = write(yaml.safe_dump({"endpoint": before}))
    assert load(file, overrides).endpoint == load({"endpoint": now}).endpoint


def test_a_task_whose_program_used_the_endpoint_keeps_its_port(write):
    task = {"task": "x", "endpoint": {"enabled": False, "port": 80}}
    assert load(write(yaml.safe_dump(task))).serving.port == 80
    del task["task"]
    assert load(write(yaml.safe_dump(task)), ["task=x"]).serving.port == 80


def test_a_source_of_an_older_run_has_not_changed():
    before = flattened({"data": {"source": "addition", **OLD_DATA}, "endpoint": {"enabled": False}})
    now = flattened(Config().model_dump(mode="json"))
    assert list(changes({**before, "seats": {}}, now)) == list(changes(before, now)) == []
    other = flattened(load({"data": {"jsonl": {"path": "x"}}}).model_dump(mode="json"))
    assert {one.name: one.now for one in changes(before, other)} == {"data.jsonl.path": "x"}
    assert [one.name for one in changes(now, {**now, "endpoint": None})] == []


def test_an_empty_section_on_a_command_line_is_the_section_with_its_defaults(write, refusal):
    assert load(write(""), ["endpoint={}"]).endpoint is not None
    assert load(write(""), ["reward={}"]) == Config()
    assert "teacher is given without source" in refusal(write(""), "teacher={}")
    file = write("teacher: {source: self, top_k: 0}")
    assert load(file, ["teacher={}"]) == load(file)


def test_help_of_a_former_setting_names_the_current_one():
    assert "eval.beside is now called eval.asynchronous:" in help_text("eval.beside")
    assert "eval.asynchronous = false" in help_text("eval.beside")
    with pytest.raises(ConfigError, match=r"data\.source is now written data\.addition=\{\} or"):
        help_text("data.source")


def test_a_file_of_an_older_run_is_no_page_of_warnings(write, caplog):
    of_now = load({"endpoint": {}, "mesh": {"samplers_in": "external"}, "remote": {"fanout": 3}})
    tree = yaml.safe_load(dump(of_now))
    for was, now in NAMES.items():
        section, _, key = was.partition(".")
        if tree[section] is not None:
            tree[section][key] = tree[section].pop(now.partition(".")[2])
    assert load(write(yaml.safe_dump(tree))) == of_now
    first, more = caplog.messages
    assert "algorithm.least_members is now written algorithm.min_members=null" in first
    assert more == "and 5 more; --print-config prints how all are written now"


BEFORE = {
    "remote": {"listen": "127.0.0.1:0", "min_samplers": 1, "tls_key": None},
    "reference": {"path": None, "refresh_every": 0, "ema": 0.0},
    "critic": {"path": None, "learning_rate": 1e-5, "warmup_steps": 0, "clip": 0.2},
}
"""Sections as an earlier version wrote them in every run."""


def test_a_section_of_defaults_that_nothing_reads_is_null(write, caplog):
    assert load(write(yaml.safe_dump(BEFORE))) == load(BEFORE) == Config()
    for name, needs in (
        ("remote", "mesh.samplers_in=processes or external"),
        (
            "reference",
            "algorithm.kl_coefficient above 0 or a pairs.loss or a loss component that compares "
            "with it",
        ),
        ("critic", "algorithm.advantage=gae, which has a critic"),
    ):
        assert (
            f"{name}, which nothing reads without {needs}, is now written {name}=null"
            in caplog.text
        )


@pytest.mark.parametrize("job", ["sft", "preference", "reward_model"])
def test_a_section_of_defaults_of_another_job_is_null(job):
    given = {"run": {"job": job}}
    assert load({**BEFORE, **given}) == load(given)
    shared = load({**given, "remote": {"fanout": 3}})  # with a configuration of run.job=rl
    assert shared.remote_settings.fanout == 3


def test_a_section_that_is_read_keeps_what_is_written(write):
    gae = ["algorithm.advantage=gae"]
    assert load(write(""), gae).critic is None
    assert load(write(""), gae).critic_settings.clip == 0.2
    assert load(write(""), [*gae, "critic.clip=null"]).critic_settings.clip is None
    assert load(write(yaml.safe_dump(BEFORE)), gae) == load(write(""), gae)
    kl = load(write(""), ["algorithm.kl_coefficient=0.1", "reference.ema=0.5"])
    assert kl.reference_settings.ema == 0.5 and load(write(dump(kl))) == kl
    joined = load(write(""), ["mesh.samplers_in=external", "remote.listen=0.0.0.0:7077"])
    assert joined.remote_settings.listen == "0.0.0.0:7077"


def test_a_section_of_another_choice_is_dropped_with_a_warning(write, caplog):
    file = write("algorithm: {advantage: gae}\ncritic: {warmup_steps: 5}\n")
    other = load(file, ["algorithm.advantage=rloo"])
    assert other.critic is None and "critic.warmup_steps (5)" in caplog.text
    assert load(file, ["algorithm.advantage=rloo", "critic=null"]) == other


def test_runs_of_several_may_have_a_critic_each(write):
    text = "model: {lora: {rank: 4}}\nruns:\n"
    text += "  a: {algorithm: {advantage: gae}, critic: {warmup_steps: 5}}\n  b: {}\n"
    several = load(write(text))
    assert several.critic is None and several.runs["b"] == {}
    one = runs_of(several)
    assert one["a"].critic_settings.warmup_steps == 5 and one["b"].critic is None
    shared = "algorithm: {advantage: gae}\ncritic: {warmup_steps: 5}\nruns:\n"
    shared += "  a: {algorithm: {advantage: rloo}}\n  b: {critic: {clip: 1}}\n"
    one = runs_of(load(write("model: {lora: {rank: 4}}\n" + shared)))
    assert one["a"].critic is None and one["b"].critic_settings.warmup_steps == 5


def test_a_null_section_differs_by_its_defaults_from_one_that_sets_more():
    now = flattened(load({"algorithm": {"advantage": "gae"}}).model_dump(mode="json"))
    before = flattened({"algorithm": {"advantage": "gae"}, **BEFORE})
    assert [one for one in changes(before, now) if one.name.startswith("critic")] == []
    before["critic.clip"] = None
    assert ("critic.clip", None, 0.2) in list(changes(before, now))
    more = {k: v for k, v in now.items() if k != "critic"} | {"critic.clip": 0.5}
    assert list(changes(now, more)) == [("critic.clip", 0.2, 0.5)]


OF_REWARDS = {"run": {"job": "reward_model"}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "overrides", "now"),
    [
        ({"preference": {"batch_size": 8, "margin": 0.5}}, [], {"batch_size": 8, "margin": 0.5}),
        ({"preference": {"batch_size": 32, "loss": "dpo", "margin": 0.0}}, [], {}),
        ({}, ["preference.batch_size=8", "preference.margin=0.5"],
         {"batch_size": 8, "margin": 0.5}),
        ({"reward_model": {"margin": 0.1}}, ["preference.margin=0.5"], {"margin": 0.5}),
        ({"preference": {"margin": 0.5}}, ["reward_model.margin=0.1"], {"margin": 0.1}),
    ],
)  # fmt: skip
def test_settings_of_a_reward_model_were_those_of_preferences(
    write, caplog, before, overrides, now
):
    config = load(write(yaml.safe_dump({**OF_REWARDS, **before})), overrides)
    assert config == load({**OF_REWARDS, "reward_model": now})
    assert "is now written reward_model." in caplog.text
    if not overrides:
        was, are = flattened({**OF_REWARDS, **before}), flattened(config.model_dump(mode="json"))
        assert [one for one in changes(was, are) if one.name.startswith("reward_model")] == []


def test_a_batch_of_preferences_stays_theirs_and_a_margin_is_refused_there(write, refusal):
    of_pairs = {"run": {"job": "preference"}, "preference": {"batch_size": 8, "margin": 0.0}}
    assert load(write(yaml.safe_dump(of_pairs))).preference.batch_size == 8
    message = refusal(write("run: {job: preference}"), "preference.margin=0.1")
    assert "reward_model.margin (0.1) has no effect without run.job=reward_model" in message


@pytest.mark.parametrize("name", ["batch_size", "margin"])
def test_a_former_setting_next_to_the_current_one_is_not_said_to_count(write, caplog, name):
    both = {**OF_REWARDS, "preference": {name: 8}, "reward_model": {name: 4}}
    assert getattr(load(write(yaml.safe_dump(both))).reward_model, name) == 4
    now = f"reward_model.{name}, which is given, too"
    assert f"preference.{name} is not read: it is now written {now}" in caplog.text


def test_the_printed_configuration_of_a_reward_model_loads_without_a_warning(write, caplog):
    config = load({**OF_REWARDS, "reward_model": {"batch_size": 8}})
    assert load(write(dump(config))) == config
    assert not caplog.text

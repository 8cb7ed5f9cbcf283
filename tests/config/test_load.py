"""Loading a configuration: what is taken, what is refused, and how it is told."""

import copy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxrl_async.config.field_help import help_text
from jaxrl_async.config.load import dump, load
from jaxrl_async.config.schema import Config
from jaxrl_async.config.setting_fields import all_paths
from jaxrl_async.config.several import is_optional, section_of
from jaxrl_async.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def test_an_empty_file_gives_the_defaults(write):
    assert load(write("")) == Config()


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_the_shipped_configurations_load_and_survive_a_dump(name, write):
    given = ["data.jsonl.path=x.jsonl"] if name == "gsm8k.yaml" else []
    config = load(CONFIGS / name, given)
    assert load(write(dump(config))) == config
    assert (CONFIGS / name).read_text().startswith(f"# python -m jaxrl_async.train configs/{name}")


def test_the_gsm8k_configuration_asks_for_its_file(refusal):
    assert "data.jsonl.path" in refusal(CONFIGS / "gsm8k.yaml")


def test_overrides_win_over_the_file_and_the_last_one_wins(write):
    config = load(write("sampler: {slots: 3}"), ["sampler.slots=4", "sampler.slots=5"])
    assert config.sampler.slots == 5


def test_an_exponent_without_a_point_is_a_number(write):
    config = load(write("algorithm: {learning_rate: 1e-3}"), ["warm_start.learning_rate=2e-4"])
    assert (config.algorithm.learning_rate, config.warm_start.learning_rate) == (1e-3, 2e-4)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.jsonl.template=Q: {prompt} # A:", "Q: {prompt} # A:"),
        ("data.jsonl.template={prompt}", "{prompt}"),
        (r'data.jsonl.template="{prompt}\n"', "{prompt}\n"),
        ("data.jsonl.template=null", None),
    ],
)
def test_text_on_the_command_line_is_taken_as_it_stands(write, override, value):
    given = ["data.jsonl.path=x", override]
    assert load(write(""), given).data.jsonl.template == value


def test_a_run_may_be_named_like_a_number_on_the_command_line(write):
    assert load(write(""), ["run.name=2026"]).run.name == "2026"


def test_arguments_of_a_chosen_function_are_set_by_a_dotted_override(write):
    path = write("algorithm: {loss: {ppo_clip: {clip_low: 0.1}}}")
    config = load(path, ["algorithm.loss.ppo_clip.clip_high=0.28"])
    assert config.algorithm.loss == {"ppo_clip": {"clip_low": 0.1, "clip_high": 0.28}}
    assert load(path, ["algorithm.loss.cispo.clip=5"]).algorithm.loss == {"cispo": {"clip": 5}}
    assert load(path, ["algorithm.loss=cispo"]).algorithm.loss == "cispo"


def test_a_section_on_the_command_line_is_merged(write):
    config = load(write("sampler: {slots: 3}"), ["sampler={block: 2}"])
    assert (config.sampler.slots, config.sampler.block) == (3, 2)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("trainer.learning_rate", "algorithm.learning_rate"),
        ("sampler.slot", "sampler.slots"),
        ("smapler.slots", "sampler"),
        ("algorithm.los.ppo_clip.clip_high", "algorithm.loss"),
        ("group_size", "algorithm.group_size"),
        ("max_staleness", "staleness.max_staleness"),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(write, key, suggestion, refusal):
    message = refusal(write(""), f"{key}=1")
    assert "command line" in message
    assert f"did you mean {suggestion}" in message


def test_a_rule_of_several_sections_names_the_line_of_the_very_section(write, refusal):
    """A name may begin with the name of another one, and have dots and hyphens."""
    path = write(
        "tasks:\n  math: {weight: 1, task: calculator}\n  math-easy:\n    weight: 1\n"
        "    task: calculator\n    max_staleness: 99\n"
    )
    assert f"{path}, line 6: tasks.math-easy.max_staleness (99)" in refusal(path)
    path = write("evals:\n  v1: {}\n  v1.5: {prompt_field: q}\n")
    assert f"{path}, line 3: evals.v1.5.prompt_field (q)" in refusal(path)
    path = write("")
    assert "command line: evals.v-1.prompt_field" in refusal(path, "evals.v-1={prompt_field: q}")
    assert "with the" not in refusal(path, "evals.v-1={prompt_field: q}")


def test_an_unknown_key_in_the_file_is_reported_with_its_line(write, refusal):
    path = write("run: {name: a}\ntrainer:\n  learning_rate: 1e-5\n")
    assert (
        f"{path}, line 3: trainer.learning_rate is not a setting; did you mean algorithm."
        in refusal(path)
    )


def test_all_problems_come_in_one_message(write, refusal):
    path = write("sampler:\n  slots: 0\n  top_p: 2\nmodel: {dtype: fp16}\nfoo: 1\n")
    message = refusal(path, "run.steps=many", "eval.evry=3")
    for expected in (
        "6 problems",
        f"{path}, line 2: sampler.slots = 0 is not allowed; it must be a whole number >= 1",
        f"{path}, line 3: sampler.top_p = 2 is not allowed; it must be a number > 0 and <= 1.",
        f"{path}, line 4: model.dtype = 'fp16' is not allowed; it must be one of float32, bf",
        f"{path}, line 5: foo is not a setting",
        "command line: run.steps = 'many' is not allowed; it must be a whole number >= 1.",
        "command line: eval.evry is not a setting; did you mean eval.every?",
    ):
        assert expected in message


LETTERS = "abcdefghi"
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in pairwise(LETTERS)
)
BOMB_KEY = "[&a [1], " + ", ".join(
    f"&{new} [{','.join([f'*{old}'] * 9)}]" for old, new in pairwise(LETTERS)
) + "]"  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {name: a}\nrun: {name: b}\n", "line 2: run is given twice, first in line 1"),
        ("run:\n  name: a\n  name: b\n", "line 3: run.name is given twice, first in line 2"),
        ("run: {name: a\nmodel: 1\n", "not valid YAML"),
        ("run:\n\t name: a\n", "line 2, column 1: not valid YAML"),
        ("- run\n", "must hold sections"),
        ("run: 5\n", "line 1: run = 5 must be a section"),
        ("run:\n", "line 1: run = null must be a section"),
        ("run: &a {name: b}\nmesh: *a\n", "mesh.name is not a setting"),
        ("run: &a [*a]\n", "nested more than"),
        ("run: {? [a]: b}\n", "not valid YAML"),
        ("run: !!python/object:os.system {}\n", "not valid YAML"),
        ("run: {seed: 2001-99-99}\n", "not valid YAML"),
        ("a: " + "[" * 5000, "not valid YAML"),
        (b"run: \xff\n", "not UTF-8"),
        (BOMB, "more than 10,000 keys and values"),
        ("run: {? [a]: b}\n", "line 1: not valid YAML: a key that is not text"),
        (f"run: {{? {BOMB_KEY} : b}}\n", "not valid YAML: a key that is not text"),
        ("#" * (2**18 + 1), "longer than 262,144 bytes"),
        ('run: {dir: "a\\0"}', "run.dir = 'a\\x00' is not allowed"),
        ("run: {name: .hidden}", "is not allowed; it must be text like"),
        (b"run: {seed: " + b"9" * 5000 + b"}", "not valid YAML"),
        ("run: {seed: 0x" + "f" * 5000 + "}", "a very long number"),
        ("run: {steps: true}", "run.steps = true is not allowed"),
        ("run: {resume: 1}", "run.resume = 1 is not allowed; it must be true or false"),
        ("algorithm: {learning_rate: .nan}", "learning_rate = nan is not allowed"),
        ("algorithm: {learning_rate: .inf}", "learning_rate = inf is not allowed"),
        ("algorithm: {loss: {a: {}, b: {}}}", "it must be a name or {name: {argument: value}}"),
        ("run: {name: ../x}", "run.name = '../x' is not allowed"),
        ("trainer: {row_length: 0}", "it must be a whole number >= 1 or null"),
    ],
)
def test_a_malformed_file_is_refused_in_words(write, text, expected, refusal):
    assert expected in refusal(write(text))


def test_shapings_are_a_list_of_names_and_settings(write):
    path = write("algorithm: {shaping: [mask_truncated]}")
    assert load(path, []).algorithm.shaping == ("mask_truncated",)
    config = load(path, ["algorithm.shaping=[{cap: {low: 0, high: 1}}, mask_truncated]"])
    assert config.algorithm.shaping == ({"cap": {"low": 0, "high": 1}}, "mask_truncated")


def test_of_very_many_problems_the_first_are_reported(write, refusal):
    message = refusal(write("".join(f"key{i}: 1\n" for i in range(4000))))
    assert message.startswith("more than 20 problems") and message.count("is not a setting") == 20


def test_a_missing_file_is_refused(tmp_path, refusal):
    assert "cannot be read" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal("a\0b")


@pytest.mark.parametrize(
    "override", ["x", "=3", "a..b=1", "run.name.x=1", "run.steps=[", "run.steps="]
)
def test_a_malformed_override_is_refused(write, override, refusal):
    assert "command line" in refusal(write(""), override)


def test_help_explains_every_field():
    text = help_text()

    def check(section, path):
        for name, field in section.model_fields.items():
            inner = section_of(field)
            if inner is not None:
                null = " = null:" if is_optional(field) and field.default is None else ""
                assert f"{'.'.join([*path, name])}{null}" in text
                check(inner, [*path, name])
            else:
                assert f"{'.'.join([*path, name])} = " in text
                assert field.description and " ".join(field.description.split()) in text

    check(Config, [])
    assert "sampler.top_p = 1.0    (a number > 0 and <= 1)" in text


@pytest.mark.full
def test_the_command_line_needs_no_jax():
    code = (
        "import sys, jaxrl_async.config.load; "
        "sys.exit(bool({'jax', 'grain', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parent).returncode == 0


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats().map(lambda x: f"{x}"),
    st.text(max_size=8),
    st.sampled_from(
        ["*a", "&a", "<<", "!!binary aGk=", "!!set {a}", "2001-01-01", "1:30", "~", "{", "[", '"']
    ),
)
KEYS = st.sampled_from(
    ["run", "run.name", "run.steps", "sampler", "sampler.top_p", "algorithm.loss", "x", ".",
     "algorithm.loss.a", "algorithm.loss.a.b", "mesh.trainer.fsdp", "data.jsonl.template",
     "trainer.row_length"]
)  # fmt: skip
YAMLS = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda s: s.encode("utf-8", "surrogatepass")),
    st.dictionaries(
        st.sampled_from(["run", "sampler", "algorithm", "model"]),
        st.dictionaries(st.sampled_from(["name", "steps", "slots", "loss", "?"]), SCALARS),
    ).map(lambda d: "\n".join(f"{k}:\n" + "\n".join(f"  {i}: {v}" for i, v in s.items())
                              for k, s in d.items()).encode("utf-8", "surrogatepass")),
)  # fmt: skip


VALID = yaml.safe_load((CONFIGS / "addition.yaml").read_text())
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.dates()
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip
PATHS = sorted(path for path, _ in all_paths(Config, ()))


@st.composite
def mutated_trees(draw):
    """A valid configuration with values put in at a few places, known and unknown."""
    tree = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 4))):
        path = (*draw(st.sampled_from(PATHS)), *draw(st.lists(st.text(max_size=3), max_size=1)))
        inner = tree
        for key in path[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        inner[path[-1]] = draw(TREES)
    return yaml.safe_dump(tree, allow_unicode=draw(st.booleans())).encode("utf-8", "replace")


@st.composite
def mutated_bytes(draw):
    """A valid configuration with bytes changed."""
    raw = bytearray((CONFIGS / "addition.yaml").read_bytes()[-900:])
    for _ in range(draw(st.integers(1, 6))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


ANYTHING = (
    YAMLS | TREES.map(lambda t: yaml.safe_dump(t).encode("utf-8", "replace")) | mutated_trees()
    | mutated_bytes()
)  # fmt: skip
OVERRIDES = st.lists(
    st.text(max_size=20) | st.tuples(KEYS, SCALARS).map(lambda pair: f"{pair[0]}={pair[1]}"),
    max_size=3,
)


@pytest.mark.full
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANYTHING, overrides=OVERRIDES)
@example(text=b"run: {name: \xed\xa0\x80}", overrides=[])
@example(text=b"", overrides=["run.dir=\udcff", "algorithm.loss=\ud800"])
def test_fuzz_whatever_is_given_is_a_config_or_a_config_error(write, text, overrides):
    path = write(text)
    try:
        config = load(path, overrides)
    except ConfigError as error:
        assert str(error) and len(str(error)) < 10_000
    else:
        assert load(write(dump(config))) == config


@pytest.mark.parametrize("nothing", ["null", "~"])
def test_null_on_the_command_line_is_nothing_also_for_a_function(tmp_path, nothing):
    file = tmp_path / "c.yaml"
    file.write_text("algorithm: {correction: tis}\n")
    assert load(file, []).algorithm.correction == "tis"
    assert load(file, [f"algorithm.correction={nothing}"]).algorithm.correction is None


@pytest.mark.parametrize(("word", "filled"), [("initial", "model"), ("policy", "policy")])
def test_an_override_keeps_the_player_that_a_word_names(write, word, filled):
    path = write(f"task: nim\nseats: {{second: {word}}}")
    seat = load(path, ["seats.second.temperature=0.5"]).players["second"]
    assert seat.temperature == 0.5
    assert getattr(seat, filled) == {"initial": "initial", "policy": True}[word]


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("", ["evals.hard.sampels=2"], "did you mean evals.hard.samples?"),
        ("task: nim", ["seats.b.older.evry=2"], "did you mean seats.b.older.every?"),
        ("evals: {hard: null}", [], "line 1: evals.hard = null must be a section"),
        ("teachers: {a: DIR}", [], "line 1: teachers.a = 'DIR' must be a section"),
        ("evals: {a/b: {}}", [], "line 1: evals: 'a/b' cannot be a name; a name must be like ^"),
    ],
)
def test_what_is_wrong_in_a_section_with_a_name_is_said_with_its_path(
    write, refusal, text, overrides, said
):
    told = refusal(write(text), *overrides)
    assert said in told and "NamedEval" not in told


def test_a_wrong_setting_of_a_section_is_not_said_to_be_written_null(write, refusal, caplog):
    assert "did you mean critic.learning_rate?" in refusal(write("critic: {lerning_rate: 3}"))
    assert "critic=null" not in caplog.text


@pytest.mark.parametrize(
    ("prefix", "first"),
    [
        ("remote", "remote = null:  Samplers in separate processes"),
        ("evals.hard.samples", "  evals.hard.samples = 1    (a whole number >= 1"),
        ("evals.hard", "  evals.hard.data = null    (text or null)"),
        ("algorithm.group_size", "  algorithm.group_size = "),
    ],
)
def test_the_help_of_a_section_says_what_it_is_and_a_name_has_its_settings(prefix, first):
    assert help_text(prefix).lstrip("\n").startswith(first)

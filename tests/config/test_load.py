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

from jaxrl_async.config.load import _all_paths, dump, help_text, load
from jaxrl_async.config.schema import COMPARED_IN_GROUP, DIVIDED_IN_GROUP, Config
from jaxrl_async.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return to_file


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_an_empty_file_gives_the_defaults(write):
    assert load(write("")) == Config()


@pytest.mark.parametrize("name", sorted(p.name for p in CONFIGS.glob("*.yaml")))
def test_the_shipped_configurations_load_and_survive_a_dump(name, write):
    given = ["data.jsonl.path=x.jsonl"] if name == "gsm8k.yaml" else []
    config = load(CONFIGS / name, given)
    assert load(write(dump(config))) == config
    assert (CONFIGS / name).read_text().startswith(f"# python -m jaxrl_async.train configs/{name}")


def test_the_gsm8k_configuration_asks_for_its_file():
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
    given = ["data.source=jsonl", "data.jsonl.path=x", override]
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
def test_an_unknown_key_gets_the_nearest_known_one(write, key, suggestion):
    message = refusal(write(""), f"{key}=1")
    assert "command line" in message
    assert f"did you mean {suggestion}" in message


def test_an_unknown_key_in_the_file_is_told_with_its_line(write):
    path = write("run: {name: a}\ntrainer:\n  learning_rate: 1e-5\n")
    assert (
        f"{path}, line 3: trainer.learning_rate is not a setting; did you mean algorithm."
        in refusal(path)
    )


def test_all_problems_come_in_one_message(write):
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
        ("run: {? [a]: b}\n", "line 1: not valid YAML: a key that is no text"),
        (f"run: {{? {BOMB_KEY} : b}}\n", "not valid YAML: a key that is no text"),
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
def test_a_malformed_file_is_refused_in_words(write, text, expected):
    assert expected in refusal(write(text))


def test_impossible_combinations_name_both_keys_and_a_way_out(write):
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
        with pytest.raises(ValueError, match="could never be filled"):
            Config(**sections)


def test_where_what_is_too_old_is_dropped_the_window_may_be_any():
    dropping = {"when_too_old": "drop", "max_staleness": 2, "lookahead": 99, "adapt": "ess"}
    config = Config(staleness=dropping, buffer={"reuse": 3})
    assert config.lowest_limit == 1


def test_shapings_are_a_list_of_names_and_settings(write):
    path = write("algorithm: {shaping: [mask_truncated]}")
    assert load(path, []).algorithm.shaping == ("mask_truncated",)
    config = load(path, ["algorithm.shaping=[{cap: {low: 0, high: 1}}, mask_truncated]"])
    assert config.algorithm.shaping == ({"cap": {"low": 0, "high": 1}}, "mask_truncated")


def test_of_very_many_problems_the_first_are_told(write):
    message = refusal(write("".join(f"key{i}: 1\n" for i in range(4000))))
    assert message.startswith("more than 20 problems") and message.count("is not a setting") == 20


def test_a_missing_file_is_refused(tmp_path):
    assert "cannot be read" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal("a\0b")


@pytest.mark.parametrize(
    "override", ["x", "=3", "a..b=1", "run.name.x=1", "run.steps=[", "run.steps="]
)
def test_a_malformed_override_is_refused(write, override):
    assert "command line" in refusal(write(""), override)


def test_help_explains_every_field():
    text = help_text()

    def check(section, path):
        for name, field in section.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                check(inner, [*path, name])
            else:
                assert f"{'.'.join([*path, name])} = " in text
                assert field.description and " ".join(field.description.split()) in text

    check(Config, [])
    assert "sampler.top_p = 1.0    (a number > 0 and <= 1)" in text


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
PATHS = sorted(path for path, _ in _all_paths(Config, ()))


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


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.kl_target=0.1"], "read by nothing without algorithm.kl_coefficient above 0"),
        (["reference.ema=0.9"], "reference.ema (0.9) is read by nothing without algorithm.kl_c"),
        (["critic.path=somewhere"], "read by nothing without algorithm.advantage=gae"),
        (["algorithm.dynamic_sampling=true", "algorithm.group_size=1"], "always are"),
        (
            ["algorithm.supervised_coefficient=0.1", "sampler.temperature=0.7"],
            "worked answers are learnt at 1",
        ),
        (["reward.function_weight=0"], "there is none"),
        (
            ["algorithm.advantage=gdpo", "reward.model=x", "reward.model_weight=2"],
            "weighs the parts",
        ),
        (["algorithm.kl=full", "algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"], "kl_in"),
        (["teacher.source=path"], "do not go together"),
        (
            [
                "teacher.source=self",
                "teacher.form=loss",
                "algorithm.kl=full",
                "algorithm.kl_coefficient=0.1",
            ],
            "does that once",
        ),
        (["mesh.sampler.context=2"], "mesh.sampler.context (2) must be 1"),
        (
            ["mesh.trainer.context=8", "trainer.row_length=136"],
            "multiple of 2 * mesh.trainer.context (16)",
        ),
        (["weights.dtype=int8"], "weights.probe_tolerance (0.001). Raise it to about 0.5"),
        (["trainer.offload=[reference]"], "trainer.offload=reference needs a reference"),
        (["model.architecture.experts=4"], "exactly with family=qwen3_moe"),
        (
            ["model.architecture.family=qwen3_moe", "model.architecture.experts=1"],
            "experts_per_token (2) must be at most",
        ),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_settings_that_would_silently_do_nothing_are_refused(overrides, told):
    assert told in refusal(CONFIGS / "addition.yaml", *overrides)


UNREAD = [
    (["algorithm.max_resampled=5"], "algorithm.dynamic_sampling=true"),
    (["algorithm.signal_std=0.1"], "algorithm.dynamic_sampling=true"),
    (["algorithm.signal_part=length"], "algorithm.dynamic_sampling=true"),
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
    (["teacher.kind=js"], "teacher.source"),
    (["teacher.coefficient=2"], "teacher.source"),
    (["teacher.source=self", "teacher.kind=forward"], "teacher.form=loss"),
    (["teacher.source=self", "teacher.top_k=4"], "teacher.form=loss"),
    (
        ["teacher.source=self", "teacher.form=loss", "teacher.beta=0.25"],
        "teacher.form=loss and kind=js",
    ),
    (["staleness.overcommit=2"], "staleness.when_too_old=drop"),
    (["staleness.ess_target=0.5"], "staleness.adapt=ess"),
    (["data.curriculum_pool=8"], "data.curriculum"),
    (["data.jsonl.path=x"], "data.source=jsonl"),
    (["warm_start.path=x"], "warm_start.steps above 0"),
    (["data.jsonl.prompt_field=x"], "data.source=jsonl or warm_start.path"),
    (["data.jsonl.template=x {prompt}"], "data.source=jsonl or warm_start.path"),
    (["algorithm.loss=gpg", "algorithm.anchor=proximal"], "another algorithm.loss or a correction"),
    (["reward.model_weight=0.5"], "reward.model"),
    (["sft.batch_size=4"], "another run.job"),
    (["preference.loss=ipo"], "another run.job"),
]


@pytest.mark.parametrize(("overrides", "wanted"), UNREAD, ids=[words[-1] for words, _ in UNREAD])
def test_what_nothing_reads_is_refused_with_what_would_make_it_read(write, overrides, wanted):
    message = refusal(write(""), *overrides)
    key = overrides[-1].partition("=")[0]
    assert f"{key} (" in message and f"is read by nothing without {wanted}" in message
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
        ["teacher.source=none"],
        ["teacher.form (loss)", "teacher.kind (js)", "teacher.coefficient (0.05)"],
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
def test_what_a_feature_would_read_that_is_turned_off_is_told_and_not_refused(
    write, caplog, name, overrides, told
):
    config = load(CONFIGS / f"{name}.yaml", overrides)
    lines = [r.getMessage().partition(": ")[2].split(", ") for r in caplog.records]
    assert [key for line in lines for key in line] == told
    assert load(write(dump(config))) == config


def test_a_default_that_is_written_down_is_refused_nowhere(write):
    load(write(""), ["algorithm.kl=k3", "critic.clip=0.2", "teacher.kind=reverse"])


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
]  # fmt: skip


@pytest.mark.parametrize("overrides", READ, ids=lambda words: words[-1])
def test_the_same_settings_are_taken_where_something_reads_them(overrides):
    load(CONFIGS / "addition.yaml", overrides)


NOTHING_LEARNT = [
    *(
        (["algorithm.group_size=1", f"algorithm.advantage={name}"], "all advantages would be 0")
        for name in COMPARED_IN_GROUP
    ),
    (["algorithm.group_size=1", "teacher.source=self"], "for distillation alone teacher.rewards=0"),
    (["sampler.temperature=0"], "leave one token to draw"),
    (["sampler.top_k=1"], "leave one token to draw"),
    (["algorithm.kl=k1", "algorithm.kl_coefficient=0.1"], "expected gradient of 0"),
    (["trainer.warmup_steps=121"], "more than all updates of the run (120"),
    (
        ["trainer.warmup_steps=116", "algorithm.advantage=gae", "critic.warmup_steps=5"],
        "(115: run.steps less critic.warmup_steps",
    ),
    (["algorithm.minibatches=129"], "more than the answers of a step (128"),
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
    (["algorithm.advantage=gae", "critic.warmup_steps=120"], "leaves the policy none"),
    (["teacher.source=self", "teacher.coefficient=0"], "learns nothing from teacher.source=self"),
    (
        ["teacher.source=self", "teacher.rewards=0", "algorithm.dynamic_sampling=true"],
        "does not learn from",
    ),
    (["algorithm.shaping=[{overlong_filter: {max_tokens: 48}}]"], "it would never act"),
    (
        ["algorithm.shaping=[{soft_overlong: {max_tokens: 60, cache_tokens: 12}}]"],
        "more than 48 tokens, and sampler.max_new_tokens allows 48",
    ),
    *(
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward", f"algorithm.advantage={n}"],
            "blows the KL of a group of equal rewards up",
        )
        for n in DIVIDED_IN_GROUP
    ),
]


@pytest.mark.parametrize(
    ("overrides", "told"), NOTHING_LEARNT, ids=["-".join(words) for words, _ in NOTHING_LEARNT]
)
def test_settings_with_which_nothing_or_noise_is_learnt_are_refused(overrides, told):
    assert told in refusal(CONFIGS / "addition.yaml", *overrides)


def test_all_broken_rules_are_told_at_once(write):
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


@pytest.mark.parametrize(
    ("job", "setting"),
    [
        ("sft", "algorithm.kl_coefficient=0.1"),
        ("sft", "preference.batch_size=2"),
        ("preference", "teacher.source=self"),
        ("preference", "preference.margin=0.1"),
        ("preference", "sft.batch_size=2"),
        ("reward_model", "preference.loss=ipo"),
        ("reward_model", "algorithm.loss=cispo"),
        ("sft", "critic.clip=1"),
    ],
)
def test_what_another_job_would_read_is_refused(write, job, setting):
    assert f"{setting.partition('=')[0]} (" in refusal(write(""), f"run.job={job}", setting)


def test_a_reference_is_refused_beside_a_preference_loss_without_one(write):
    words = ["run.job=preference", "preference.reference=x"]
    load(write(""), words)
    assert "preference.reference (x)" in refusal(write(""), *words, "preference.loss=simpo")


def test_a_section_that_is_written_out_in_full_says_only_what_is_not_the_default(write, caplog):
    """As --print-config prints it, and a run's config.yaml holds it."""
    whole = Config().model_dump()
    assert load(write(yaml.safe_dump(whole))) == Config()
    assert not caplog.records
    whole["critic"]["warmup_steps"] = 3
    load(write(yaml.safe_dump(whole)))
    assert "critic.warmup_steps (3)" in caplog.text


def test_one_configuration_may_say_how_rollouts_are_made_for_several_jobs(write):
    shared = ["sampler.slots=4", "staleness.max_staleness=2", "algorithm.group_size=2"]
    for job in ("sft", "preference", "reward_model"):
        load(write(""), [f"run.job={job}", *shared])


@pytest.mark.parametrize("nothing", ["null", "~"])
def test_null_on_the_command_line_is_nothing_also_for_a_function(tmp_path, nothing):
    file = tmp_path / "c.yaml"
    file.write_text("algorithm: {correction: tis}\n")
    assert load(file, []).algorithm.correction == "tis"
    assert load(file, [f"algorithm.correction={nothing}"]).algorithm.correction is None

"""Names on the Hugging Face hub: from a cache with the layout that `hf download` makes, and refused
in one sentence where there is no network."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from runs import many_digits, run_job

from jaxrl_async.config.load import load
from jaxrl_async.config.several import runs_of
from jaxrl_async.data import hub
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.hub import hub_name_of, hub_records, is_hub_name, model_folder
from jaxrl_async.data.record_files import rows_of_file
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.start_checks import check_paths, with_hub_folders

SMALL = (
    "run.steps=1",
    "trainer.warmup_steps=0",
    "warm_start.steps=0",
    "sampler.slots=4",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=2",
    "data.jsonl.template={prompt}",
    "data.jsonl.eval_path=tiny/sums:main:test",
    "model.lora.rank=2",
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def into_cache(folder: Path, cache: Path, name: str, kind: str) -> Path:
    """Copy a folder into a cache as huggingface_hub lays it out: blobs, links to them below the
    commit, and a reference; return the snapshot."""
    own = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = own / "snapshots" / COMMIT
    (own / "blobs").mkdir(parents=True)
    (own / "refs").mkdir()
    (own / "refs/main").write_text(COMMIT)
    for number, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        shutil.copy(file, own / f"blobs/{number}")
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(own / f"blobs/{number}")
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, a working directory beside it, and no network."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def policy(tmp_path) -> Path:
    tokenizer = addition_tokenizer()
    spec = tiny_spec(tokenizer.vocab_size)
    Policy(spec, tiny_params(spec), tokenizer).save_pretrained(tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def records(tmp_path) -> Path:
    """A data set of two configurations, as its README.md declares them."""
    folder = tmp_path / "set"
    for split, answers in (("train", "34"), ("test", "5")):  # in the embedded tokenizer's words
        (folder / "main").mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"question": f"{a}=", "answer": a}) + "\n" for a in answers]
        (folder / f"main/{split}.jsonl").write_text("".join(lines))
    (folder / "other.jsonl").write_text('{"question": "o", "answer": "o"}\n')
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n"
        "- config_name: other\n  data_files: other.jsonl\n---\n"
    )
    return folder


def test_a_name_is_one_only_where_no_such_path_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    for path in ("Qwen3", "./Qwen/Qwen3", "/Qwen/Qwen3", "a/b/c", "gs://a/b", "~/model"):
        assert not is_hub_name(path) and hub_records(path) is None
    (tmp_path / "runs").mkdir()
    assert not is_hub_name("runs/nothing"), "runs/ is here: a mistyped path"
    assert hub_records("openai/gsm8k:main:test") == hub.HubRecords("openai/gsm8k", "main", "test")
    assert hub_records("openai/gsm8k") == hub.HubRecords("openai/gsm8k", None, "train")
    assert hub_records("runs/x.jsonl") is None


@pytest.mark.full
def test_a_model_in_the_cache_is_used_by_every_setting_that_names_it(cache, policy):
    snapshot = into_cache(policy, cache, "tiny/adder", "model")
    config = with_hub_folders(
        load("recipe:addition", ["model.path=tiny/adder", "data.tokenizer=tiny/adder"])
    )
    assert config.model.path == config.data.tokenizer == str(snapshot)
    check_paths(config)
    loaded = Policy.from_pretrained("tiny/adder")
    made = Policy.from_pretrained(policy)
    assert np.array_equal(loaded.params["embed"], made.params["embed"])
    assert loaded.tokenizer.vocab_size == made.tokenizer.vocab_size
    assert hub_name_of(str(snapshot)) == "tiny/adder" and hub_name_of(str(policy)) == str(policy)


def test_a_model_that_one_of_several_runs_names_is_found(cache, policy):
    snapshot = into_cache(policy, cache, "tiny/adder", "model")
    own = {"critic": {"path": "tiny/adder"}, "algorithm": {"advantage": "gae", "group_size": 3}}
    tree = {"model": {"lora": {"rank": 4}}, "runs": {"taught": own, "other": {}}}
    config = with_hub_folders(load(tree))
    taught, other = runs_of(config).values()
    assert taught.critic.path == str(snapshot) and other.critic is None
    assert taught.algorithm.group_size == 3, "what else differs stays"
    check_paths(taught)
    own["critic"]["path"] = "tiny/none"
    with pytest.raises(ConfigError, match=r"runs\.taught\.critic\.path = 'tiny/none'"):
        with_hub_folders(load(tree))


def test_a_cache_with_only_a_part_of_a_model_is_not_enough(cache, policy):
    snapshot = into_cache(policy, cache, "tiny/adder", "model")
    (snapshot / "model.safetensors").unlink()
    assert model_folder("tiny/adder", "data.tokenizer", "tokenizer") == snapshot
    with pytest.raises(ConfigError, match="nor in the hub's cache"):
        model_folder("tiny/adder", "model.path")
    weights = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (snapshot / hub.INDEX).write_text(json.dumps(weights))
    (snapshot / "one.safetensors").touch()
    with pytest.raises(ConfigError, match="nor in the hub's cache"):
        model_folder("tiny/adder", "model.path")
    (snapshot / "two.safetensors").touch()
    assert model_folder("tiny/adder", "model.path") == snapshot


def test_without_a_network_the_command_to_download_is_shown(cache):
    with pytest.raises(ConfigError) as refused:
        with_hub_folders(load("recipe:addition", ["model.path=Qwen/Qwen3-0.6B"]))
    message = str(refused.value)
    assert "model.path = 'Qwen/Qwen3-0.6B'" in message and "HF_HUB_OFFLINE is set" in message
    assert "run `hf download Qwen/Qwen3-0.6B`" in message and "\n" not in message
    words = ["data.addition=null", "data.jsonl.path=openai/gsm8k:main", "warm_start.steps=0",
             "reward.function=gsm8k"]  # fmt: skip
    with pytest.raises(ConfigError, match="hf download openai/gsm8k --repo-type dataset`"):
        with_hub_folders(load("recipe:addition", words))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ConnectError", "cannot be reached (ConnectError: no route)"),
        ("ConnectTimeout", "cannot be reached (ConnectTimeout: no route)"),
        ("GatedRepoError", "hf auth login"),
        ("RepositoryNotFoundError", "it does not exist on the hub"),
    ],
)
def test_what_the_hub_answers_is_reported_with_what_to_do(cache, monkeypatch, kind, message):
    limits = []

    def fails(self, name, *, repo_type, timeout):
        limits.append(timeout)
        raise type(kind, (Exception,), {})("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fails)
    with pytest.raises(ConfigError) as refused:
        model_folder("a/b", "model.path")
    assert message in str(refused.value) and "hf download a/b" in str(refused.value)
    assert limits == [hub.ASK_S]


def test_what_the_cache_lacks_is_downloaded_without_other_forms_of_the_weights(
    cache, policy, monkeypatch
):
    requests = []

    def download(name, *, repo_type, local_files_only=False, **chosen):
        if local_files_only:
            raise FileNotFoundError
        requests.append((name, repo_type, chosen))
        return str(policy)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder("a/b", "model.path") == policy
    ((name, kind, chosen),) = requests
    assert (name, kind) == ("a/b", "model")

    def taken(files: list[str]) -> list[str]:
        from huggingface_hub.utils import filter_repo_objects

        return list(filter_repo_objects(files, **chosen))

    files = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    other = ["original/model.safetensors", "onnx/config.json", "pytorch_model.bin", "README.md"]
    assert taken([*files, *other]) == files


def test_records_by_name_are_those_of_their_configuration_and_split(cache, records):
    pytest.importorskip("datasets")
    into_cache(records, cache, "tiny/sums", "dataset")

    def answers(path: str) -> list[str]:
        return [row.fields["answer"] for row in rows_of_file(path)]

    assert answers("tiny/sums:main") == answers("tiny/sums:main:train") == ["3", "4"]
    assert answers("tiny/sums:main:test") == ["5"]
    assert answers("tiny/sums:other") == ["o"]
    with pytest.raises(DataError, match=r"main.*OWNER/NAME:CONFIG:SPLIT"):
        answers("tiny/sums")
    with pytest.raises(DataError, match="its split 'dev' cannot be read"):
        answers("tiny/sums:main:dev")


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_of_names_trains_and_its_adapter_names_the_base(cache, policy, records):
    pytest.importorskip("datasets")
    into_cache(policy, cache, "tiny/adder", "model")
    into_cache(records, cache, "tiny/sums", "dataset")
    names = ("model.path=tiny/adder", "data.addition=null", "data.jsonl.path=tiny/sums:main")
    metrics = run_job("addition", Path("runs"), *names, *SMALL, many_digits(Path()))
    assert [line["step"] for line in metrics] == [0, 1]
    adapter = json.loads(Path("runs/addition/adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "tiny/adder"

"""Models and records at addresses: copied once, from file systems that fsspec knows."""

import json
import os
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from jaxrl_async.config.load import load
from jaxrl_async.data import addresses
from jaxrl_async.data.addresses import cache_root, copy_locally, is_address
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.start_checks import check_paths, with_hub_folders


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_root()


@pytest.fixture
def bucket():
    memory = fsspec.filesystem("memory")
    files = {
        "model/config.json": b"{}",
        "model/model.safetensors": b"weights",
        "model/original/consolidated.pth": b"another form",
        "model/notes.txt": b"of people",
        "data/a/1.jsonl": b'{"question": "1+1=", "answer": "2"}\n',
        "data/2.jsonl": b"{}\n",
    }
    memory.pipe({f"/bucket/{name}": content for name, content in files.items()})
    yield memory
    memory.rm("/bucket", recursive=True)


def inside(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("path", ["gs://b/x", "hf://datasets/a/b", "https://h/x.jsonl", "s3a://b"])
def test_an_address_has_a_scheme(path):
    assert is_address(path)


@pytest.mark.parametrize(
    "path", ["Qwen/Qwen3", "/a//b", "C:\\x", "a:b", "recipe:grpo", "GS//b", ""]
)
def test_a_path_of_this_machine_is_none(path):
    assert not is_address(path)


def test_a_model_is_copied_without_what_is_no_part_of_it_and_only_once(bucket, cache, monkeypatch):
    folder = copy_locally("memory://bucket/model", "model.path")
    assert folder.name == "model" and inside(folder) == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    with monkeypatch.context() as patch:
        patch.setattr(addresses, "_copy", None)
        assert copy_locally("memory://bucket/model/", "model.path") == folder
    bucket.pipe("/bucket/model/model.safetensors", b"other weights")
    other = copy_locally("memory://bucket/model", "model.path")
    assert (other / "model.safetensors").read_bytes() == b"other weights"
    assert (folder / "model.safetensors").read_bytes() == b"weights", "a run may still read it"
    assert inside(copy_locally("memory://bucket/model", "x", "config")) == {"config.json"}


def test_records_are_a_file_or_all_below_a_folder(bucket):
    assert inside(copy_locally("memory://bucket/data", "x", "dataset")) == {"a/1.jsonl", "2.jsonl"}
    file = copy_locally("memory://bucket/data/a/1.jsonl", "x", "dataset")
    assert file.name == "1.jsonl" and json.loads(file.read_text())["answer"] == "2"


def test_a_copy_that_fails_leaves_nothing(bucket, cache, monkeypatch):
    def full(*args: object, **more: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(type(bucket), "get_file", full)
    with pytest.raises(ConfigError, match=r"model\.path = 'memory://bucket/model'.*No space left"):
        copy_locally("memory://bucket/model", "model.path")
    assert not list(cache.iterdir())


def test_what_a_killed_copy_has_left_is_removed_and_one_under_way_is_not(bucket, cache):
    for name, age_s in (("old", 10 * 86_400), ("new", 60)):
        left = cache / f"{addresses.UNFINISHED}{name}"
        (left / "model").mkdir(parents=True)
        os.utime(left, (time.time() - age_s,) * 2)
    copy_locally("memory://bucket/model", "model.path")
    assert {p.name for p in cache.glob(".*")} == {f"{addresses.UNFINISHED}new"}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://bucket/nothing", "found nothing"),
        ("memory://bucket/data", "none of .*safetensors"),
        ("nowhere://b/x", "a scheme that fsspec supports"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_do(bucket, address, message):
    with pytest.raises(ConfigError, match=rf"model\.path = '{address}'.*{message}"):
        copy_locally(address, "model.path")


def test_a_name_that_leads_out_of_the_copy_is_refused(bucket, cache, monkeypatch):
    names = {"/bucket/data/../../x.jsonl": {"size": 2}}
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "find", lambda *args, **more: names)
        with pytest.raises(ConfigError, match=r"'\.\./\.\./x\.jsonl' is outside the folder"):
            copy_locally("memory://bucket/data", "data.jsonl.path", "dataset")
    assert not cache.exists()


def test_a_missing_package_is_named(monkeypatch):
    def without(address: str) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", without)
    with pytest.raises(ConfigError, match=r"pip install gcsfs, or copy it here"):
        copy_locally("gs://bucket/model", "model.path")


def test_a_configuration_gets_paths_of_this_machine(bucket, tmp_path):
    words = ["model.path=memory://bucket/model", "data.jsonl.path=memory://bucket/data/2.jsonl"]
    (tmp_path / "x.yaml").write_text("data: {tokenizer: 'memory://bucket/model'}")
    config = with_hub_folders(load(str(tmp_path / "x.yaml"), words))
    check_paths(config)
    assert Path(config.model.path).name == "model" and config.data.jsonl.path.endswith("2.jsonl")
    assert inside(Path(config.data.tokenizer)) == {"config.json"}


def test_sections_by_name_keep_their_other_settings_and_names(bucket, tmp_path):
    words = ["evals={a.b: {data: memory://bucket/data/2.jsonl, every: 3}, c: {data: none.jsonl}}"]
    far = "far: {url: http://h/v1, model: m, tokenizer: memory://bucket/model}"
    words += [f"teachers={{near: {{path: memory://bucket/model, weight: 2}}, {far}}}"]
    words += ["teacher={source: teachers, column: teacher}"]
    (tmp_path / "x.yaml").write_text("")
    config = with_hub_folders(load(str(tmp_path / "x.yaml"), words))
    assert Path(config.evals["a.b"].data).is_file() and config.evals["a.b"].every == 3
    assert Path(config.teachers["near"].path).is_dir() and config.teachers["near"].weight == 2
    assert config.teachers["far"].url == "http://h/v1"
    assert inside(Path(config.teachers["far"].tokenizer)) == {"config.json"}
    with pytest.raises(ConfigError, match=r"evals\.c\.data = 'none\.jsonl': there is no such file"):
        check_paths(config)


@pytest.mark.full
def test_a_file_comes_over_http(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "x.jsonl").write_text('{"question": "?"}\n')
    pytest.importorskip("aiohttp", reason="needs aiohttp, which reads http:// for fsspec")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/x.jsonl"
        file = copy_locally(address, "data.jsonl.path", "dataset")
        signed = copy_locally(address + "?signature=a/b", "data.jsonl.path", "dataset")
        (tmp_path / "served" / "x.jsonl").write_text('{"question": "another"}\n')
        other = copy_locally(address, "data.jsonl.path", "dataset")
        server.shutdown()
    assert file.read_text() == signed.read_text() == '{"question": "?"}\n'
    assert other.read_text() == '{"question": "another"}\n', "it has changed there"
    assert file.name == signed.name == "x.jsonl"


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ("run.dir", []),
        ("remote.folder", ["remote.transfer=folder", "mesh.samplers_in=processes"]),
    ],
)
def test_results_are_not_written_to_an_address(setting, others, tmp_path):
    (tmp_path / "x.yaml").write_text("")
    with pytest.raises(ConfigError, match=rf"{setting} = 'gs://b/runs' is an address"):
        load(str(tmp_path / "x.yaml"), [f"{setting}=gs://b/runs", *others])

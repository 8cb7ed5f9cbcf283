"""Uploads to a hub: a server here speaks as much of it as huggingface_hub asks for."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from builders import tiny_params, tiny_spec
from safetensors.numpy import load

from jaxrl_async.config.load import dump
from jaxrl_async.config.load import load as load_config
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.model_card import model_card

TOKEN = "hf_of_the_test"


class Hub(BaseHTTPRequestHandler):
    """Takes repositories and commits; `state` is what it has."""

    state: dict

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid user token."})
        elif "/api/models/" in self.path:
            private = not self.state.get("public", False)
            self.answer(200, {"id": "ada/adder", "private": private, "siblings": []})
        else:
            self.answer(200, {"name": "ada", "type": "user", "orgs": []})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = f"http://{self.headers['Host']}/ada/adder"
        if self.path == "/api/repos/create":
            self.state["repository"] = json.loads(content)
            self.answer(200, {"url": url, "id": "ada/adder"})
        elif self.path == "/api/validate-yaml":
            self.state["checked"] = json.loads(content)["content"]
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = [{**f, **how} for f in json.loads(content)["files"]]
            self.answer(200, {"files": files})
        else:
            lines = [json.loads(line) for line in content.splitlines()]
            files = [x["value"] for x in lines if x["key"] == "file"]
            self.state["files"] = {f["path"]: base64.b64decode(f["content"]) for f in files}
            self.state["said"] = lines[0]["value"]["summary"]
            self.answer(200, {"commitUrl": f"{url}/commit/1", "commitOid": "1", "success": True})

    def answer(self, code: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub():
    state: dict = {}
    handler = type("OneHub", (Hub,), {"state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", state
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with what an export reads."""
    paths = Paths(tmp_path / "runs" / "adder")
    paths.root.mkdir(parents=True)
    (tmp_path / "x.yaml").write_text("run: {name: adder}")
    words = [f"run.dir={tmp_path}/runs", "run.steps=20", "algorithm.learning_rate=0.5"]
    paths.config.write_text(dump(load_config(str(tmp_path / "x.yaml"), words)))
    lines = [{"step": n, "reward/mean": n / 20, "eval/reward": n / 40} for n in range(21)]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = addition_tokenizer()
    spec = tiny_spec(tokenizer.vocab_size)
    Policy(spec, tiny_params(spec), tokenizer).save_pretrained(paths.root / "policy")
    return paths.root


def export(*words: object, endpoint: str, token: str = TOKEN) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": token, "NO_PROXY": "*"}
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_async", "export", *map(str, words)],
        env=environment | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
    )


@pytest.mark.full
def test_a_policy_is_uploaded_with_its_card(run, hub, tmp_path):
    endpoint, state = hub
    out = tmp_path / "out"
    done = export(run, out, "--upload", "ada/adder", "--private", endpoint=endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"uploaded: {endpoint}/ada/adder/commit/1"
    made = state["repository"]
    assert made["name"] == "adder" and (made.get("visibility") == "private" or made["private"])
    assert state["said"].endswith(": adder")
    files = state["files"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    written = (run / "policy" / "model.safetensors").read_bytes()
    assert load(files["model.safetensors"]).keys() == load(written).keys()
    card = (out / "README.md").read_text(encoding="utf-8")
    assert files["README.md"].decode() == card == model_card(Paths(run))


@pytest.mark.full
def test_a_token_that_is_refused_is_reported_before_anything_is_written(run, hub, tmp_path):
    endpoint, state = hub
    done = export(run, tmp_path / "out", "--upload", "ada/adder", endpoint=endpoint, token="hf_no")
    assert done.returncode == 2 and "hf auth login" in done.stderr
    assert not state and not (tmp_path / "out").exists()


@pytest.mark.full
def test_what_is_to_be_private_does_not_go_where_everybody_sees_it(run, hub, tmp_path):
    endpoint, state = hub
    state["public"] = True  # was made so before: to make it again changes nothing
    words = (run, tmp_path / "out", "--upload", "ada/adder")
    done = export(*words, "--private", endpoint=endpoint)
    assert done.returncode == 2 and "--private: ada/adder already exists" in done.stderr
    assert "files" not in state and not (tmp_path / "out").exists()
    assert export(*words, endpoint=endpoint).returncode == 0 and "README.md" in state["files"]


@pytest.mark.full
def test_a_name_without_an_owner_is_refused(run, tmp_path):
    done = export(run, tmp_path / "out", "--upload", "adder", endpoint="http://127.0.0.1:1")
    assert done.returncode == 2 and "give OWNER/NAME" in done.stderr
    done = export(run, tmp_path / "out", "--private", endpoint="http://127.0.0.1:1")
    assert done.returncode == 2 and "--private is for an upload" in done.stderr
    done = export(run, tmp_path / "out", "--upload", "", endpoint="http://127.0.0.1:1")
    assert done.returncode == 2 and "give OWNER/NAME" in done.stderr


def test_a_card_says_what_was_done_and_nothing_of_the_machine(run, tmp_path):
    card = model_card(Paths(run), step=10)
    _, front, body = card.split("---\n", 2)
    said = yaml.safe_load(front)
    assert said["library_name"] == "transformers" and "base_model" not in said
    assert {"jaxrl_async", "reinforcement-learning", "ppo_clip"} <= set(said["tags"])
    assert "| 10 | 0.25 | 0.5 |" in body and "| 0 | 0 | 0 |" in body and "| 11 |" not in body
    settings = yaml.safe_load(body.partition("```yaml\n")[2].partition("```")[0])
    assert settings["algorithm"]["learning_rate"] == 0.5 and settings["run"]["steps"] == 20
    assert str(tmp_path) not in card
    assert (
        yaml.safe_load(model_card(Paths(run), adapter=True).split("---\n")[1])["library_name"]
        == "peft"
    )


def test_a_card_names_base_and_records_of_the_hub(run):
    paths = Paths(run)
    cached = "/home/ada/.cache/models--Qwen--Qwen3-0.6B/snapshots/abc"
    text = paths.config.read_text().replace("path: null", f"path: {cached}", 1)
    assert cached in text
    config = yaml.safe_load(text)
    config["data"] |= {"addition": None, "jsonl": {"path": "openai/gsm8k:main"}}
    paths.config.write_text(yaml.safe_dump(config))
    card = model_card(paths)
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B" and front["datasets"] == ["openai/gsm8k"]
    assert "/home/ada" not in card and "path: Qwen/Qwen3-0.6B" in card


def test_a_card_has_no_address_and_no_password(run):
    words = [
        *("mesh.samplers_in=external", "sampler.engine=vllm", "model.path=Qwen/Qwen3-0.6B"),
        "sampler.engine_urls=[http://ada:secret@10.0.0.3:8000]",
        "metrics.mlflow={experiment: e, tracking_uri: 'http://ada:secret@10.0.0.4:5000'}",
        "metrics.prometheus=10.0.0.5:9000",
        "distributed={coordinator: '10.0.0.6:123', num_processes: 2, process_id: 0}",
        "task={/home/ada/task.py:t: {seen_at: 'http://10.0.0.7', server: 10.0.0.8, path: /home/x}}",
    ]
    paths = Paths(run)
    paths.config.write_text(dump(load_config(str(paths.config), words)))
    card = model_card(paths)
    for private in ("secret", "10.0.0.", "/home"):
        assert private not in card
    assert "engine: vllm" in card and "experiment: e" in card
    assert "task.py:t:\n    path: x\n" in card
    config = yaml.safe_load(paths.config.read_text()) | {"task": "openenv:http://10.0.0.9"}
    paths.config.write_text(yaml.safe_dump(config))
    assert "10.0.0." not in model_card(paths)

"""Bad input through the command: reported in words and with advice, before anything is trained."""

import json
import os
import shutil
import socket
import struct
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxrl_async.run.loop as loop
import jaxrl_async.run.offline as offline
from jaxrl_async.config.load import load
from jaxrl_async.config.recipes import recipe_names
from jaxrl_async.config.schema import ArchitectureSection
from jaxrl_async.config.several import runs_of
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.start_checks import check_names
from jaxrl_async.train_command import main
from jaxrl_async.trainer.update import Update

pytestmark = pytest.mark.full

WEIGHTS = "model.safetensors"
SMALL = (
    "data.addition.eval_size=4",
    "data.max_prompt_tokens=16",
    "sampler.slots=4",
    "sampler.max_length=64",
    "sampler.max_new_tokens=8",
    "algorithm.group_size=2",
    "algorithm.groups_per_step=2",
    "trainer.micro_batch_tokens=512",
    "warm_start.steps=1",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)
SCRATCH = "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16}"


class Trained(Exception):
    """A training step would have been made."""


@pytest.fixture(autouse=True)
def no_training(monkeypatch):
    def trained(*_, **__):
        raise Trained

    monkeypatch.setattr(Update, "update", trained)
    monkeypatch.setattr(loop, "run_threads", trained)
    monkeypatch.setattr(offline, "learn_job", trained)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small policy as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("model")
    shape = ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16)
    spec = ModelSpec.from_architecture(shape, 24)
    Policy(spec, init_params(spec, jax.random.key(0)), addition_tokenizer()).save_pretrained(folder)
    return folder


def command(tmp_path, *overrides, text=""):
    """Exit code of the command."""
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return main([str(file), *SMALL, f"run.dir={tmp_path / 'runs'}", *overrides])


def check_refusal(capsys, code, expected_code, *fragments, of_user=False):
    """of_user: what a user's own function raised ends the text, with its traceback alone."""
    message = capsys.readouterr().err
    assert code == expected_code, message
    for fragment in fragments:
        assert fragment in message
    assert ("Traceback" in message) == of_user and len(message) < 3000
    if of_user:
        assert "/jaxrl_async/" not in message.partition("Traceback")[2]
        return
    assert message.rstrip().endswith((".", "?"))


# ---- the configuration

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n\tname: a\n", "line 2, column 1: not valid YAML"),
        ("run: {name: a}\nrun: {name: b}\n", "run is given twice"),
        (BOMB, "more than 10,000 keys and values"),
        ("run: {? &a [*a, *a] : 1}\n", "not valid YAML"),
        ("just words", "must hold sections"),
        ("# " + "x" * 2**18, "longer than"),
        ("".join(f"key{i}: 1\n" for i in range(4000)), "more than 20 problems"),
        ("run: {name: a}".encode("utf-16"), "not UTF-8"),
        (bytes(range(256)), "not UTF-8"),
        (b"run: {name: a\0b}", "not valid YAML"),
        ('model: {path: "a\\0b"}', "model.path = 'a\\x00b' is not allowed"),
        ('model: {path: "\\ud800"}', "model.path = '\\ud800' is not allowed"),
    ],
    ids=lambda v: str(v[:20]),
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, capsys, text, message):
    check_refusal(capsys, command(tmp_path, text=text), 2, "config error: ", message)


@pytest.mark.parametrize("path", [".", "none.yaml", "/dev/zero", "a" * 300 + ".yaml"])
def test_what_is_no_file_is_refused(tmp_path, capsys, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    check_refusal(capsys, main([path]), 2, "config error: ", "Give the path")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.architecture.layrs=2"], "did you mean model.architecture.layers"),
        (["reward.api_key=hunter2"], "reward.api_key is not a setting"),
        (["algorithm.loss=ppo_clp"], "did you mean 'ppo_clip'"),
        (["algorithm.loss.ppo_clip.clp=2"], "no argument 'clp'"),
        (["algorithm.loss.ppo_clip.clip_low=.nan"], "clip_low must be float"),
        (["algorithm.loss.ppo_clip.clip_low=1" + "0" * 400], "clip_low must be float"),
        (["algorithm.loss.ppo_clip.dual_clip=0.5"], "dual_clip must be 0 or above 1"),
        (["algorithm.correction.truncate.level=word"], "level must be one of token, seq"),
        (["algorithm.advantage=best"], "unknown advantage"),
        (["algorithm.shaping=[soft]"], "unknown shaping"),
        (["algorithm.shaping=[cap]"], "shaping 'cap' needs low, high"),
        (["algorithm.shaping=[{downsample: {keep: x}}]"], "shaping"),
        (["algorithm.aggregate=mean"], "unknown aggregate"),
        (["algorithm.kl=k4", "algorithm.kl_coefficient=0.1"], "unknown kl estimator"),
        (["algorithm.learning_rate=.inf"], "it must be a number >= 0"),
        (["run.name=.."], "run.name = '..' is not allowed"),
        (["run.name=" + "a" * 129], "is not allowed"),
        (["sampler.kv_memory_mib=0.0001"], "sampler.kv_memory_mib"),
        (["model.architecture.head_dim=7"], "a whole number >= 1 and a multiple of 2"),
        (["model.architecture={layers: 65536, width: 2000000000}"], "a smaller model"),
        (["sampler={max_length: 2000000000}", "trainer.micro_batch_tokens=2000000000"], "KV cache"),
        (["mesh={colocated: true, samplers: 2}"], "mesh.samplers"),
    ],
    ids=lambda v: v[0][:50] if isinstance(v, list) else "",
)
def test_a_setting_that_cannot_be_is_refused_before_the_warm_start(
    tmp_path, capsys, overrides, message
):
    check_refusal(capsys, command(tmp_path, SCRATCH, *overrides), 2, "config error: ", message)


@pytest.mark.parametrize("size", ["64", "65536"])
def test_a_mesh_with_too_few_devices_is_refused(tmp_path, capsys, size):
    code = command(tmp_path, SCRATCH, f"mesh.trainer.fsdp={size}")
    check_refusal(capsys, code, 1, "MeshError", "Make the axes smaller")


@pytest.mark.parametrize("error", [MemoryError, lambda: RuntimeError("RESOURCE_EXHAUSTED: x")])
def test_running_out_of_memory_is_reported_with_the_way_out(tmp_path, capsys, monkeypatch, error):
    def exhausted(*_):
        raise error()

    monkeypatch.setattr(loop, "run_rl", exhausted)
    check_refusal(capsys, command(tmp_path, SCRATCH), 1, "out of memory: ", "Lower sampler.slots")


def test_the_value_of_an_unknown_key_is_not_shown(tmp_path, capsys):
    command(tmp_path, "reward.api_key=hunter2", text="model: {token: hunter2}")
    assert "hunter2" not in capsys.readouterr().err


def test_without_a_defect_the_same_command_trains(tmp_path, model):
    with pytest.raises(Trained):
        command(tmp_path, SCRATCH)
    with pytest.raises(Trained):
        command(tmp_path, f"model.path={model}", "run.name=again")


def test_a_refused_run_leaves_nothing_in_the_way_of_the_next(tmp_path, capsys):
    assert command(tmp_path, SCRATCH, "sampler.kv_memory_mib=0.0001") == 2
    with pytest.raises(Trained):
        command(tmp_path, SCRATCH)


# ---- the model's directory


def edited(**changes):
    def edit(folder):
        file = folder / "config.json"
        config = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not KeyError}))

    return edit


def tensors(change):
    def edit(folder):
        weights = dict(load_file(folder / WEIGHTS))
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return edit


def header(change):
    def edit(folder):
        raw = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        described = json.loads(raw[8 : 8 + length])
        change(described)
        text = json.dumps(described).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return edit


def offsets(begin, end):
    return header(lambda d: d["model.norm.weight"].update(data_offsets=[begin, end]))


def index(weight_map):
    def edit(folder):
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return edit


def only_a_pickle(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def cut(folder):
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(3000)


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def piped(name):
    def edit(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return edit


NORM = "model.norm.weight"


def only_an_index(folder):
    index({NORM: "gone.safetensors"})(folder)
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (tensors(lambda w: w.pop(NORM)), "1 tensors missing (model.norm.weight [16])"),
        (tensors(lambda w: w.update(x=np.zeros(2))), "not part of this model (x)"),
        (tensors(lambda w: w.update({NORM: np.zeros(8)})), "is [8], not [16]"),
        (tensors(lambda w: w.update({NORM: np.zeros(16, np.int8)})), "quantised"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no model.safetensors found"),
        (only_a_pickle, "pytorch_model.bin may be a pickle"),
        (cut, "not a complete safetensors file"),
        (tensors(lambda w: w.update({NORM: np.full(16, np.nan)})), "contains NaN"),
        (written(WEIGHTS, b""), "ends within its header"),
        (written(WEIGHTS, b"\xff" * 100), "ends within its header"),
        (written(WEIGHTS, struct.pack("<Q", 2) + b"{}"), "tensors missing"),
        (written(WEIGHTS, struct.pack("<Q", 9) + b"[" * 9), "its header is not JSON"),
        (offsets(-64, 0), "no valid shape and data_offsets"),
        (offsets(0, 2**62), "does not fit its"),
        (offsets(0, 64), "overlaps"),
        (piped(WEIGHTS), "not found, or not a file"),
        (index({NORM: "../other.safetensors"}), "names the file '../other.safetensors'"),
        (index({NORM: "/etc/passwd"}), "names the file '/etc/passwd'"),
        (index({NORM: 5}), "names the file '5'"),
        (index([1]), "has no weight_map"),
        (only_an_index, "gone.safetensors: not found, or not a file"),
        (edited(vocab_size=KeyError), "model.embed_tokens.weight is [24, 16], not ["),
        (edited(hidden_size="16"), 'hidden_size = "16" must be a whole number'),
        (edited(num_hidden_layers=10**12), "num_hidden_layers = 1000000000000 must be"),
        (edited(num_hidden_layers=2), "must be a list of 2 of full_attention"),
        (edited(num_hidden_layers=2, layer_types=KeyError), "tensors missing"),
        (edited(num_attention_heads=0), "num_attention_heads = 0 must be"),
        (edited(num_key_value_heads=3), "must be a multiple of num_key_value_heads (3)"),
        (edited(model_type="mamba"), 'model_type "mamba" is not supported'),
        (edited(model_type=["qwen3"]), "is not supported"),
        (edited(rms_norm_eps=float("nan")), "rms_norm_eps = NaN must be"),
        (edited(rope_parameters=5), "rope_parameters must be a JSON object"),
        (edited(rope_parameters={"rope_type": "llama3"}), "factor is missing"),
        (edited(eos_token_id="</s>"), 'eos_token_id = "</s>" must be'),
        (written("config.json", b"{"), "is not JSON"),
        (written("config.json", b"[" * 100_000), "is not JSON"),
        (written("config.json", b"\xff\xfe"), "is not JSON"),
        (written("config.json", b"[]"), "must contain a JSON object"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: not found"),
    ],
)
def test_a_models_directory_with_a_defect_is_refused(tmp_path, capsys, model, edit, message):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    edit(folder)
    code = command(tmp_path, f"model.path={folder}", f"data.tokenizer={model}")
    check_refusal(capsys, code, 1, "CheckpointError: ", message)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl_coefficient=0.1", "reference.path={}"],
        ["teacher={{source: path, path: {}}}"],
        ["run.job=preference", "preference.reference={}"],
    ],
)
def test_frozen_weights_are_looked_at_before_the_warm_start(tmp_path, capsys, model, overrides):
    folder = tmp_path / "frozen"
    shutil.copytree(model, folder)
    tensors(lambda w: w.pop(NORM))(folder)
    code = command(tmp_path, f"model.path={model}", *(o.format(folder) for o in overrides))
    check_refusal(capsys, code, 1, "CheckpointError: ", "1 tensors missing")


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["model.path={}", "warm_start.steps=0"], "sampler.max_length (64)"),
        (["model.path={}", "sampler.max_length=32", "trainer.row_length=64"],
         "trainer.row_length (64)"),
        (["algorithm.kl_coefficient=0.1", "reference.path={}"], "sampler.max_length (64)"),
        (["run.job=sft", "warm_start.steps=0", "model.path={}"], "sampler.max_length (64)"),
    ],
)  # fmt: skip
def test_longer_sequences_than_a_model_was_made_for_are_refused(
    tmp_path, capsys, model, overrides, setting
):
    folder = tmp_path / "short"
    shutil.copytree(model, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 63}))
    overrides = [f"model.path={model}", *(o.format(folder) for o in overrides)]
    message = f"{setting} is more than the max_position_embeddings (63) of "
    check_refusal(capsys, command(tmp_path, *overrides), 2, "config error: ", message, str(folder))


# ---- the tokenizer


def cut_to_two_tokens(folder):
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["vocab"] = {"<unk>": 3, "1": 400}
    file.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json here"),
        (written("tokenizer.json", b"{"), "not a tokenizer"),
        (written("tokenizer.json", b"\xff"), "not a tokenizer"),
        (written("tokenizer_config.json", b"{"), "cannot be loaded"),
        (written("chat_template.jinja", b"{% if %}"), "chat template fails"),
        (written("chat_template.jinja", b"{{ raise_exception('no') }}"), "chat template fails"),
        (written("generation_config.json", b'{"eos_token_id": 99}'), "token 99 is not one"),
        (cut_to_two_tokens, "Set data.tokenizer to the tokenizer of that model"),
    ],
)
def test_a_tokenizer_that_does_not_work_or_fit_is_refused(tmp_path, capsys, model, edit, message):
    folder = tmp_path / "tokenizer"
    shutil.copytree(model, folder)
    edit(folder)
    code = command(tmp_path, f"model.path={model}", f"data.tokenizer={folder}")
    check_refusal(capsys, code, 1, "DataError: ", message)


# ---- data

GOOD = {"question": "1+2=", "answer": "3"}


@pytest.mark.parametrize("job", ["rl", "sft", "preference"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n \r\n\n", "the file is empty"),
        (b"\xff\xff\x00" * 9, "line 1: not UTF-8"),
        ("{}".encode("utf-16"), "it is UTF-16. Write it as UTF-8"),
        (b"[" * 50_000 + b"\n", "line 1: not a JSON object"),
        (b'{"text": "a"}\n', "line 1: a field is missing or is not text"),
        (b'{"question": ["1"], "answer": null, "prompt": {}}\n', "line 1: a field is missing"),
        (b" " * (2**26 + 1), "line 1: a line of more than 64 MiB"),
        (
            json.dumps(dict.fromkeys(("question", "prompt", "chosen", "rejected"), "1+2=" * 99)
                       | {"answer": "3"}).encode(),
            "line 1: the prompt is too long: 396 tokens, but ",
        ),
    ],
)  # fmt: skip
def test_records_that_cannot_be_used_are_refused_with_their_line(
    tmp_path, capsys, model, content, message, job
):
    file = tmp_path / "d.jsonl"
    file.write_bytes(content)
    data = f"data={{addition: null, jsonl: {{path: '{file}'}}}}"
    code = command(tmp_path, f"model.path={model}", data, f"run.job={job}", "warm_start.steps=0")
    check_refusal(capsys, code, 1, "DataError: ", str(file), message)


def test_a_data_file_that_is_none_is_refused(tmp_path, capsys, model):
    os.mkfifo(tmp_path / "pipe")
    no_records = (1, "DataError: ", "Give a file of JSON lines")
    nothing = (2, "config error: data.jsonl.path = ", "there is no such file")
    for path, message in (
        (tmp_path, (1, "DataError: ", "Give the folder of one split")),
        (tmp_path / "pipe", no_records),
        (tmp_path / "none", nothing),
        ("a" * 300, nothing),
    ):
        data = f"data={{addition: null, jsonl: {{path: '{path}'}}}}"
        code = command(tmp_path, f"model.path={model}", data)
        check_refusal(capsys, code, *message)


# ---- rewards


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "there is no file"),
        ("def reward(:", "fails to load: SyntaxError"),
        ("import nothing_of_this_name", "fails to load: ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "fails to load: SystemExit"),
        ("def other(): pass", "has no function reward (it has: other)"),
        ("reward = 5", "has no function reward"),
        ("def reward(prompt): return 1", "cannot be called as reward(prompt, completion, ref"),
        ("async def reward(p, c, r): raise SystemExit", "raised SystemExit"),
        ("def reward(completion, tests): return 1", "asks for 'tests', and no record has"),
        ("def reward(completions): return 1", "must give one result for each"),
        ("def reward(p, c, r): return {'mean': 1}", "reward/mean is another metric"),
        ("def reward(p, c, r): return {'correct': 2}", "from 0 to 1"),
        ("def reward(p, c, r): return {}", "gave {}, which has no part"),
        ("def reward(p, c, r): return 10**400", "gave a reward of 1000"),
        ("def reward(p, c, r): return 'good'", "gave a reward of 'good' (str)"),
        ("def reward(p, c, r): return None", "gave None (does not apply) for an answer"),
        ("def reward(p, c, r): return [1.0]", "gave a reward of [1.0] (list)"),
        ("def reward(p, c, r): return float('nan')", "gave a reward of nan"),
        ("def reward(p, c, r): return {'a': 1, 'b': None}", "gave part 'b' of None"),
        ("def reward(p, c, r): return 1 / 0", "py, line 1, in reward). Correct the function."),
        ("def reward(p, c, r): raise SystemExit", "raised SystemExit"),
        ("import time\ndef reward(p, c, r): time.sleep(99)", "took more than 0.1 s"),
    ],
)
def test_a_reward_function_that_cannot_work_is_refused(tmp_path, capsys, code, message):
    file = tmp_path / "own_reward.py"
    if code is not None:
        file.write_text(code)
    given = [SCRATCH, f"reward.function={file}:reward"]
    given += ["reward.timeout_s=0.1", "faults.backoff_s=0.0"]
    raises = code is not None and ("raise " in code or "1 / 0" in code)
    words = ("config error: reward.function = ", message)
    check_refusal(capsys, command(tmp_path, *given), 2, *words, of_user=raises)


def test_a_part_that_the_reward_has_not_gives_no_signal_and_has_no_weight(tmp_path, capsys):
    given = [SCRATCH, "algorithm.dynamic_sampling=true", "algorithm.signal_part=corect"]
    message = "algorithm.signal_part = 'corect': the reward has no such part (it has: correct)"
    check_refusal(capsys, command(tmp_path, *given), 2, message)
    given = [SCRATCH, "algorithm.advantage={gdpo: {weights: {corect: 1.0}}}"]
    message = "the reward has no part 'corect' (it has: correct, shaping, tokens)"
    check_refusal(capsys, command(tmp_path, *given), 2, message)
    given = [SCRATCH, "algorithm.signal_part=correct"]
    check_refusal(capsys, command(tmp_path, *given), 2, "algorithm.dynamic_sampling=true")


# ---- the run's folder


@pytest.mark.parametrize("way", ["file in the way", "name too long", "no permission"])
def test_a_folder_that_cannot_be_made_is_reported(tmp_path, capsys, way):
    (tmp_path / "file").write_text("x")
    folder = {
        "file in the way": tmp_path / "file",
        "name too long": tmp_path / ("a" * 300),
        "no permission": Path("/proc/nowhere"),
    }[way]
    code = command(tmp_path, SCRATCH, f"run.dir={folder}")
    check_refusal(capsys, code, 1, str(folder), "Check that the path is right")


def test_a_run_whose_folder_leads_elsewhere_is_not_resumed(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "runs" / "run"
    root.mkdir(parents=True)
    (root / "checkpoints").symlink_to(tmp_path / "elsewhere")
    code = command(tmp_path, SCRATCH, "--resume")
    check_refusal(capsys, code, 2, "is a link that leads out of the run's folder")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.loss=ppo_clp", "did you mean 'ppo_clip'"),
        ("algorithm.correction=trunctate", "did you mean 'truncate'"),
        ("algorithm.aggregate={constant: {divisor: -48}}", "divisor"),
        ("reward.function=exat", "did you mean 'exact'"),
        ("algorithm.shaping=[{missing_eoss: {penalty: 0.5}}]", "did you mean 'missing_eos'"),
    ],
)
def test_a_wrong_name_or_argument_is_refused_where_the_configuration_is_only_printed(
    tmp_path, capsys, override, message
):
    code = command(tmp_path, override, "--print-config")
    check_refusal(capsys, code, 2, message)


@pytest.mark.parametrize(
    "override",
    ["reward.function=/there/mine.py:good", "algorithm.shaping=[{/there/mine.py:good: {by: 1}}]"],
)
def test_a_function_of_a_file_that_is_not_here_is_left_to_the_machine_that_trains(
    tmp_path, capsys, override
):
    code = command(tmp_path, override, "--print-config")
    assert code == 0 and "/there/mine.py:good" in capsys.readouterr().out


def test_the_names_in_each_recipe_are_known():
    for name in recipe_names():
        needed = ["data.jsonl.path=records.jsonl"] * (name == "gsm8k")
        config = load(f"recipe:{name}", needed)
        for one in runs_of(config).values() if config.runs else (config,):
            check_names(one)


# ---- samplers in processes of their own


def test_a_run_that_no_one_could_join_is_refused_before_its_warm_start(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("JAXRL_ASYNC_SECRET", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for setting, message in (
            (f"remote.listen=127.0.0.1:{port}", "(Address already in use). Choose another port"),
            (f"remote.data_port={port}", f"remote.data_port={port}: cannot listen"),
            ("remote.listen=0.0.0.0:0", "set the environment variable JAXRL_ASYNC_SECRET"),
            (
                "remote={tls_certificate: none.pem, tls_key: none.pem, tls_authority: none.pem}",
                "remote.tls_certificate",
            ),
        ):
            code = command(
                tmp_path, SCRATCH, "run.name=alone", "mesh.samplers_in=external", setting
            )
            check_refusal(capsys, code, 2, "config error: ", message)
    assert not (tmp_path / "runs").exists()

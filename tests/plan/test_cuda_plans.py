"""Plans for NVIDIA cards: real programs through XLA's own compiler for them, without a card.

The compiler is JAX's CUDA plugin: installed here, or in the folder that JAXRL_CUDA names (`pip
install --target FOLDER`), so that no other test has it beside it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.errors import ConfigError, MissingExtraError
from jaxrl_async.host import version_of
from jaxrl_async.plan import cuda
from jaxrl_async.plan.chips import CARDS, GIB, memory_share, parse_slice
from jaxrl_async.plan.cost import cost_of
from jaxrl_async.plan.hlo import parse
from jaxrl_async.plan.pace import BYTES_SHARE, LAUNCH_S, PRODUCT_SHARE, pace_of
from jaxrl_async.plan.timing import CARD_HOP_S, collective_s

ROOT = Path(__file__).parent.parent.parent
BESIDE = os.environ.get("JAXRL_CUDA", "")
plugin = pytest.mark.skipif(
    not BESIDE and not version_of("jax-cuda13-plugin"),
    reason="JAX's CUDA plugin is not installed: pip install '.[plan-cuda]', or set JAXRL_CUDA",
)
SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture(autouse=True)
def no_share(monkeypatch):
    for name in SHARES:
        monkeypatch.delenv(name, raising=False)


def plan(folder: Path, config: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(config)
    where = ["--json", str(folder / "plan.json"), "--cache", str(folder / "cache")]
    path = os.pathsep.join(filter(None, (str(ROOT), BESIDE)))
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_async.plan", str(folder / "config.yaml"), *where, *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, **env},
    )


def read(folder: Path) -> tuple[dict, dict]:
    """The plan of a folder, and its programs by name."""
    found = json.loads((folder / "plan.json").read_text())
    return found, {p["name"]: p for s in ("trainer", "sampler") for p in found[s]["programs"]}


# ---- cards, in numbers


@pytest.mark.parametrize(
    ("name", "topology", "cards"),
    [
        ("h100-1", "h100:1x1", 1),
        ("h100-8", "h100:1x8", 8),
        ("b200-32", "b200:4x8", 32),
        ("l4:2x4", "l4:2x4", 8),
        ("a100-6", "a100:1x6", 6),
    ],
)
def test_a_name_is_hosts_of_cards(name, topology, cards):
    where = parse_slice(name)
    assert (where.topology, where.num_devices) == (topology, cards) and where.chip.is_card


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100-12", "a host has at most 8 cards.* h100-1 to h100-8, or h100-16"),
        ("h100:1x16", "a host has at most 8 cards"),
        ("h100:2x2x2", "has 3 sides, and h100 slices have 2: give h100-8"),
        ("h100-many", "neither a number of cards nor a shape such as 2x8"),
        ("h300-8", "generations are v4, .*, h100, h200, a100, b200, l4"),
    ],
)
def test_what_no_hosts_have_is_refused_with_a_way_out(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_slice(name)


def test_programs_have_the_share_of_a_card_that_jax_would_take(monkeypatch):
    whole = CARDS["h100"].memory_bytes
    assert 79 < whole / GIB < 80
    assert parse_slice("h100-8").chip.usable_bytes == pytest.approx(0.95 * whole)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    assert parse_slice("h100-8").chip.usable_bytes == pytest.approx(0.75 * whole)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.97")
    with pytest.raises(ConfigError, match="are both set"):
        memory_share()
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert memory_share() == 0.97


@pytest.mark.parametrize("text", ["all", "0", "1.5", "-1", "nan"])
def test_a_share_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
    with pytest.raises(ConfigError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION={text} is not a share"):
        parse_slice("l4-1")


def test_cards_of_a_host_talk_by_nvlink_and_hosts_by_the_network():
    where = parse_slice("h100-16")
    assert where.sent_bytes_per_s(8, 8) == pytest.approx(450e9)
    assert where.sent_bytes_per_s(16, 8) == pytest.approx(400e9), "by eight network cards"
    assert where.sent_bytes_per_s(2, 1) == pytest.approx(50e9), "by its own"
    assert where.sent_bytes_per_s(16, 8, in_a_ring=False) == pytest.approx(50e9)
    assert parse_slice("l4-8").sent_bytes_per_s(8, 8) == pytest.approx(32e9), "PCIe"


ROW = "f32[1000000]{0}"
HOSTS = "{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"


@pytest.mark.parametrize(
    ("line", "near", "sent", "rate"),
    [
        ("all-reduce(%a), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", 8, 7e6, 450),
        ("all-reduce(%a), replica_groups=[2,8]<=[16]", 8, 7e6, 450),
        (f"all-reduce(%a), replica_groups={HOSTS}", 1, 4e6, 50),
        ("all-reduce(%a), replica_groups=[8,2]<=[2,8]T(1,0)", 1, 4e6, 50),
        ("all-reduce(%a), replica_groups=[4,4]<=[2,4,2]T(1,0,2)", 2, 6e6, 100),
        ("all-reduce(%a), replica_groups=mesh['data'=2,'fsdp'=8] {'data'}", 1, 4e6, 50),
        ("all-reduce(%a), replica_groups={}", 8, 7.5e6, 400),
        ("all-to-all(%a), replica_groups=[1,16]<=[16]", 8, 3.75e6, 50),
        ("collective-permute(%a), source_target_pairs={{0,1},{1,0}}", 2, 4e6, 450),
        ("collective-permute(%a), source_target_pairs={{7,8},{8,7}}", 1, 4e6, 50),
    ],
)
def test_what_spans_hosts_goes_by_the_network(line, near, sent, rate):
    """Sixteen cards of two hosts, which NVLink joins by eight; 4 MB."""
    where = parse_slice("h100:2x8")
    text = f"ENTRY %main (a: {ROW}) -> {ROW} {{\n  %a = {ROW} parameter(0)\n"
    text += f"  ROOT %x = {ROW} {line}, channel_id=1\n}}\n"
    mesh = {"data": 2, "fsdp": 8}
    cost = cost_of(parse(text), mesh, pace_of(where.chip), host=where.shape[-1])
    (talk,) = cost.collectives
    assert talk.near == near and talk.num_bytes == pytest.approx(sent)
    hops_s = CARD_HOP_S * talk.group / 2
    assert collective_s(talk, where) == pytest.approx(sent / (rate * 1e9) + hops_s)


# ---- a compiled program's text, as XLA:GPU writes it

Q, K = "bf16[2,4096,16,128]{3,2,1,0}", "bf16[2,4096,8,128]{3,2,1,0}"
ROWS, EXPERTS = "bf16[512,2048]{1,0}", "bf16[128,2048,768]{2,1,0}"


def call(name: str, result: str, target: str, arguments: list[str], op: str) -> str:
    """A line of a custom call; the arguments are named by their shapes."""
    shapes = ", ".join(arguments)
    return (
        f'  %{name} = {result} custom-call(%a, %b), custom_call_target="{target}", '
        f'operand_layout_constraints={{{shapes}}}, metadata={{op_name="jit(f)/{op}"}}, '
        'backend_config={ir = "f32[9]{0}}", mask_type = "CAUSAL"}'
    )


TEXT = f"""
%gemm_computation (p0: bf16[4096,1024], p1: bf16[1024,3072]) -> bf16[4096,3072] {{
  %p0 = bf16[4096,1024]{{1,0}} parameter(0)
  %p1 = bf16[1024,3072]{{1,0}} parameter(1)
  ROOT %dot = bf16[4096,3072]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{1}}
}}

ENTRY %main (a: bf16[4096,1024], b: bf16[1024,3072]) -> bf16[4096,3072] {{
  %a = bf16[4096,1024]{{1,0}} parameter(0)
  %b = bf16[1024,3072]{{1,0}} parameter(1)
{call("fwd", f"({Q}, u8[0])", "__cudnn$fmhaSoftmax", [Q, K, K], "x")}
{call("bwd", f"({Q}, u8[0])", "__cudnn$fmhaScaleBiasSoftmaxBackward", [Q, K, K], "x")}
{call("own.7", Q, "__gpu$xla.gpu.triton", [Q, K, K], "vmap(flash_forward)/pallas_call")}
{call("p.3", Q, "__gpu$xla.gpu.triton", [Q, K], "attend_pages/pallas_call")}
{call("g", "bf16[512,768]", "mosaic_gpu_v2", ["s32[128]{0}", ROWS, EXPERTS], "body/mpmd_map")}
  ROOT %product = bf16[4096,3072]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm_computation
}}
"""


def test_products_and_kernels_of_cards_are_counted():
    cost = cost_of(parse(TEXT), {"fsdp": 1}, pace_of(CARDS["h100"]))
    product = 2 * 4096 * 1024 * 3072
    assert cost.flops == product
    assert cost.compute_s == pytest.approx(product / (989.4e12 * PRODUCT_SHARE) + LAUNCH_S)
    kernels = {k.name: k for k in cost.kernels}
    half_square = 2 * 16 * 4096 * 4096 * 128  # of one product: 2 FLOPs, half of them seen
    assert kernels["cudnn_attention"].flops == 2 * half_square
    assert kernels["cudnn_attention_backward"].flops == 5 * half_square
    assert kernels["flash_forward"].flops == 2 * half_square
    assert (kernels["flash_forward"].length, kernels["flash_forward"].width) == (4096, 128)
    assert kernels["attend_pages"].flops == 0, "it depends on the lengths at run time"
    grouped = next(k for k in cost.kernels if k.num_bytes)
    assert grouped.flops == 2 * 512 * 2048 * 768, "no expert multiplies rows of another"


def test_of_cudnn_and_what_stands_in_for_it_cudnn_counts():
    """A branch each (model/gpu_packed.py): 5 products going backward, and not the 7 of flash."""
    text = f"""
%ours (a: {Q}) -> {Q} {{
  %a = {Q} parameter(0)
{call("bwd", f"({Q}, u8[0])", "__cudnn$fmhaScaleBiasSoftmaxBackward", [Q, K, K], "x")}
}}

%others (b: {Q}) -> {Q} {{
  %b = {Q} parameter(0)
{call("own.7", Q, "__gpu$xla.gpu.triton", [Q, K, K], "flash_keys/pallas_call")}
{call("own.8", Q, "__gpu$xla.gpu.triton", [Q, K, K], "flash_queries/pallas_call")}
}}

ENTRY %main (n: s32[], a: {Q}) -> {Q} {{
  %n = s32[] parameter(0)
  %a = {Q} parameter(1)
  ROOT %c = {Q} conditional(%n, %a, %a), branch_computations={{%others, %ours}}
}}
"""
    (kernel,) = cost_of(parse(text), {"fsdp": 1}, pace_of(CARDS["h100"])).kernels
    half_square = 2 * 16 * 4096 * 4096 * 128  # of one product: 2 FLOPs, half of them seen
    assert (kernel.name, kernel.times) == ("cudnn_attention_backward", 1)
    assert kernel.flops == 5 * half_square


def test_what_moves_memory_takes_its_bytes_at_the_cards_bandwidth():
    text = """
ENTRY %main (a: f32[1000000]) -> f32[1000000] {
  %a = f32[1000000]{0} parameter(0)
  %g = (f32[1000000]{0}, f32[8000000]{0}) all-gather-start(%a), replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %copy = f32[1000000]{0} copy(%a)
}
"""
    cost = cost_of(parse(text), {"fsdp": 8}, pace_of(CARDS["a100"]))
    assert cost.compute_s == pytest.approx(8e6 / (2039e9 * BYTES_SHARE) + LAUNCH_S)
    assert cost.collectives[0].num_bytes == 32e6 * 7 / 8


# ---- the compiler's absence


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda, "version_of", lambda name: "0.10.2" if name == "jax" else "")
    with pytest.raises(MissingExtraError, match=r"pip install 'jaxrl_async\[plan-cuda\]'"):
        cuda.check_compiler()


def test_a_plugin_of_another_version_is_refused(monkeypatch):
    installed = {"jax": "0.10.2", "jax-cuda13-plugin": "0.9.1"}
    monkeypatch.setattr(cuda, "version_of", lambda name: installed.get(name, ""))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(MissingExtraError, match=r"is 0\.9\.1 and jax is 0\.10\.2.* same version"):
        cuda.check_compiler()


@pytest.mark.full
def test_tpus_and_cards_are_not_planned_together(tmp_path):
    done = plan(tmp_path, TINY, "--topology", "v5e-4", "--sampler-topology", "h100-4")
    assert done.returncode == 2
    assert "a plan is for TPUs or for NVIDIA cards" in done.stderr, done.stderr


# ---- the compiler

TINY = """
run: {name: tiny, steps: 10}
model:
  architecture: {layers: 2, width: 128, heads: 2, kv_heads: 2, head_dim: 128, mlp: 256, vocab: 1024}
  dtype: bfloat16
  remat: layer
mesh: {colocated: true}
data: {max_prompt_tokens: 64}
sampler: {slots: 8, max_length: 256, max_new_tokens: 192, block: 4, prefill_chunk: 128}
algorithm: {groups_per_step: 4, group_size: 2}
trainer: {micro_batch_tokens: 1024}
"""
PROGRAMS = {"gradient", "update", "cast", "prepare", "prefill", "decode"}


@plugin
@pytest.mark.full
@pytest.mark.exhaustive
def test_all_programs_of_a_run_on_one_card_are_compiled_and_kept(tmp_path):
    done = plan(tmp_path, TINY, "--topology", "h100-1")
    assert done.returncode == 0, done.stderr
    found, programs = read(tmp_path)
    assert set(programs) == PROGRAMS and found["fits"]
    assert not any(p["cached"] for p in programs.values())
    gradient, decode = programs["gradient"], programs["decode"]
    attention = {k["name"]: k["flops"] for k in gradient["cost"]["kernels"]}
    assert any(re.match("cudnn|flash", n) and flops for n, flops in attention.items()), attention
    layers, head = 2 * (4 * 128 * 256 + 3 * 128 * 256), 128 * 1024
    # Forward, backward twice, and the head again; layers again unless XLA sees that it need not
    least, most = (2 * 1024 * (times * layers + 4 * head) for times in (3, 4))
    assert least * 0.99 < gradient["cost"]["flops"] < most * 1.01
    assert decode["temp_bytes"] < 2**25 and gradient["temp_bytes"] < 2**28
    assert "memory of a card, GiB" in done.stdout and "of 75.15" in done.stdout
    assert "JAX takes 0.75 of a card, which is enough here" in done.stdout
    assert "times: computed from" in done.stdout and "XLA_PYTHON" not in done.stderr

    full = plan(tmp_path, TINY, "--topology", "h100-1", XLA_PYTHON_CLIENT_MEM_FRACTION="0.0005")
    assert full.returncode == 1 and "DOES NOT FIT" in full.stdout, full.stderr
    assert "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.0005" in full.stdout or "enough" in full.stdout
    assert all(p["cached"] for p in read(tmp_path)[1].values()), "the same programs"


@plugin
@pytest.mark.full
@pytest.mark.exhaustive
def test_a_host_of_cards_is_divided_and_each_side_compiled_for_its_own(tmp_path):
    split = TINY.replace(
        "mesh: {colocated: true}",
        "mesh: {trainer: {fsdp: 4}, sampler: {tensor: 2}, samplers: 2}",
    )
    words = ("--topology", "h100-8", "model.lora.rank=4", "model.lora.base=nf4")
    done = plan(tmp_path, split, *words)
    assert done.returncode == 0, done.stderr
    found, programs = read(tmp_path)
    assert found["trainer"]["topology"] == "h100:1x8[0,1,2,3]"
    assert found["sampler"]["topology"] == "h100:1x8[4,5]" and found["sampler"]["count"] == 2
    assert {c["axes"] for c in programs["gradient"]["cost"]["collectives"]} == {"fsdp"}
    assert {c["axes"] for c in programs["decode"]["cost"]["collectives"]} == {"tensor"}
    assert found["simulated"]["trained_tokens_per_s"] > 0


@plugin
@pytest.mark.full
@pytest.mark.exhaustive
def test_two_hosts_of_cards_sum_gradients_over_the_network(tmp_path):
    mesh = "mesh: {trainer: {data: 2, fsdp: 4}, samplers_in: external}"
    hosts = TINY.replace("mesh: {colocated: true}", mesh)
    done = plan(tmp_path, hosts, "--topology", "h100:2x4", "--sampler-topology", "h100-1")
    assert done.returncode == 0, done.stderr
    _, programs = read(tmp_path)
    near = {}
    for name in ("gradient", "update"):
        for talk in programs[name]["cost"]["collectives"]:
            near.setdefault(talk["axes"], set()).add((talk["group"], talk["near"]))
    assert near["fsdp"] == {(4, 4)}, "within a host"
    assert near["data"] == {(2, 1)} and near.get("data+fsdp", {(8, 4)}) == {(8, 4)}
    assert "of several hosts" in done.stdout


@plugin
@pytest.mark.full
@pytest.mark.exhaustive
def test_every_card_can_be_described_and_compiled_for():
    """In the compiler's environment, as a program of its own; its output is captured."""
    lines = [
        "import os",
        "from jaxrl_async.plan import cuda",
        "cuda.check_compiler()",
        "os.environ |= cuda.environment()",
        "import jax, numpy",
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec",
        "from jaxrl_async.plan.chips import CARDS, parse_slice",
        "from jaxrl_async.plan.chip_placement import devices_of",
        "for name in CARDS:",
        "    devices = devices_of(parse_slice(f'{name}-16'))",
        "    assert len({d.process_index for d in devices}) == 2",
        "    here = NamedSharding(Mesh(numpy.array(devices), ('fsdp',)), PartitionSpec('fsdp'))",
        "    x = jax.ShapeDtypeStruct((1024, 1024), jax.numpy.bfloat16, sharding=here)",
        "    done = jax.jit(lambda x: jax.numpy.tanh(x @ x)).lower(x).compile()",
        "    print(name, devices[0].device_kind, done.memory_analysis().argument_size_in_bytes)",
        "assert jax.default_backend() == 'cpu'",
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), BESIDE)))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [line.split()[0] for line in printed] == list(CARDS)
    assert all(line.endswith(str(1024 * 1024 * 2 // 16)) for line in printed)


@plugin
@pytest.mark.full
@pytest.mark.exhaustive
def test_attention_on_the_pages_fits_the_shared_memory_of_the_smallest_card():
    """An L4's, of 99 KiB a program: the widest heads of a model, in float32, as keys that are
    values (576: DeepSeek's latents) and beside values (256: Gemma's). The compiler says how much a
    kernel needs where that is too much, so it is asked for a card of 64 KiB, too."""
    lines = [
        "import os, sys",
        "from jaxrl_async.plan import cuda",
        "os.environ |= cuda.environment()",
        "import jax, numpy, jax.numpy as jnp",
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec",
        "from jaxrl_async.model.gpu_pages import attend_pages",
        "from jaxrl_async.plan.chips import parse_slice",
        "from jaxrl_async.plan.chip_placement import devices_of",
        "cuda.DEVICES['l4'][2]['shared_memory_per_block_optin'] = int(sys.argv[1]) * 1024",
        "mesh = Mesh(numpy.array(devices_of(parse_slice('l4-1'))), ('x',))",
        "here = NamedSharding(mesh, PartitionSpec())",
        "def given(shape, dtype):",
        "    return jax.ShapeDtypeStruct(shape, dtype, sharding=here)",
        "tables = [given(s, jnp.int32) for s in ((8,), (8, 8), (9,), (1,))]",
        "for width, sides in ((576, 1), (256, 4)):",
        "    for dtype in (jnp.float32, jnp.bfloat16):",
        "        for tokens in (8, 64):",
        "            q = given((tokens, 16, width), dtype)",
        "            pages = given((64, 16, sides, width), dtype)",
        "            jax.jit(attend_pages).lower(q, pages, *tables).compile()",
        "print('compiled')",
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), BESIDE)))
    real, small = (
        subprocess.run(
            [sys.executable, "-c", "\n".join(lines), kib],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": path},
        )
        for kib in ("99", "64")
    )
    assert real.stdout == "compiled\n", real.stderr
    assert "Shared memory size limit exceeded: requested 69632" in small.stderr


@plugin
def test_a_run_on_a_cpu_hears_one_line_of_a_plugin_that_finds_no_driver(tmp_path):
    """JAX would print how it failed."""
    code = """
import jaxrl_async as jr
try:
    jr.Policy.from_pretrained("nowhere")
except jr.JaxrlError:
    import jax
    print(jax.default_backend())
"""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    path = os.pathsep.join(filter(None, (str(ROOT), BESIDE)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**env, "PYTHONPATH": path},
        cwd=tmp_path,
    )
    assert done.stdout == "cpu\n", done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("jax-cuda13-plugin is installed, and NVIDIA's driver is not here")


# ---- the plans that ship

FITS = {
    "qwen3_0_6b_h100_1": {"decode": 1, "gradient": 4},
}
"""Plans that are compiled whole here, and the most GiB of temporaries of two of their programs."""


@plugin
@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FITS)
def test_a_plan_that_ships_fits_by_the_compiler(tmp_path, name):
    config = (ROOT / f"configs/plans/{name}.yaml").read_text()
    topology = re.search(r"--topology (\S+)", config)[1]
    done = plan(tmp_path, config, "--topology", topology)
    assert done.returncode == 0, done.stdout + done.stderr
    found, programs = read(tmp_path)
    assert found["fits"] and set(programs) == PROGRAMS
    for program, most in FITS[name].items():
        assert programs[program]["temp_bytes"] < most * GIB, program

"""The TPU kernels and the training loss around them compile for a TPU; nothing here runs on one.

libtpu holds the real compiler and needs no TPU for that (its numbers are checked in
test_attention.py, by interpreting the kernels on the CPU).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl_async.plan.__main__ import COMPILER_ENV

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.timeout(1500),  # the first test waits for the compiler
    pytest.mark.full,
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, which holds the TPU compiler, is not installed: pip install 'jax[tpu]'",
    ),
]


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    """What came out of the compiler for each program of tpu_programs.py."""
    env = {**os.environ, **COMPILER_ENV, "PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(HERE / "tpu_programs.py")],
        capture_output=True,
        text=True,
        timeout=1500,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_auto_takes_splash_for_tpu_devices(programs):
    assert programs["chosen"]["is_splash"]


@pytest.mark.parametrize(
    "kind",
    [
        *("", " float32", " narrow heads", " wide heads", " odd length"),
        *(" long blocks", " long blocks of wide heads"),
    ],
)
def test_splash_and_its_gradient_compile(programs, kind):
    assert programs[f"splash{kind}"]["kernels"] == 3  # forward, dq, dkv


@pytest.mark.parametrize("kind", ["", " float32", " odd length"])
def test_splash_of_contexts_that_share_prefixes_compiles(programs, kind):
    assert programs[f"trees{kind}"]["kernels"] == 3


def test_contexts_that_share_prefixes_hold_a_mask_for_each_row_and_no_scores(programs):
    """15 bytes for each query and key of one row, however many rows and heads there are."""
    assert programs["trees long"]["temp_bytes"] < 16 * 4096**2
    assert programs["trees long"]["temp_bytes"] < programs["reference long"]["temp_bytes"] / 6


def test_splash_is_what_compiles_where_prefixes_are_shared(programs):
    assert programs["step that shares prefixes"]["kernels"] == 3, "its results are kept"
    assert programs["step that shares prefixes on context"]["kernels"] == 4


def test_splash_holds_no_square_of_the_length(programs):
    """The reference holds [2, 8, 4096, 4096] float32 scores, 1 GiB, and more."""
    assert programs["splash long"]["temp_bytes"] < programs["reference long"]["temp_bytes"] / 50


def test_the_training_loss_with_splash_compiles_for_a_mesh(programs):
    """A turn of the loop has a layer: it runs forward, again for the backward pass, dq and dkv."""
    assert programs["step on fsdp x tensor"]["kernels"] == 4


@pytest.mark.parametrize("kind", ["keeps attention", "keeps attention on context"])
def test_splash_does_not_run_again_where_its_results_are_kept(programs, kind):
    assert programs[f"step that {kind}"]["kernels"] == 3
    assert programs["step with more tensor than kv heads"]["kernels"] == 3, "remat=dots"


def test_splash_is_what_compiles_where_context_divides_the_rows(programs):
    assert programs["step on context"]["kernels"] == 4


@pytest.mark.parametrize("kind", [" on context", " that shares prefixes"])
def test_windows_and_caps_are_splash_too(programs, kind):
    """A turn of the loop has a period of layers: six of Gemma 3, two of Gemma 2."""
    assert programs[f"step of gemma3{kind}"]["kernels"] == 6 * 4
    assert programs["step of gemma2"]["kernels"] == 2 * 4


def test_windows_and_caps_are_ragged_too(programs):
    for family, layers in (("gemma2", 4), ("gemma3", 12)):
        block = programs[f"sampler block of {family}"]
        assert block["kernels"] == layers
        assert block["temp_bytes"] < block["pages_bytes"] / 2
    assert programs["sampler prefill of gemma3"]["temp_bytes"] < block["pages_bytes"]


def test_experts_over_an_axis_compile_to_kernels_of_their_own(programs):
    """Beside attention's 4, the grouped products of the experts, forward and backward."""
    assert programs["step on expert"]["kernels"] > 4


@pytest.mark.parametrize("kind", ["", " that shares prefixes"])
def test_sinks_are_splash_too(programs, kind):
    """A turn of the loop has two layers: their attention, and the products of their experts."""
    assert programs[f"step of gpt_oss{kind}"]["kernels"] > 2 * 4


def test_a_sampler_with_sinks_reads_its_pages_in_the_kernel(programs):
    """Attention in four layers, two of them with windows, and the experts' three products."""
    assert programs["sampler block of gpt_oss"]["kernels"] >= 4 + 4 * 3


@pytest.mark.parametrize("kind", ["", " on context"])
def test_latent_attention_is_splash_in_the_trainer(programs, kind):
    """Two runs of layers, of which a turn has one each, and the products of the experts."""
    assert programs[f"step of deepseek_v3{kind}"]["kernels"] > 2 * 4


LATENT_DECODE = ("", " on v6e", " on tensor", " in float32", " of small heads", " of small pages")


@pytest.mark.parametrize("kind", LATENT_DECODE)
def test_latent_attention_decodes_on_its_pages_and_copies_none(programs, kind):
    """Beside the pages, as large on the chip as their numbers, there are 9 MiB of queries."""
    found = programs[f"latent decode{kind}"]
    assert found["kernels"] == 1
    assert found["temp_bytes"] < 2**21
    assert 0 <= found["argument_bytes"] - found["pages_bytes"] < 10 * 2**20


@pytest.mark.parametrize(
    "kind", ["", " on v6e", " in float32", " of small heads", " of large pages"]
)
def test_prompts_of_latent_attention_are_computed_on_its_pages(programs, kind):
    """What is temporary are queries and results, which are padded: no scores, no pages."""
    found = programs[f"latent chunks{kind}"]
    queries = found["argument_bytes"] - found["pages_bytes"]
    assert found["kernels"] == 1
    assert found["temp_bytes"] < 2.5 * queries


def test_a_sampler_with_latent_attention_reads_its_pages_in_place(programs):
    """They hold 384 + 96 numbers a token, padded to 512, in each of 3 layers; two layers have
    experts, of three products each."""
    block, prefill = (programs[f"sampler {n} of deepseek_v3"] for n in ("block", "prefill"))
    assert block["pages_bytes"] == 256 * 32 * 3 * 512 * 2
    assert block["kernels"] == prefill["kernels"] >= 3 + 2 * 3
    assert block["temp_bytes"] < block["pages_bytes"] / 2
    assert prefill["alias_bytes"] >= prefill["pages_bytes"]


def test_gated_delta_nets_compile_for_both_sides(programs):
    """Beside attention in one of four layers, whose kernels are as ever, and the experts' products;
    heads of 256 are too wide for the paged kernel of JAX, and take one of our own."""
    assert programs["step of qwen3_next"]["kernels"] > 4
    assert programs["step of qwen3_5 on context"]["kernels"] == 4
    block = programs["sampler block of qwen3_next"]
    assert block["kernels"] > 1 and block["pages_bytes"] == 256 * 32 * 1 * 2 * 2 * 128 * 2
    assert programs["sampler prefill of qwen3_next"]["kernels"] > 1
    assert programs["sampler block of qwen3_5 in nf4"]["kernels"] == 2


def test_both_sides_of_a_base_in_four_bits_compile(programs):
    """Attention and the experts of the trainer in kernels, the sampler's pages as ever."""
    assert programs["step of nf4"]["kernels"] > 8
    assert programs["sampler block of nf4"]["kernels"] == programs["sampler block"]["kernels"]


def test_offloaded_moments_are_counted_in_the_hosts_memory(programs):
    """Arguments of the optimizer's step, bytes a chip: weights and gradients are as large as the
    moments together."""
    plain, offloaded = programs["optimizer"], programs["optimizer offloaded"]
    assert plain["host_bytes"] == 0
    assert offloaded["host_bytes"] == pytest.approx(plain["moment_bytes"], rel=0.05)
    assert plain["device_bytes"] - offloaded["device_bytes"] == offloaded["host_bytes"]


def test_only_data_crosses_slices(programs):
    slices = programs["slices"]["slices"]
    assert [{s for row in block for a in row for b in a for s in b} for block in slices] == [
        {0}, {0}, {1}, {1}
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["decode", "chunks", "narrow heads", "float32", "on tensor", "small pages", "large pages"],
)
def test_ragged_paged_attention_compiles(programs, kind):
    assert programs[f"ragged {kind}"]["kernels"] == 1


@pytest.mark.parametrize(
    "kind", ["decode", "one head", "on tensor", "float32", "sinks in a window"]
)
def test_our_own_kernel_on_pages_compiles_and_copies_none(programs, kind):
    assert programs[f"wide {kind}"]["kernels"] == 1
    assert programs[f"wide {kind}"]["temp_bytes"] < 2**21


def test_pages_as_wide_as_the_kernel_wants_are_not_copied(programs):
    """128 MiB of pages on the chip: only the narrow ones are written out anew at each call."""
    assert programs["ragged decode"]["temp_bytes"] < 2**20
    assert programs["ragged narrow heads"]["temp_bytes"] > 2**26


@pytest.mark.parametrize("kind", ["", " truncated", " with masks", " odd"])
def test_drawing_a_token_is_one_kernel(programs, kind):
    assert programs[f"draw{kind}"]["kernels"] == 1


def test_the_gradient_to_the_experts_rows_writes_no_matrix_anew(programs):
    assert programs["grouped gradient"]["kernels"] >= 1
    assert programs["grouped gradient"]["temp_bytes"] < 2**24


def test_drawing_a_token_writes_no_logits_anew(programs):
    """74 MiB of logits: XLA's programs lay them out once more, where sorting took 370 MiB."""
    for kind in ("draw", "draw truncated"):
        assert programs[kind]["temp_bytes"] < 2**20
    assert programs["draw by xla"]["temp_bytes"] < 80 * 2**20
    assert programs["draw by xla"]["kernels"] == programs["draw truncated by xla"]["kernels"] == 0


def test_the_samplers_programs_compile_and_decode_in_place(programs):
    block = programs["sampler block"]
    assert block["draws"] == 1
    assert block["kernels"] == 2, "one kernel a layer, on the pages themselves"
    assert block["temp_bytes"] < block["pages_bytes"] / 2, "no copy of the pages"


def test_prompts_are_prefilled_on_the_pages_in_place(programs):
    for kind in ("", " of long contexts", " of very long contexts"):
        prefill = programs[f"sampler prefill{kind}"]
        assert prefill["kernels"] == 2, "one kernel a layer"
        assert prefill["temp_bytes"] < prefill["pages_bytes"] / 8, "no scores"
        assert prefill["alias_bytes"] >= prefill["pages_bytes"], "no copy"
    insert = programs["sampler insert"]
    assert insert["temp_bytes"] < insert["pages_bytes"] / 8
    assert insert["alias_bytes"] >= insert["pages_bytes"]


def test_a_prompt_is_scored_without_its_logits(programs):
    """4,096 tokens of 151,936: logits of all are 2.3 GiB, of as many as are computed together 64
    MiB, and their likeliest tokens are found among copies of them."""
    for kind in ("", " on tensor"):
        score = programs[f"sampler score{kind}"]
        assert score["tokens"] == 4096 and score["kernels"] == 2
        assert score["temp_bytes"] < min(2**28, score["logits_bytes"])
        assert score["alias_bytes"] >= score["pages_bytes"], "no copy"


def test_page_tables_beyond_the_scalar_memory_are_divided_among_calls(programs):
    """256 rows of up to 32,768 tokens, whose page numbers alone take more than 1 MiB."""
    assert programs["sampler block of long contexts"]["kernels"] == 2 * 3, "three calls a layer"


def test_a_sampler_over_the_hosts_of_a_slice_compiles(programs):
    """All sixteen chips of v5e:4x4, four to a host; every host can read what was sampled."""
    block, alone = programs["sampler block over hosts"], programs["sampler block"]
    assert (block["processes"], alone["processes"]) == (4, 1)
    assert (block["kernels"], block["draws"]) == (2, 1) and block["read_whole"]
    assert block["temp_bytes"] < block["pages_bytes"] / 16, "its part of the pages stays in place"
    prefill = programs["sampler prefill over hosts"]
    assert prefill["kernels"] == 2 and prefill["temp_bytes"] < block["pages_bytes"] / 16
    assert prefill["alias_bytes"] == prefill["pages_bytes"] / 16, "its part of the pages"

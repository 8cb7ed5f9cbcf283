"""Write the tables of docs/benchmarks.md from benchmarks/results/*.json.

    python benchmarks/tables.py            # writes the page
    python benchmarks/tables.py --check    # exits with 1 if the page differs

A result is one measurement: its question, command, machine and date, its columns and rows. A cell
is a number, a text, null (not measured) or [median, min, max]. A result without marks on the
page is only in the summary. Numbers keep the digits with which they are written in the file. What a
benchmark writes with --json is a result, too, once it has the keys `question`, `result`, `command`
and `date`; its numbers are shown with four digits. Rows of 135M, the model with a vocabulary of
49,152, come first. Keys that shorten the page, while the file keeps everything:

    page      false: the page leaves out the result
    shown     names of the page's columns
    hidden    {COLUMN: [VALUE, ...]}: the page leaves out rows with these values
    ranges    false: medians without min and max

A placeholder of `result`, the line of the summary, names a cell: `{cell COLUMN|KEY=VALUE}` is
the first row's with that value, `{least ...}` and `{most ...}` are over all of these rows and all
columns whose names begin with COLUMN. `{each KEY: TEXT}` at the end repeats TEXT, with placeholders
without KEY, for each value of that column whose rows have all these cells.
"""

import argparse
import json
import re
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs/benchmarks.md"
SUMMARY = "summary"
FIRST = "135M"
"""The decoder with the vocabulary of a real model."""
MARKS = re.compile(r"<!-- begin: (\w+) -->\n(.*?)<!-- end: \1 -->", re.DOTALL)
PLACEHOLDER = re.compile(r"\{(cell|least|most) ([^|}]+)(?:\|([^=}]+)=([^}]+))?\}")
EACH = re.compile(r"\{each ([^:{}]+): (.+)\}$")

Result = dict[str, Any]


def read(folder: Path = RESULTS) -> dict[str, Result]:
    """Read every result, by the name of its file.

    Raises:
        ValueError: a row has another number of cells than there are columns.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(
            path.read_text(encoding="utf-8"), parse_float=Decimal, parse_int=Decimal
        )
        if isinstance(result["machine"], dict):
            result["machine"] = ", ".join(f"{k} {v}" for k, v in result["machine"].items())
        if isinstance(result["rows"][0], dict):  # as a benchmark's --json writes them
            result["columns"] = list(result["rows"][0])
            result["rows"] = [[_rounded(v) for v in row.values()] for row in result["rows"]]
        for row in result["rows"]:
            if len(row) != len(result["columns"]):
                raise ValueError(
                    f"{path}: the row {row[0]!s} has {len(row)} cells for "
                    f"{len(result['columns'])} columns; write null for what was not measured"
                )
        result["rows"].sort(key=lambda row: FIRST not in row)
        found[path.stem] = result
    return found


def _rounded(cell: Any) -> Any:
    """Round a number with more than four digits, as common.table does."""
    exact = not isinstance(cell, Decimal) or cell == cell.to_integral_value()
    return cell if exact else Decimal(f"{cell:.4g}")


def shown(cell: Any, *, ranges: bool = True) -> str:
    """Format a cell: 16,700 (16,400 to 17,000) for [median, min, max], nothing for null."""
    if isinstance(cell, list):
        median, least, most = map(shown, cell)
        return f"{median} ({least} to {most})" if ranges else median
    if isinstance(cell, Decimal):
        return f"{cell:,}".lower()
    return "" if cell is None else str(cell)


def common_machine(results: dict[str, Result]) -> str:
    """Return the machine of most results."""
    return Counter(str(result["machine"]) for result in results.values()).most_common(1)[0][0]


def table(result: Result, common: str = "") -> str:
    """Return command and date of a result, its machine unless that is the common one, and its
    table, as Markdown.

    Raises:
        ValueError: `shown` or `hidden` names no column.
    """
    names, hidden = result.get("shown") or result["columns"], result.get("hidden", {})
    if odd := ", ".join(name for name in [*names, *hidden] if name not in result["columns"]):
        raise ValueError(f"{odd}: no column of {', '.join(result['columns'])}")
    indices = [result["columns"].index(name) for name in names]
    kept = [
        row
        for row in result["rows"]
        if not any(row[result["columns"].index(name)] in hidden[name] for name in hidden)
    ]
    ranges = result.get("ranges", True)
    rows = [names, *([shown(row[i], ranges=ranges) for i in indices] for row in kept)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(names) + "|")
    machine = [] if result["machine"] == common else [result["machine"]]
    return "\n".join(
        [", ".join([f"`{result['command']}`", result["date"], *machine]) + ":", "", *lines]
    )


def filled(result: Result) -> str:
    """Return the line of the summary with the numbers of the rows.

    Raises:
        ValueError: a placeholder names no cell, or no column.
    """
    if not (each := EACH.search(result["result"])):
        return _with_numbers(result["result"], result["columns"], result["rows"])
    key, text = each.groups()
    if key not in result["columns"]:
        raise ValueError(f"{each[0]} names no column of {', '.join(result['columns'])}")
    index = result["columns"].index(key)
    parts: list[str] = []
    missing = ValueError("no rows")
    for value in dict.fromkeys(shown(row[index]) for row in result["rows"]):
        rows = [row for row in result["rows"] if shown(row[index]) == value]
        try:
            parts.append(f"{value}: {_with_numbers(text, result['columns'], rows)}")
        except ValueError as error:
            missing = error
    if not parts:
        raise missing
    return result["result"][: each.start()] + "; ".join(parts)


def _with_numbers(text: str, columns: list[str], among: list[list[Any]]) -> str:
    def number(match: re.Match[str]) -> str:
        kind, column, key, value = match.groups()
        rows = [r for r in among if not key or shown(r[columns.index(key)]) == value]
        if kind == "cell":
            named = [columns.index(column)] if column in columns else []
        else:
            named = [i for i, name in enumerate(columns) if name.startswith(column)]
        cells = [row[i] for row in rows for i in named if row[i] is not None]
        medians = [cell[0] if isinstance(cell, list) else cell for cell in cells]
        if not medians:
            raise ValueError(f"{match[0]} names no cell of {', '.join(columns)}")
        return shown(
            medians[0] if kind == "cell" else min(medians) if kind == "least" else max(medians)
        )

    return PLACEHOLDER.sub(number, text)


def summary(results: dict[str, Result], with_table: list[str]) -> str:
    """Return the common machine, and one row for each result, those with a table first, in the
    order of the page."""
    rows = [f"| {results[name]['question']} | {filled(results[name])} |" for name in with_table]
    for name in sorted(set(results) - set(with_table)):
        if not results[name].get("page", True):
            continue
        question, measured = results[name]["question"], filled(results[name])
        rows.append(f"| {question} | {measured} (`{name}.json`) |")
    machine = f"Where no other machine is named: {common_machine(results)}."
    return "\n".join([machine, "", "| question | measured |", "|---|---|", *rows])


def page(text: str, results: dict[str, Result]) -> str:
    """Return the page with every table between its marks made again.

    Raises:
        ValueError: marks of a result that does not exist.
    """
    order = [match[1] for match in MARKS.finditer(text) if match[1] != SUMMARY]
    if odd := ", ".join(name for name in order if name not in results):
        raise ValueError(
            f"{PAGE.name}: <!-- begin: {odd} --> names no file of benchmarks/results; known: "
            f"{', '.join(results)}"
        )

    common = common_machine(results)

    def made(match: re.Match[str]) -> str:
        name = match[1]
        inside = summary(results, order) if name == SUMMARY else table(results[name], common)
        return f"<!-- begin: {name} -->\n{inside}\n<!-- end: {name} -->"

    return MARKS.sub(made, text)


def main() -> None:
    """Run the command line."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--check", action="store_true", help="write nothing; 1 if the page differs")
    args = words.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    made = page(text, read())
    if args.check:
        sys.exit(0 if made == text else f"{PAGE} differs: run python benchmarks/tables.py")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Write the tables of docs/benchmarks.md from benchmarks/results/*.json.

    python benchmarks/tables.py            # writes the page
    python benchmarks/tables.py --check    # exits with 1 if the page differs

A result is one measurement: its question, command, machine and date, its columns and rows. A cell
is a number, a text, null (not measured) or [median, min, max]. `shown` names the columns of the
page where the file has more; a result without marks on the page is only in the summary. Numbers
keep the digits with which they are written in the file. What a benchmark writes with --json is a
result, too, once it has the keys `question`, `result`, `command` and `date`; its numbers are shown
with four digits.
A placeholder of `result`, the line of the summary, names a cell: `{cell COLUMN|KEY=VALUE}` is
the first row's with that value, `{least ...}` and `{most ...}` are over all of these rows and all
columns whose names begin with COLUMN.
"""

import argparse
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs/benchmarks.md"
SUMMARY = "summary"
MARKS = re.compile(r"<!-- begin: (\w+) -->\n(.*?)<!-- end: \1 -->", re.DOTALL)
PLACEHOLDER = re.compile(r"\{(cell|least|most) ([^|}]+)(?:\|([^=}]+)=([^}]+))?\}")

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
        found[path.stem] = result
    return found


def _rounded(cell: Any) -> Any:
    """Round a number with more than four digits, as common.table does."""
    exact = not isinstance(cell, Decimal) or cell == cell.to_integral_value()
    return cell if exact else Decimal(f"{cell:.4g}")


def shown(cell: Any) -> str:
    """Format a cell: 16,700 (16,400 to 17,000) for [median, min, max], nothing for null."""
    if isinstance(cell, list):
        median, least, most = map(shown, cell)
        return f"{median} ({least} to {most})"
    if isinstance(cell, Decimal):
        return f"{cell:,}".lower()
    return "" if cell is None else str(cell)


def table(result: Result) -> str:
    """Return machine, date and command of a result, and its table, as Markdown."""
    names = result.get("shown") or result["columns"]
    places = [result["columns"].index(name) for name in names]
    rows = [
        names,
        ["---"] * len(names),
        *([shown(row[i]) for i in places] for row in result["rows"]),
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    where = f"{result['machine']}; {result['date']}; `{result['command']}`:"
    return "\n".join([where[0].upper() + where[1:], "", *lines])


def filled(result: Result) -> str:
    """Return the line of the summary with the numbers of the rows.

    Raises:
        ValueError: a placeholder names no cell.
    """
    columns = result["columns"]

    def number(match: re.Match[str]) -> str:
        kind, column, key, value = match.groups()
        rows = [r for r in result["rows"] if not key or shown(r[columns.index(key)]) == value]
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

    return PLACEHOLDER.sub(number, result["result"])


def summary(results: dict[str, Result], with_table: list[str]) -> str:
    """Return one row for each result, those with a table first, in the order of the page."""
    rows = [f"| {results[name]['question']} | {filled(results[name])} |" for name in with_table]
    for name in sorted(set(results) - set(with_table)):
        asked, measured = results[name]["question"], filled(results[name])
        rows.append(f"| {asked} | {measured} (`{name}.json`) |")
    return "\n".join(["| question | measured |", "| --- | --- |", *rows])


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

    def made(match: re.Match[str]) -> str:
        name = match[1]
        inside = summary(results, order) if name == SUMMARY else table(results[name])
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

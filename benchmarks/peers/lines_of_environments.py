"""Count the lines that a user writes for the same small tool environment in three libraries.

python benchmarks/peers/lines_of_environments.py   # the table of history/first_hour.md

Counted is each line of shop_*.py with code or a docstring on it, but not blank lines, comments,
imports and the file's own docstring. The data is in shop_records.py for all, and each file says
which settings of the trainer name what is in it; that call, or the configuration, is not counted.
"""

import ast
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = {"ours": "shop_ours.py", "TRL": "shop_trl.py", "verifiers": "shop_verifiers.py"}
IMPORTS = (ast.Import, ast.ImportFrom)


def counted_lines(text: str) -> int:
    """Return the number of lines of a file that count."""
    left_out: set[int] = set()
    body = ast.parse(text).body
    docstring = body[:1] if isinstance(body[0], ast.Expr) else []
    for node in [*docstring, *(n for n in body if isinstance(n, IMPORTS))]:
        left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
        if number not in left_out
    )


def markdown() -> str:
    """Return the table."""
    rows = ["| library | lines | file |", "| --- | --- | --- |"]
    for name, file in LIBRARIES.items():
        lines = counted_lines((HERE / file).read_text(encoding="utf-8"))
        rows.append(f"| {name} | {lines} | `{file}` |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")

"""The tables of docs/benchmarks.md are those that benchmarks/results gives."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import tables  # noqa: E402

RESULT = {
    "benchmark": "b",
    "question": "How fast?",
    "result": "{cell rate|model=big} at big, "
    "{least ratio|model=big} to {most ratio|model=big}; {most ratio}",
    "command": "python b.py",
    "machine": "two cores",
    "date": "2026-01-02",
    "columns": ["model", "rate", "ratio, a", "ratio, b"],
    "rows": [["small", 16700, 9.0, None], ["big", [1200, 1100, 1300], 1.50, 2]],
}


def written(folder: Path, **changes: object) -> dict[str, tables.Result]:
    text = json.dumps(RESULT | changes).replace("1.5,", "1.50,")
    (folder / "speed.json").write_text(text, encoding="utf-8")
    return tables.read(folder)


def test_the_page_is_what_the_script_makes():
    text = tables.PAGE.read_text("utf-8")
    assert tables.page(text, tables.read()) == text, "run python benchmarks/tables.py"


def test_every_result_names_machine_date_and_a_benchmark_that_exists():
    results = tables.read()
    assert len(results) >= 12
    for name, result in results.items():
        assert re.match(r"20\d\d-\d\d-\d\d", result["date"]), name
        assert "core" in result["machine"] and result["question"].endswith("?"), name
        for path in re.findall(r"python (\S+\.py)", result["command"]):
            assert (ROOT / path).is_file(), (name, path)


def test_cells_keep_their_digits_and_show_their_range(tmp_path):
    made = tables.table(written(tmp_path)["speed"]).splitlines()
    assert made[0] == "`python b.py`, 2026-01-02, two cores:"
    assert made[2:4] == ["| model | rate | ratio, a | ratio, b |", "|---|---|---|---|"]
    assert made[4:] == [
        "| small | 16,700 | 9.0 |  |", "| big | 1,200 (1,100 to 1,300) | 1.50 | 2 |"
    ]  # fmt: skip


def test_shown_columns_are_the_only_ones_on_the_page(tmp_path):
    made = tables.table(written(tmp_path, shown=["model", "ratio, b"])["speed"]).splitlines()
    assert made[2:] == ["| model | ratio, b |", "|---|---|", "| small |  |", "| big | 2 |"]


def test_rows_and_ranges_that_a_result_leaves_out_are_not_on_the_page(tmp_path):
    result = written(tmp_path, hidden={"ratio, a": [9]}, ranges=False)["speed"]
    assert tables.table(result).splitlines()[4:] == ["| big | 1,200 | 1.50 | 2 |"]
    for key, value in (("hidden", {"ratios": [9]}), ("shown", ["model", "ratios"])):
        with pytest.raises(ValueError, match=r"^ratios: no column of model, rate, ratio, a"):
            tables.table(written(tmp_path, **{key: value})["speed"])


def test_rows_of_the_model_with_a_real_vocabulary_come_first(tmp_path):
    rows = [*RESULT["rows"], ["135M", 7, 8, 9]]
    result = written(tmp_path, rows=rows, result="{each model: {cell rate} tokens/s}")["speed"]
    assert [row[0] for row in result["rows"]] == ["135M", "small", "big"]
    made = "135M: 7 tokens/s; small: 16,700 tokens/s; big: 1,200 tokens/s"
    assert tables.filled(result) == made


def test_the_summary_leaves_out_models_without_the_cells(tmp_path):
    line = "so: {each model: {cell rate}, {cell ratio, b}}"
    assert tables.filled(written(tmp_path, result=line)["speed"]) == "so: big: 1,200, 2"
    with pytest.raises(ValueError, match=r"\{cell r\} names no cell of model, rate"):
        tables.filled(written(tmp_path, result="{each model: {cell r}}")["speed"])
    with pytest.raises(ValueError, match=r"\{each size: .* names no column of model, rate"):
        tables.filled(written(tmp_path, result="{each size: {cell rate}}")["speed"])


def test_the_page_names_the_common_machine_once(tmp_path):
    one = written(tmp_path)["speed"]
    results = {"a": one, "b": one, "c": one | {"machine": "four cores"}}
    marks = [f"<!-- begin: {n} -->\n<!-- end: {n} -->\n" for n in ("summary", "a", "c")]
    made = tables.page("".join(marks), results)
    assert "Where no other machine is named: two cores." in made
    assert made.count("two cores") == 1 and "`, 2026-01-02, four cores:\n" in made


def test_the_summary_takes_its_numbers_from_the_rows(tmp_path):
    assert tables.filled(written(tmp_path)["speed"]) == "1,200 at big, 1.50 to 2; 9.0"


def test_a_placeholder_without_a_cell_is_an_error(tmp_path):
    wrong = written(tmp_path, result="{cell rates|model=big}")["speed"]
    with pytest.raises(ValueError, match=r"names no cell of model, rate"):
        tables.filled(wrong)


def test_a_row_of_another_length_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"the row small has 1 cells for 4 columns"):
        written(tmp_path, rows=[["small"]])


def test_a_result_without_marks_is_only_in_the_summary_and_marks_need_a_result(tmp_path):
    results = written(tmp_path)
    text = "<!-- begin: summary -->\n<!-- end: summary -->\n"
    row = "| How fast? | 1,200 at big, 1.50 to 2; 9.0 "
    assert f"{row}(`speed.json`) |" in tables.page(text, results)
    whole = text + "<!-- begin: speed -->\nold\n<!-- end: speed -->\n"
    made = tables.page(whole, results)
    assert f"{row}|" in made and "| small | 16,700 |" in made and "old" not in made
    kept = {"speed": results["speed"] | {"page": False}}
    assert "How fast?" not in tables.page(text, kept)
    with pytest.raises(ValueError, match="begin: speed --> names no file"):
        tables.page(whole, {})


@pytest.mark.full
def test_what_a_benchmark_writes_as_json_is_a_result(tmp_path):
    rows = [{"model": "1M", "median_s": 0.123456, "count": 123456}]
    machine = {"cpu": "EPYC", "cores": 2}
    whole = {k: v for k, v in RESULT.items() if k != "columns"} | {"rows": rows}
    text = json.dumps(whole | {"machine": machine, "result": "{cell median_s} s"})
    (tmp_path / "speed.json").write_text(text, encoding="utf-8")
    result = tables.read(tmp_path)["speed"]
    assert tables.filled(result) == "0.1235 s"
    assert tables.table(result).splitlines() == [
        "`python b.py`, 2026-01-02, cpu EPYC, cores 2:", "",
        "| model | median_s | count |", "|---|---|---|", "| 1M | 0.1235 | 123,456 |",
    ]  # fmt: skip

"""At the end of a run: the table of docs/agreement.md, as measured."""

from agree import table


def pytest_terminal_summary(terminalreporter):
    if rows := table():
        terminalreporter.section("agreement with peers")
        terminalreporter.write_line("\n".join(rows))

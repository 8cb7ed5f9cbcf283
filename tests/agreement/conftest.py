"""At the end of a run: the differences by peer, of which docs/agreement.md has the largest."""

from agree import table


def pytest_terminal_summary(terminalreporter):
    if rows := table():
        terminalreporter.section("agreement with peers")
        terminalreporter.write_line("\n".join(rows))

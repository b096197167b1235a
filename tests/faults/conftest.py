"""Prints how quickly failures were noticed, whatever the outcome of the tests."""

from fleet import Times


def pytest_terminal_summary(terminalreporter):
    rows = Times.table()
    if rows:
        terminalreporter.section("time from fault to error on the survivors")
        for row in rows:
            terminalreporter.write_line(row)

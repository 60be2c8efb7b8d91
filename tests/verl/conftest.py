"""The last line of the output, which the report of all checks shows."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    print(f"{len(stats.get('passed', []))} passed, {failed} failed")

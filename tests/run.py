"""Runs the test suite, one worker a core, and prints `test: passed=… failed=… seconds=…` as the last line."""

import sys
import time

import pytest


class Tally:
    """Counts outcomes of test calls, and of set-ups that failed."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed += 1
        elif report.failed:
            self.failed += 1
        elif report.skipped:
            self.skipped += 1


if __name__ == "__main__":
    tally = Tally()
    started = time.monotonic()
    code = int(
        pytest.main(["-q", "--durations=10", "-n", "auto", "--dist", "worksteal", *sys.argv[1:]], plugins=[tally])
    )
    seconds = time.monotonic() - started
    print(f"test: passed={tally.passed} failed={tally.failed} skipped={tally.skipped} seconds={seconds:.0f}")
    sys.exit(code)

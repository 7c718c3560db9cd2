"""What holds for every test: a hard time limit, and nothing left behind.

Folders say what a test needs: pure (no torch), cpu (torch), gpu (CUDA). A file whose need is
missing is skipped by that name; with --fail-on-skip a skip in pure or cpu fails: CI runs both.
A test marked program("chromium") needs that program too. Without it the test is skipped by name
and nothing fails: .ci/run installs it where it can, so CI does not skip, a laptop may.

Two pytest processes may run at once, as scripts/test has it: --part beside takes the tests marked
so, --part rest the others. Neither takes the other's things for left behind: a process is looked
for below this one, and a name in /dev/shm that another program has made is soon gone.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import psutil
import pytest

from nanorunner.workshop.leftovers import shared_names

# Hypothesis judges what the code does, never how long this machine takes for it: its deadline of an
# example and its check that examples are made quickly enough both look at the clock.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

LIMIT_S = 300.0  # far more than any test takes, on a machine that others keep busy too
HARD_LIMIT_EXTRA_S = 20.0  # then even a test that sits in a C++ wait is ended, with the whole run
SETTLE_S = 50.0  # how long killed processes may take to vanish; mostly a few milliseconds
BESIDE = "beside"  # the marker of those tests too
REST = "rest"
PARTS = (BESIDE, REST)
NEEDS_PROGRAM = "needs the program"
NEEDS_INTERPRETER = "in the interpreter alone"  # so with a GPU it is skipped, by name
TESTS = Path(__file__).parent
# test files import their shared helpers by name, and so do the ranks that they start
sys.path[:0] = [str(TESTS / folder) for folder in ("pure", "cpu")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skip in pure or cpu fails")
    parser.addoption(
        "--part", choices=PARTS, help="run the tests marked beside alone, or the rest alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"limit(seconds): hard limit of a test, else {LIMIT_S:g} s")
    config.addinivalue_line("markers", "program(name): skipped where that program is not installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        _keep_part(config, items, part)
    for item in items:
        for marker in item.iter_markers("program"):
            if shutil.which(marker.args[0]) is None:
                item.add_marker(pytest.mark.skip(reason=f"{NEEDS_PROGRAM} {marker.args[0]}"))


def _keep_part(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    """Deselect the other part's tests."""
    parts: dict[str, list[pytest.Item]] = {name: [] for name in PARTS}
    for item in items:
        parts[BESIDE if item.get_closest_marker(BESIDE) else REST].append(item)
    items[:] = parts.pop(part)
    for others in parts.values():
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    with _time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with _time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    with _time_limit(item):
        return (yield)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test after which a process or a name in /dev/shm is left that was not there before."""
    processes, names = _processes(), shared_names()
    yield
    deadline = time.monotonic() + SETTLE_S
    while left := (_processes() - processes):
        if time.monotonic() > deadline:
            for process in left:  # or the tests after this one would be blamed as well
                process.kill()
            pytest.fail(f"processes left: {[process.info for process in left]}")
        time.sleep(0.02)
    # another program's engine has its name for some milliseconds; what we have left stays
    while new_names := (shared_names() - names):
        assert time.monotonic() < deadline, f"left in /dev/shm: {sorted(new_names)}"
        time.sleep(0.02)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    missing = _missing_for(module_path)
    if not missing:
        return None
    module: pytest.Module = _SkippedModule.from_parent(parent, path=module_path)
    module.missing = missing  # type: ignore[attr-defined]
    return module


class _SkippedModule(pytest.Module):
    """A test file that this machine cannot run; its imports are not tried."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(f"needs {self.missing}", allow_module_level=True)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if skipped := _forbidden_skips(config, terminalreporter):
        terminalreporter.write_line(f"--fail-on-skip: skipped in pure or cpu: {skipped}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == 0 and reporter is not None and _forbidden_skips(session.config, reporter):
        session.exitstatus = 1


def _forbidden_skips(config: pytest.Config, reporter: Any) -> list[str]:
    if not config.getoption("--fail-on-skip"):
        return []
    ids = [
        report.nodeid
        for report in reporter.stats.get("skipped", [])
        if not any(x in str(report.longrepr) for x in (NEEDS_PROGRAM, NEEDS_INTERPRETER))
    ]
    return [name for name in ids if "tests/gpu" not in name]


def _missing_for(path: Path) -> str:
    """Return what this machine lacks for a test file, "" when it has all."""
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    if folder not in ("cpu", "gpu"):
        return ""
    if importlib.util.find_spec("torch") is None:
        return "torch"
    if folder == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "a CUDA GPU"
    return ""


@contextmanager
def _time_limit(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker is not None else LIMIT_S

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test took longer than its limit of {seconds:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + HARD_LIMIT_EXTRA_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _processes() -> set[psutil.Process]:
    """Return the live processes below this one, multiprocessing's own helper left out."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in line:
                process.info = {"pid": process.pid, "command": line[:200]}
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found

"""A pytest plugin: `pytest --jackfield-conformance` also runs the contract over every installed endpoint, or over those that are named.

    pytest --jackfield-conformance=my_endpoint

Afterwards it tells the median CPU time of each endpoint's stages. Without the option it does nothing, and imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jackfield.testing.contract import ContractCase

__all__ = ["Conformance", "ConformanceItem"]

_OPTION = "--jackfield-conformance"
_STAGES = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    group = parser.getgroup("jackfield", "jackfield, a serving core")
    group.addoption(
        _OPTION,
        nargs="?",
        const="",
        default=None,
        metavar="NAMES",
        help="also run the contract over installed endpoints: all, or those named, with commas between",
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks after the tests."""
    given = config.getoption(_OPTION)
    if given is None:
        return
    from jackfield.testing.contract import contract_cases  # noqa: PLC0415  (a server and all that it needs)

    names = [name.strip() for name in given.split(",") if name.strip()]
    try:
        cases = contract_cases(names=names)
    except LookupError as error:
        raise pytest.UsageError(f"{_OPTION}: {error.args[0]} (write {_OPTION}=NAME, or put it last)") from error
    config.stash[_STAGES] = {}
    collector = Conformance.from_parent(session, name="conformance", nodeid="jackfield-conformance")
    items.extend(ConformanceItem.from_parent(collector, name=str(case), case=case) for case in cases)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The stages' times."""
    stages = config.stash.get(_STAGES, {})
    if not stages:
        return
    terminalreporter.section("jackfield: median CPU time of stages, ms")
    for name, medians in sorted(stages.items()):
        terminalreporter.line(f"{name}: " + ", ".join(f"{stage} {median:.2f}" for stage, median in medians.items()))


class Conformance(pytest.Collector):
    """Where the checks hang in pytest's tree."""

    def collect(self) -> Iterable[pytest.Item]:
        """Nothing: the items are made when everything else is collected."""
        return ()


class ConformanceItem(pytest.Item):
    """One check of one route."""

    def __init__(self, *, case: ContractCase, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.case = case
        self.add_marker("jackfield_conformance")

    def runtest(self) -> None:
        """Run it on a server of its own."""
        self.case.run()
        if self.case.check.__name__.startswith("stages_"):
            stages = self.config.stash[_STAGES]
            stages[f"{self.case.endpoint.name} {self.case.route.paths[0]}"] = self.case.stages_ms

    def reportinfo(self) -> tuple[str, None, str]:
        """What a report calls it."""
        return "jackfield-conformance", None, self.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: str | None = None) -> str:
        """The check's own words first: what it is for, then how it failed."""
        return f"{self.case.check.__doc__}\n\n{super().repr_failure(excinfo)}"


def pytest_configure(config: pytest.Config) -> None:
    """The marker, so that --strict-markers knows it."""
    config.addinivalue_line("markers", "jackfield_conformance: a check of the contract of jackfield's endpoints")

"""Public bug reports of servers like this one, as tests: each case is run, or stands in the list of those that wait for an endpoint.

A case that fails stands for a whole kind of fault.
"""

from __future__ import annotations

import inspect

import pytest

import tests.cases.classes
import tests.cases.embeddings
import tests.cases.plugins
import tests.cases.scoring
import tests.cases.server
import tests.cases.tokenization  # noqa: F401  (each registers its cases)
from tests.cases.bench import CASES, ENACTED

# Which endpoint a case waits for.
WAITING = {
    **dict.fromkeys((name for name in CASES if name[0] == "D"), "chat"),
}


def test_every_case_is_run_or_waits() -> None:
    assert set(ENACTED) | set(WAITING) == set(CASES)
    assert not set(ENACTED) & set(WAITING)


@pytest.mark.parametrize("case_id", sorted(ENACTED))
def test_case(case_id: str, request: pytest.FixtureRequest) -> None:
    function = ENACTED[case_id]
    function(**{name: request.getfixturevalue(name) for name in inspect.signature(function).parameters})

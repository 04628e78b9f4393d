"""Public bug reports of servers like this one, as tests: each case is run, or stands in the list of those that wait for an endpoint.

A case that fails stands for a whole kind of fault. Here are those that share a server; the others are in `test_apart.py`.
"""

from __future__ import annotations

import pytest

from tests.cases.bench import CASES, ENACTED
from tests.cases.families import TOGETHER, enact

# Which endpoint a case waits for.
WAITING = {
    "D17": "tools",
}


def test_every_case_is_run_or_waits() -> None:
    assert set(ENACTED) | set(WAITING) == set(CASES)
    assert not set(ENACTED) & set(WAITING)


@pytest.mark.parametrize("case_id", TOGETHER)
def test_case(case_id: str, request: pytest.FixtureRequest) -> None:
    enact(case_id, request)

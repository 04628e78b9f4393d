"""Public bug reports of servers like this one, as tests: each case is run.

A case that fails stands for a whole kind of fault. Here are those that share a server; the others are in `test_apart.py`.
"""

from __future__ import annotations

import pytest

from tests.cases.bench import CASES, ENACTED
from tests.cases.families import TOGETHER, enact


def test_every_case_is_run() -> None:
    assert set(ENACTED) == set(CASES)


@pytest.mark.parametrize("case_id", TOGETHER)
def test_case(case_id: str, request: pytest.FixtureRequest) -> None:
    enact(case_id, request)

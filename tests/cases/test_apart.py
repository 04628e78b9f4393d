"""The cases with servers of their own, because they end or harm them, or need another configuration. See `test_cases.py`."""

from __future__ import annotations

import pytest

from tests.cases.families import APART, enact


@pytest.mark.parametrize("case_id", APART)
def test_case(case_id: str, request: pytest.FixtureRequest) -> None:
    enact(case_id, request)

"""All cases that are run, and how: in one file those that share the large servers, in another those with servers of their own.

Two files, since each has one worker: no second worker starts the large servers again, and it runs the others meanwhile.
"""

from __future__ import annotations

import inspect

import pytest

import tests.cases.chat
import tests.cases.classes
import tests.cases.embeddings
import tests.cases.plugins
import tests.cases.scoring
import tests.cases.server
import tests.cases.tokenization
import tests.cases.tools  # noqa: F401  (each registers its cases)
from tests.cases.bench import ENACTED

__all__ = ["APART", "TOGETHER", "enact"]

LARGE = {"bench", "scorer", "smol"}


def fixtures(case_id: str) -> list[str]:
    """What a case asks for."""
    return list(inspect.signature(ENACTED[case_id]).parameters)


TOGETHER = sorted(case_id for case_id in ENACTED if LARGE & set(fixtures(case_id)))
APART = sorted(set(ENACTED) - set(TOGETHER))


def enact(case_id: str, request: pytest.FixtureRequest) -> None:
    """Run a case."""
    ENACTED[case_id](**{name: request.getfixturevalue(name) for name in fixtures(case_id)})

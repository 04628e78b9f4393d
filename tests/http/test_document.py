"""The OpenAPI document and the server agree: what is sent by it never breaks the server, and every answer is one that it describes.

The requests are schemathesis' own, made from the document alone: right ones and wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from jackfield.testing import RunningServer, make_server
from jackfield_embed import EmbedEndpoint
from jackfield_tokenize import TokenizeEndpoint

ROUTES = len(EmbedEndpoint.routes) + len(TokenizeEndpoint.routes)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with make_server(EmbedEndpoint(), TokenizeEndpoint()) as running:
        yield running


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_described(server: RunningServer, mode: schemathesis.GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    results = list(document.get_all_operations())
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(operations) == len(results)
    assert len(operations) > ROUTES
    for operation in operations:
        if mode == schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing in it can be wrong

        @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            # A schema cannot say all that makes a request right: the model's name and limits, fields that exclude each other.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        check()

"""What the endpoint is for, and what it refuses."""

from __future__ import annotations

import pytest
from jackfield.testing import make_client

from jackfield_duplicates import DuplicatesEndpoint


def test_equal_texts_are_found() -> None:
    with make_client(DuplicatesEndpoint()) as client:
        data = client.post("/duplicates", json={"texts": ["a cat", "a dog", "a cat"]}).json()["data"]
    assert [(pair["first"], pair["second"]) for pair in data] == [(0, 2)]
    assert data[0]["cosine"] == pytest.approx(1.0, abs=1e-5)


def test_the_threshold_has_bounds() -> None:
    with make_client(DuplicatesEndpoint()) as client:
        answer = client.post("/duplicates", json={"texts": ["a", "b"], "threshold": 1.5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "threshold"

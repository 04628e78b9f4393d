"""What mypy --strict tells the author of a plugin: nothing of a right one, and of a wrong one the line and what was expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent
WRONG = sorted((HERE / "wrong").glob("*.py"))


@pytest.fixture(scope="module")
def said() -> dict[Path, dict[int, str]]:
    """mypy's errors by file and line; one run over all files."""
    out, errors, _ = api.run(["--strict", "--no-error-summary", "--hide-error-context", *map(str, [HERE / "right.py", *WRONG])])
    assert not errors
    found: dict[Path, dict[int, str]] = {}
    for line in out.splitlines():
        match = re.fullmatch(r"(.+?):(\d+): error: (.*)", line)
        if match:
            found.setdefault(Path(match[1]).resolve(), {})[int(match[2])] = match[3]
    return found


def test_a_right_plugin_is_right(said: dict[Path, dict[int, str]]) -> None:
    assert HERE / "right.py" not in said


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_a_wrong_plugin_is_told_where_and_why(said: dict[Path, dict[int, str]], path: Path) -> None:
    expected = {
        number: match[1] for number, line in enumerate(path.read_text().splitlines(), 1) if (match := re.search(r"# E: (.*)$", line))
    }
    assert expected
    assert said.get(path, {}).keys() == expected.keys()
    for number, message in expected.items():
        assert message in said[path][number]

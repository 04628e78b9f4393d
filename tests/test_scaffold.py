"""`jackfield new`: what it writes, and what it refuses. That its packages work is a matter of `make test-wheels`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jackfield.errors import ConfigError
from jackfield.scaffold import KINDS, make_package
from tests.conftest import Run

RUFF = [sys.executable, "-m", "ruff"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_package(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "made"
    files = make_package("my_own", kind, folder)
    assert all(path.is_file() for path in files)
    assert not [path for path in folder.rglob("*") if "{" in path.name or path.suffix == ".j2"]
    assert not [path for path in files if "{{" in path.read_text()]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "jackfield-my-own"
    assert set(project["entry-points"]["jackfield"]) == {"my_own"}
    table = tomllib.loads((folder / "jackfield.toml").read_text())
    assert ("my_own" in table["endpoints"]) == (kind in ("pooling", "head", "generation"))
    for command in ([*RUFF, "check", "."], [*RUFF, "format", "--check", "."]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_command(run: Run, tmp_path: Path, kind: str) -> None:
    """It knows every kind, and names the contract for those that it can be run over."""
    code, out, err = run("new", "my_own", "--kind", kind, "--into", str(tmp_path / "made"))
    assert (code, err) == (0, "")
    assert ("pytest --jackfield-conformance=my_own" in out) == KINDS[kind].has_endpoint
    assert f"{kind}:" in " ".join(run("new", "--help")[1].split())


@pytest.mark.parametrize(
    ("name", "says"),
    [("My-Endpoint", "can be no plugin's name"), ("a b", "can be no plugin's name"), ("class", "can be"), ("embed", "jackfield-embed")],
)
def test_names(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_package(name, "pooling", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        make_package("my_own", "pooling", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

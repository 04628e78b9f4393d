"""Separately installable: the wheels of the core and of one plugin, alone in an empty environment, give an embedding."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from jackfield.scaffold import KINDS
from tests.checkpoints import save_sentence_transformer
from tests.servers import served

pytestmark = pytest.mark.wheels

ROOT = Path(__file__).parents[2]
# The build of torch that this environment was made with (see the Makefile).
TORCH = os.environ.get("TORCH", "torch==2.13.0")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's Python with the two wheels and what they declare, nothing else."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in ("core", "plugins/embed"):
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT / project)
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    install: list[str | Path] = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    if TORCH:
        run(*install, TORCH)
    run(*install, "-c", ROOT / "constraints.txt", *sorted(folder.glob("*.whl")))
    return python


def test_the_core_and_one_plugin_are_enough(python: Path, tmp_path: Path) -> None:
    run(python, "-m", "pip", "check")
    assert run(python, "-c", "import jackfield, sys; print('torch' in sys.modules)") == "False\n"
    model = save_sentence_transformer(tmp_path / "model")
    with served(str(model), python=python) as server, server.client() as client:
        answer = client.post("/v1/embeddings", json={"input": "hello"})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"][0]["embedding"]) == 32
        assert client.post("/tokenize", json={"prompt": "hello"}).status_code == 404, "a plugin that was not installed"
    assert "(endpoints: embed)" in server.log()


def test_the_installed_command_tells_what_is_there(python: Path) -> None:
    assert "embed" in run(python.parent / "jackfield", "plugins")
    assert "tokenize" not in run(python.parent / "jackfield", "plugins")


@pytest.fixture(scope="module")
def with_tools(python: Path) -> Path:
    """The same with what the tests of a plugin need."""
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "-c",
        ROOT / "constraints.txt",
        "pytest",
        "httpx",
        "hatchling",
        "editables",
        "mypy",
    )
    return python


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_its_own_tests(with_tools: Path, tmp_path: Path, kind: str) -> None:
    commands = with_tools.parent
    name = f"my_{kind.replace('-', '_')}"
    folder = tmp_path / "made"
    run(commands / "jackfield", "new", name, "--kind", kind, "--into", folder)
    run(with_tools, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", folder)
    run(commands / "mypy", "src", "tests", cwd=folder)
    conformance = [f"--jackfield-conformance={name}"] if KINDS[kind].has_endpoint else []
    said = run(with_tools, "-m", "pytest", "-q", *conformance, cwd=folder)
    assert ("median CPU time of stages" in said) == bool(conformance)
    assert run(commands / "jackfield", "check", cwd=folder).startswith("ok: 1 models (tiny)")
    run(with_tools, "-m", "pip", "uninstall", "-q", "-y", f"jackfield-{name.replace('_', '-')}")


def test_plugins_of_other_kinds_join_as_wheels(python: Path, tmp_path: Path) -> None:
    """One with routes of another server, one around every endpoint, one with an engine: installed, configured, and that is all."""
    for name in ("tei", "timing", "openvino"):
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT / "plugins" / name)
    constraints = ("-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "-q", "--no-compile", *constraints, *sorted(tmp_path.glob("*.whl")))
    run(python, "-m", "pip", "check")
    config = tmp_path / "jackfield.toml"
    models = '[models.tiny]\nsource = "tiny:bert"\n[models.other]\nsource = "tiny:bert"\nengine = "openvino"\n'
    config.write_text(models + "[endpoints.tei]\n[endpoints.embed]\n[plugins.timing]\n")
    with served(str(config), python=python, env={"JACKFIELD_CACHE": str(tmp_path / "cache")}) as server, server.client() as client:
        for path, body in (("/tei", {"inputs": "hello", "model": "other"}), ("/v1/embeddings", {"input": "hello"})):
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert "build_response;dur=" in answer.headers["server-timing"]


def test_the_tutorials_files_are_typed(with_tools: Path, tmp_path: Path) -> None:
    """In the package that they are part of; that it works is a matter of tests/docs/test_tutorial.py."""
    folder = tmp_path / "made"
    run(with_tools.parent / "jackfield", "new", "duplicates", "--into", folder)
    shutil.copy(ROOT / "examples" / "tutorial" / "endpoint.py", folder / "src" / "jackfield_duplicates")
    shutil.copy(ROOT / "examples" / "tutorial" / "test_duplicates.py", folder / "tests")
    run(with_tools.parent / "mypy", "src", "tests", cwd=folder)

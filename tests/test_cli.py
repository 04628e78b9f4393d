"""The command line as a user meets it: which of its arguments is what, what it prints, whom it blames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield.testing.server import write_model
from tests.conftest import Run, Write


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that is a model as far as its files go."""
    folder = tmp_path / "tiny-1.5"
    folder.mkdir()
    return write_model(folder)


def test_models_shows_who_would_serve_it(run: Run, model: str) -> None:
    code, out, err = run("models", model)
    assert (code, err) == (0, "")
    heads, row = (line.split("\t") for line in out.splitlines())
    shown = dict(zip(heads, row, strict=True))
    assert shown["id"] == "tiny-1.5"
    endpoints = shown["endpoints"].split(", ")
    assert endpoints == sorted(endpoints)
    assert {"embed", "tokenize"} <= set(endpoints)
    assert "classify" not in endpoints
    assert shown["operations"].startswith("embed")


def test_models_tells_nothing_that_loading_decides(run: Run, model: str) -> None:
    _, out, _ = run("models", model, "--json", "--set", 'models."tiny-1.5".quantization=int4')
    (entry,) = json.loads(out)
    assert {"embed", "tokenize"} <= set(entry["endpoints"])
    assert (entry["dtype"], entry["device"], entry["execution"], entry["quantization"]) == (None, None, None, "int4")


def test_a_model_alone_takes_flags_and_variables(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACKFIELD_MODELS__TINY_1_5__MAX_LENGTH", "7")
    _, out, _ = run("config", model, "--json", "--set", 'models."tiny-1.5".dtype=bfloat16')
    table = json.loads(out)["models"]["tiny-1.5"]
    assert (table["source"], table["dtype"], table["max_length"]) == (model, "bfloat16", 7)
    code, _, err = run("check", model, "--set", 'models."tiny-1.5".dtype=int3')
    assert code == 2
    assert "the flag for" in err
    assert "models.tiny-1.5.dtype = 'int3'" in err


@pytest.mark.parametrize("target", ["gpt2", "BAAI/bge-small-en", "package:nowhere/model"])
def test_what_is_no_file_is_a_model(run: Run, target: str) -> None:
    _, out, _ = run("config", target, "--json")
    assert [table["source"] for table in json.loads(out)["models"].values()] == [target]


@pytest.mark.parametrize("target", ["missing.toml", "folder/missing.toml"])
def test_what_ends_like_a_file_is_one(run: Run, target: str) -> None:
    code, _, err = run("check", target)
    assert code == 2
    assert f"{target}: there is no such file" in err


def test_a_mistake_in_a_plugins_table_names_its_source(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write('[models.a]\nsource = "/nowhere"\n[endpoints.embed]\nprefx = "/a"')
    code, _, err = run("check", str(path))
    assert code == 2
    assert f"{path}: [endpoints.embed] has an unknown key 'prefx'. Did you mean 'prefix'?" in err
    path = write('[models.a]\nsource = "/nowhere"\n[endpoints.embed]')
    monkeypatch.setenv("JACKFIELD_ENDPOINTS__EMBED__THREADED", "7")
    assert "JACKFIELD_ENDPOINTS__EMBED__THREADED: endpoints.embed.threaded = 7" in run("check", str(path))[2]


def test_config_hides_what_gives_access(run: Run, write: Write) -> None:
    options = '[models.a.options]\nredis_password = "hidden"\nAPI_KEY = "hidden"\nmax_tokens = 5'
    path = write(f'[server]\napi_keys = ["hidden"]\n[models.a]\nsource = "x"\n{options}')
    _, out, _ = run("config", str(path))
    assert "hidden" not in out
    assert "max_tokens = 5" in out

"""GGUF files are converted once, by a process of its own, whoever else does it and whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from jackfield import ChatPrompt, TextPrompt
from jackfield.client import ModelSpec, Progress
from jackfield.engine.blocks import INT4_FILE
from jackfield.engine.conversion import converted
from jackfield.engine.files import read_model_files
from jackfield.testing import make_client
from jackfield.tokenization import ModelTokenizer
from jackfield_embed import EmbedEndpoint
from tests.conftest import Run
from tests.gguf_files import save_gguf


def start(file: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jackfield.engine.gguf", str(file), str(folder), "float32"]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> int:
    process.communicate()
    return process.returncode


def test_serves_once_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACKFIELD_CACHE", str(tmp_path / "cache"))
    file = save_gguf(tmp_path / "tiny.gguf")
    left = tmp_path / "cache" / "gguf" / ".part-left"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    steps: list[Progress] = []
    folder = converted("m", str(file), dtype="float32", device="cpu", progress=steps.append)
    assert steps[0].done == 0
    assert steps[0].what.startswith("converting tiny.gguf")
    assert [step.done for step in steps[:-1]] == sorted({step.done for step in steps[:-1]})
    assert steps[-1].what.startswith("converted tiny.gguf for model m in ")
    assert folder in steps[-1].what
    assert not left.exists()

    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / file.name
    copy.write_bytes(file.read_bytes())
    again: list[Progress] = []
    assert converted("other", str(copy), dtype="float32", device="cpu", progress=again.append) == folder
    assert not again

    table = {"dtype": "float32", "pooling": "lasttoken"}
    with make_client(
        EmbedEndpoint(), models={"file": {"source": str(copy), **table}, "folder": {"source": folder, **table}}, real=True
    ) as client:
        vectors = [
            client.post("/v1/embeddings", json={"model": model, "input": "hello  12"}).json()["data"][0]["embedding"]
            for model in ("file", "folder")
        ]
    assert vectors[0] == vectors[1]
    assert len(vectors[0]) == 64


def test_the_operator_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = save_gguf(tmp_path / "tiny.gguf")
    code, _, told = run("check", str(file))
    assert code == 0
    lines = told.splitlines()
    assert len(lines) == len(set(lines)) > 2
    assert lines[0].startswith("converting tiny.gguf (0 MB) for model tiny.gguf, once: 0 %")
    assert str(tmp_path / "cache" / "jackfield" / "gguf" / "tiny-") in lines[-1]
    assert run("check", str(file))[2] == ""


def test_killed_while_converting(tmp_path: Path) -> None:
    """By force, which leaves what was begun; by a signal, or with the server that it works for, which does not."""
    file = save_gguf(tmp_path / "tiny.gguf")
    codes: dict[str, int] = {}
    for name in ("killed", "told", "alone"):  # one by one: who waits for another's first word may come too late for the next
        process = start(file, tmp_path / name / "folder")
        assert process.stdout is not None
        assert b"Percent" in process.stdout.readline()
        if name == "alone":
            process.stdout.close()
        else:
            process.send_signal(signal.SIGKILL if name == "killed" else signal.SIGTERM)
        codes[name] = process.wait()
    assert codes == {"killed": -signal.SIGKILL, "told": 1, "alone": 1}
    assert [path.name[:6] for path in (tmp_path / "killed").iterdir()] == [".part-"]
    assert not list((tmp_path / "told").iterdir())
    assert not list((tmp_path / "alone").iterdir())


def test_two_at_once(tmp_path: Path) -> None:
    file, folder = save_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache" / "folder"
    processes = [start(file, folder) for _ in range(2)]
    assert [end(process) for process in processes] == [0, 0]
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    assert load_file(folder / "model.safetensors")


# SmolLM2, whose numbers were read from a vLLM server that served the same model.


def smollm2_tokenizer(folder: Path) -> ModelTokenizer:
    return ModelTokenizer(read_model_files(ModelSpec(id="smollm2", path=str(folder))).card)


def test_smollm2_tokens(smollm2: Path) -> None:
    tokenize = smollm2_tokenizer(smollm2)
    hi, capital = (
        tokenize([ChatPrompt(messages=[{"role": "user", "content": text}], add_generation_prompt=True, add_special_tokens=False)])[0]
        for text in ("hi", "What is the capital of France?")
    )
    assert len(hi.token_ids) == 31
    assert hi.token_ids[:4] == [1, 9690, 198, 2683]
    assert len(capital.token_ids) == 37
    texts = {
        "Hello 🌍 world": [19556, 15107, 230, 231, 905],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    for text, ids in texts.items():
        made = tokenize([TextPrompt(text=text, with_text=True)])[0]
        assert made.token_ids == ids
        assert made.text == text


def test_smollm2_folder(smollm2: Path) -> None:
    card = read_model_files(ModelSpec(id="smollm2", path=str(smollm2))).card
    assert (card.max_length, card.vocab_size, card.embedding_size) == (8192, 49152, 576)
    assert sum(name.endswith(".q") for name in load_file(smollm2 / INT4_FILE)) == 210

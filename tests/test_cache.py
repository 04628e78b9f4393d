"""What is made once is whole or not there, whoever makes it and whoever is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackfield import cache_folder, made_once


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JACKFIELD_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("JACKFIELD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "jackfield"


def test_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def write(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("whole")

    for _ in range(2):
        made = made_once(tmp_path / "a" / "b", write)
        assert (made / "file").read_text() == "whole"
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="the disk is full"):
        made_once(tmp_path / "b", write)
    assert list(tmp_path.iterdir()) == []


def test_another_is_first(tmp_path: Path) -> None:
    def other(folder: Path) -> None:
        (folder / "who").write_text("the other")

    def write(folder: Path) -> None:
        made_once(tmp_path / "b", other)
        (folder / "who").write_text("me")

    assert (made_once(tmp_path / "b", write) / "who").read_text() == "the other"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]

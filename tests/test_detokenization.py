"""Any text, cut into tokens anywhere, comes out whole, and ends before the first stop text."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from jackfield.detokenization import TextStream
from tests.checkpoints import save_tokenizer


@cache
def by_bytes() -> Tokenizer:
    """A token a byte: every character beyond ASCII is several."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), pad_id=0)
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def stream_of(text: str, stop: tuple[str, ...] = (), *, step: int = 1, include: bool = False) -> tuple[list[str], str | None]:
    """The pieces, and what ended them."""
    ids = by_bytes().encode(text, add_special_tokens=False).ids
    stream = TextStream(by_bytes(), stop=stop, include_stop=include)
    pieces = [stream.add(ids[place : place + step]) for place in range(0, len(ids), step)]
    return [*pieces, stream.finish()], stream.stopped_by


@given(st.text(max_size=40), st.integers(1, 5))
@example("🌍🌍 \uff01\n\nThis", 1)
@settings(max_examples=300, deadline=None)
def test_pieces_are_the_text_and_each_is_whole(text: str, step: int) -> None:
    pieces, _ = stream_of(text, step=step)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
@settings(max_examples=500, deadline=None)
def test_the_first_stop_text_that_is_complete_ends_it(text: str, stops: list[str], include: bool) -> None:
    pieces, stopped_by = stream_of(text, tuple(stops), include=include)
    ends = {text.find(stop) + len(stop): stop for stop in stops if stop in text}
    if not ends:
        assert ("".join(pieces), stopped_by) == (text, None)
        return
    end = min(ends)
    done = text[:end]
    found = [stop for stop in stops if done.endswith(stop)]
    assert stopped_by in found
    assert stopped_by is not None
    assert "".join(pieces) == (done if include else done[: end - len(stopped_by)])


def test_what_is_held_back_comes_at_the_end() -> None:
    pieces, stopped_by = stream_of("12, 13, 1", ("13, 1X",))
    assert ("".join(pieces), stopped_by) == ("12, 13, 1", None)
    assert pieces[-1] == "13, 1"


def test_a_character_that_is_cut_off_is_one_replacement() -> None:
    ids = by_bytes().encode("a🌍", add_special_tokens=False).ids
    stream = TextStream(by_bytes())
    assert stream.add(ids[:-1]) == "a"
    assert set(stream.finish()) == {"\ufffd"}


def test_no_stop_before_its_time() -> None:
    ids = by_bytes().encode("abab", add_special_tokens=False).ids
    stream = TextStream(by_bytes(), stop=("b",))
    assert stream.add(ids[:2], may_stop=False) == "ab"
    assert stream.add(ids[2:]) == "a"
    assert stream.stopped_by == "b"


def test_pieces_of_words_and_special_tokens(minilm: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm).backend_tokenizer
    ids = tokenizer.encode("unbelievable tokenization, isn't it?").ids
    stream = TextStream(tokenizer, hidden={tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]")})
    assert "".join([*(stream.add([one]) for one in ids), stream.finish()]) == tokenizer.decode(ids)
    kept = TextStream(tokenizer)
    assert "".join([*(kept.add([one]) for one in ids), kept.finish()]) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("cut", [1, 3])
def test_what_comes_before_is_not_repeated(cut: int) -> None:
    ids = by_bytes().encode("hello world", add_special_tokens=False).ids
    stream = TextStream(by_bytes(), ids[:-cut])
    assert "".join([stream.add(ids[-cut:]), stream.finish()]) == "hello world"[-cut:]

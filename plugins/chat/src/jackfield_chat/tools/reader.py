"""Reading an answer that grows: a generator that waits for more text where it cannot decide, and so decides the same wherever it is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import TypeVar

from jackfield import CallArguments, CallStart, ReasoningText, ToolPiece
from jackfield_chat.marks import WHITE, overlap
from jackfield_chat.tools.scan import ObjectScan

__all__ = ["Reader", "Reading"]

T = TypeVar("T")
# What waits for text by yielding, and gives a T in the end.
Reading = Generator[None, None, T]

_SPACE = re.compile(r"[ \t\r\n]*")


class Reader:
    """A `ToolStream` over the text of one answer. A family's `read` looks ahead by places in `text`, then takes what it has made out.

    White space between content and calls belongs to neither.
    """

    def __init__(self, *, sure: bool) -> None:
        self.text = ""
        self.ended = False
        self._sure = sure
        self._pieces: list[ToolPiece] = []
        self._space = ""  # the end of the content so far, told if more follows
        self._after_call = False
        self._reading = self.read()
        self._over = False

    def feed(self, text: str) -> list[ToolPiece]:
        """What is certain by now and not told yet."""
        if not text:
            return []
        self.text += text
        return self._go_on()

    def finish(self) -> list[ToolPiece]:
        """The rest."""
        self.ended = True
        pieces = self._go_on()
        if self._space:
            pieces.append(self._space)
            self._space = ""
        return pieces

    def read(self) -> Reading[None]:
        """The whole answer, by the family's rules. What is left of the text when it ends is content."""
        raise NotImplementedError

    def _go_on(self) -> list[ToolPiece]:
        if not self._over:
            self._over = next(self._reading, self) is self
        if self._over and self.text:
            self.say(len(self.text))
        pieces, self._pieces = self._pieces, []
        return pieces

    def say(self, size: int) -> None:
        """So many characters of the text are content."""
        self.write(self.text[:size])
        self.drop(size)

    def write(self, said: str) -> None:
        """Content."""
        if self._after_call:
            said = said.lstrip(WHITE)
        kept = said.rstrip(WHITE)
        if kept:
            self._pieces.append(self._space + kept)
            self._space = said[len(kept) :]
            self._after_call = False
        else:
            self._space += said

    def think(self, thought: str) -> None:
        """Reasoning, of what tells it apart by itself."""
        self._pieces.append(ReasoningText(thought))

    def drop(self, size: int) -> None:
        """So many characters of the text are a call that is told, or around it."""
        self.text = self.text[size:]

    def tell(self, name: str, arguments: str) -> None:
        """A whole call."""
        self._pieces += [CallStart(name), CallArguments(arguments)]
        self._space, self._after_call = "", True

    def content_until(self, mark: str) -> Reading[bool]:
        """Take content up to the mark, which is left to be read; False if the text ends before there is one."""
        while True:
            found = self.text.find(mark)
            if found >= 0:
                self.say(found)
                return True
            self.say(len(self.text) if self.ended else len(self.text) - overlap(self.text, mark))
            if self.ended:
                return False
            yield

    def space(self, at: int) -> Reading[int]:
        """The place after white space."""
        while True:
            match = _SPACE.match(self.text, at)
            end = match.end() if match else at
            if end < len(self.text) or self.ended:
                return end
            yield

    def has(self, mark: str, at: int) -> Reading[bool]:
        """Whether the text goes on with this there."""
        while True:
            there = self.text[at : at + len(mark)]
            if len(there) == len(mark) or self.ended or not mark.startswith(there):
                return there == mark
            yield

    def run(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """The place after the characters that the pattern (`[...]*`) takes."""
        while True:
            match = pattern.match(self.text, at)
            end = match.end() if match else at
            if end < len(self.text) or self.ended:
                return end
            yield

    def call(self, at: int, name: str | None = None) -> Reading[int | None]:
        """The place after the call that is written there as an object; None if it is none, and is not told. name: the object is the
        arguments of the call of this name, else it has the keys `name` and `arguments` (or `parameters`)."""
        scan = ObjectScan(at)
        telling = _Telling(name, self._pieces)
        while True:
            scan.advance(self.text)
            over = scan.end is not None or scan.bad or self.ended
            if self._sure or scan.end is not None:
                telling.tell(self.text, scan, cut_off=self.ended and not scan.bad)
            if over:
                break
            yield
            telling.pieces = self._pieces
        if not telling.begun:
            return None
        self._space, self._after_call = "", True
        return scan.at if scan.end is None and scan.bad else scan.end or len(self.text)


class _Telling:
    """Tells one call as far as it is read."""

    def __init__(self, name: str | None, pieces: list[ToolPiece]) -> None:
        self.pieces = pieces
        self.begun = False
        self._name = name
        self._told = 0

    def tell(self, text: str, scan: ObjectScan, *, cut_off: bool) -> None:
        start, end = self._arguments(scan)
        name = self._name or _name(text, scan)
        if name is None or start is None or not text.startswith("{", start):
            return
        if not self.begun:
            self.begun = True
            self._told = start
            self.pieces.append(CallStart(name))
        upto = end if end is not None else len(text) if cut_off else scan.at
        if upto > self._told:
            self.pieces.append(CallArguments(text[self._told : upto]))
            self._told = upto

    def _arguments(self, scan: ObjectScan) -> tuple[int | None, int | None]:
        if self._name is not None:
            return scan.start, scan.end
        return next((scan.values[key] for key in scan.values if key in ('"arguments"', '"parameters"')), (None, None))


def _name(text: str, scan: ObjectScan) -> str | None:
    """The call's name, if it is known by now and can be one."""
    start, end = scan.values.get('"name"', (0, None))
    if end is None or not text.startswith('"', start):
        return None
    name: str = json.loads(text[start:end])
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no answer can hold
        return None
    return name or None

"""A JSON object that grows, read once: where it ends, or that it is none, is known as soon as the text says so.

By RFC 8259's grammar. A deep object takes no stack, and what is read is not read again when more has come.
"""

from __future__ import annotations

import re

__all__ = ["ObjectScan"]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# Readers of JSON give up on what is deeper by far; a client should get nothing that its own cannot read.
_MAX_DEPTH = 200


class ObjectScan:
    """Reads the object that begins at `start`.

    Attributes:
        start: where it begins. at: up to where the text is read. end: where the object ends, once it has.
        bad: what begins there is no object, and `at` is where that shows.
        values: of the object's own keys, as they are written with their quotes, where the value begins and where it ends (None: not yet).
            Of a doubled key the first.
    """

    def __init__(self, start: int) -> None:
        self.at = start
        self.start = start
        self.end: int | None = None
        self.bad = False
        self.values: dict[str, tuple[int, int | None]] = {}
        self._stack: list[str] = []
        self._state = "open"
        self._string: int | None = None  # where the string begins that is being read
        self._key = ""

    def advance(self, text: str) -> None:
        """Read on. text: the same as before, and longer."""
        while self.end is None and not self.bad and self._step(text):
            pass

    def _step(self, text: str) -> bool:
        """Read a part; False if there is too little of it."""
        if self._string is not None:
            return self._read_string(text)
        match = _SPACE.match(text, self.at)
        at = match.end() if match and self._state != "open" else self.at
        self.at = at
        if at == len(text):
            return False
        character, state = text[at], self._state
        if state == "open" and character == "{":
            return self._enter(character)
        if state in ("key", "first key") and character == '"':
            self._string = at
            self.at += 1
            return True
        if state == "colon" and character == ":":
            self._state, self.at = "value", at + 1
            return True
        if state == "comma" and character == ",":
            self._state, self.at = "key" if self._stack[-1] == "{" else "value", at + 1
            return True
        if character == "}" and state in ("comma", "first key") and self._stack[-1] == "{":
            return self._leave()
        if character == "]" and state in ("comma", "first value") and self._stack[-1] == "[":
            return self._leave()
        if state in ("value", "first value"):
            return self._read_value(text, character)
        self.bad = True
        return False

    def _read_value(self, text: str, character: str) -> bool:
        if len(self._stack) == 1 and self._stack[0] == "{" and self._key not in self.values:
            self.values[self._key] = (self.at, None)
        if character in "{[":
            return self._enter(character)
        if character == '"':
            self._string = self.at
            self.at += 1
            return True
        match = _WORD.match(text, self.at)
        end = match.end() if match else self.at
        if end == len(text):
            return False  # a number may go on
        if not _SCALAR.fullmatch(text, self.at, end):
            self.bad = True
            return False
        self._finish_value(end)
        return True

    def _read_string(self, text: str) -> bool:
        match = _PLAIN.match(text, self.at)
        self.at = match.end() if match else self.at
        if self.at == len(text):
            return False
        if text[self.at] == '"':
            start, end = self._string, self.at + 1
            assert start is not None
            self._string = None
            if self._state in ("key", "first key"):
                self._key = text[start:end] if len(self._stack) == 1 else self._key
                self._state, self.at = "colon", end
            else:
                self._finish_value(end)
            return True
        escape = _ESCAPE.match(text, self.at)
        if escape:
            self.at = escape.end()
            return True
        self.bad = not _ESCAPE_BEGUN.fullmatch(text, self.at)
        return False

    def _enter(self, character: str) -> bool:
        if len(self._stack) == _MAX_DEPTH:
            self.bad = True
            return False
        self._stack.append(character)
        self._state = "first key" if character == "{" else "first value"
        self.at += 1
        return True

    def _leave(self) -> bool:
        self._stack.pop()
        self._finish_value(self.at + 1)
        return True

    def _finish_value(self, end: int) -> None:
        self._state, self.at = "comma", end
        if not self._stack:
            self.end = end
        elif len(self._stack) == 1 and self._stack[0] == "{":
            start, before = self.values[self._key]
            if before is None:
                self.values[self._key] = (start, end)

"""What both kinds of readers of an answer know of text."""

__all__ = ["WHITE", "overlap"]

WHITE = " \t\r\n"


def overlap(text: str, mark: str) -> int:
    """How much of the text's end may be the beginning of the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)

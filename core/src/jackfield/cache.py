"""The folder of what was made once and is read from then on: tiny models, conversions of engines."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["cache_folder", "made_once"]


def cache_folder() -> Path:
    """Where what was made once is kept: `$JACKFIELD_CACHE`, else `jackfield` in the user's cache."""
    own = os.environ.get("JACKFIELD_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jackfield"


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder that `write` fills if it is not there; returns it.

    `write` is given an empty folder beside it, which takes its name when all is written. So one that is there is whole, whoever was killed
    while he wrote, and of two processes at once one's is kept. Raises: what `write` raises; OSError where nothing can be written.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
        try:
            write(made)
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder

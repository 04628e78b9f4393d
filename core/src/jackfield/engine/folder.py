"""Reading the files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jackfield.client import ModelSpec
from jackfield.errors import ModelError

__all__ = ["read_json"]


def read_json(spec: ModelSpec, path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file. Raises: ModelError for one that cannot be read."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"model {spec.id!r}: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"model {spec.id!r}: {path} holds no JSON object")
    return content

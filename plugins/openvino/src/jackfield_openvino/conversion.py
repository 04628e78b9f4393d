"""Converts a model into OpenVINO's format once, into jackfield's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from jackfield import ModelError, cache_folder, made_once
from jackfield.engine.backends import BackendModel
from jackfield_openvino.quiet import openvino

__all__ = ["conversion_of", "converted"]

log = logging.getLogger("jackfield.openvino")

# What decides the numbers of a conversion beside the model's own files.
DISTRIBUTIONS = ("jackfield", "jackfield-openvino", "openvino", "torch", "transformers")
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
FILE = "model.xml"


def converted(model: BackendModel) -> Path:
    """The converted model's file, made now if the cache does not have it. Weights stay in float32, which any precision is made of.

    Raises: ModelError when the model cannot be converted.
    """
    folder = conversion_of(model)
    if not folder.is_dir():
        log.info("model %s: converting it for OpenVINO, once, into %s", model.spec.id, folder)
    try:
        made_once(folder, lambda made: _convert(model, made / FILE))
    except Exception as error:  # OpenVINO's and torch's tracing raise anything
        raise ModelError(
            f"model {model.spec.id!r}: OpenVINO cannot convert {model.card.architecture} ({_first_line(error)}); "
            f'engine = "torch" in [models.{model.spec.id}] runs it'
        ) from error
    return folder / FILE


def conversion_of(model: BackendModel) -> Path:
    """The folder in the cache. Its name is a digest of what the conversion is made of: files, by their size and time, and releases."""
    files = sorted({path for pattern in ("config.json", *WEIGHTS) for path in model.folder.glob(pattern)})
    made_of = {
        "folder": str(model.folder.resolve()),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "inputs": model.forward.inputs,
        "releases": {name: version(name) for name in DISTRIBUTIONS},
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "openvino" / f"{model.card.architecture}-{digest[:20]}"


def _convert(model: BackendModel, path: Path) -> None:
    with warnings.catch_warnings(), _logging_kept():
        warnings.simplefilter("ignore")  # of tracing: whether the trace is right, the engine's trial finds out
        made = openvino.convert_model(model.forward, example_input=model.forward.example())
    names = {name for port in made.inputs for name in port.names}
    missing = [name for name in model.forward.inputs if name not in names]
    if missing:
        raise ValueError(f"the conversion has lost the input {missing[0]}")
    openvino.save_model(made, path, compress_to_fp16=False)


@contextmanager
def _logging_kept() -> Iterator[None]:
    """OpenVINO makes the root logger tell errors alone while it converts, and leaves it so when it fails."""
    root = logging.getLogger()
    level, filters, handlers = root.level, root.filters[:], root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.filters[:], root.handlers[:] = filters, handlers


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"

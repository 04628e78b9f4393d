"""GGUF files, converted once into a transformers folder that is kept in the cache: the torch-free side.

The work is done by a process of its own (`jackfield.engine.gguf`), so that the HTTP process, which waits for it, never imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from os import environ
from pathlib import Path

import msgspec
from msgspec import Struct

from jackfield.cache import cache_folder
from jackfield.client import Progress
from jackfield.engine.cpu import has_fast_bfloat16
from jackfield.errors import ModelError

__all__ = ["CONVERTER", "Percent", "Refused", "Reports", "converted", "run_dtype"]

# Raised when what is written changes; folders of older numbers are left alone and no longer read.
CONVERTER = 1
MAGIC = b"GGUF"
# What of a file makes its identity: its size, its head (which holds all metadata: 2 to 8 MB), and samples of the rest.
HEAD_BYTES = 16 << 20
NUM_SAMPLES, SAMPLE_BYTES = 64, 64 << 10
# A folder that nobody has touched for so long belongs to a conversion that was killed.
ABANDONED_S = 24 * 3600.0
# What transformers asks for before it opens such a file.
NEEDED = ("gguf", "accelerate")


class Percent(Struct, frozen=True, tag=True):
    """How much is done."""

    done: int


class Refused(Struct, frozen=True, tag=True):
    """Why there will be no folder."""

    message: str


# What the converting process says on its standard output, a line of JSON each.
Reports = Percent | Refused

_decoder: msgspec.json.Decoder[Reports] = msgspec.json.Decoder(Reports)


def converted(model: str, path: str, *, dtype: str, device: str, progress: Callable[[Progress], None]) -> str:
    """The folder of a GGUF file; made now if it is not in the cache.

    model: its id, for errors. dtype, device: as its table has them; the weights are written in the numbers in which they will run.
    Raises: ModelError when the file is none, cannot be read or converted, or the cache cannot be written.
    """
    file = Path(path)
    try:
        identity, size = _identity(file)
    except OSError as error:
        raise ModelError(f"model {model!r}: {file} cannot be read: {error.strerror}") from error
    if not identity:
        raise ModelError(f"model {model!r}: {file} ({size} bytes) is no GGUF file: it does not begin with {MAGIC.decode()!r}")
    numbers = run_dtype(dtype, device)
    folder = cache_folder() / "gguf" / f"{file.stem}-{identity}-{numbers}-{CONVERTER}"
    if folder.is_dir():
        return str(folder)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"model {model!r}: {file} is a GGUF file, and transformers reads those with the packages {' and '.join(NEEDED)}, of which "
            f"{' and '.join(missing)} is missing (pip install {' '.join(missing)})"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
    except OSError as error:
        raise ModelError(f"model {model!r}: {file} cannot be converted: the cache {folder.parent} cannot be written: {error}") from error
    started = time.monotonic()
    what = f"converting {file.name} ({size / 1e6:.0f} MB) for model {model}, once"
    progress(Progress(model=model, what=what, total=100))
    _run(model, file, folder, numbers, lambda done: progress(Progress(model=model, what=what, done=done, total=100)))
    made = sum(part.stat().st_size for part in folder.iterdir())
    took = time.monotonic() - started
    progress(Progress(model=model, what=f"converted {file.name} for model {model} in {took:.1f} s: {folder} ({made / 1e6:.0f} MB)"))
    return str(folder)


def run_dtype(dtype: str, device: str) -> str:
    """In which numbers a quantised model runs, as the loader will decide it: `auto` is bfloat16 where the device is good at it."""
    if dtype != "auto":
        return dtype
    on_gpu = device.startswith("cuda") or (device == "auto" and _has_gpu())
    return "bfloat16" if on_gpu or has_fast_bfloat16() else "float32"


def _has_gpu() -> bool:
    """Whether torch will see a GPU, told without torch. A wrong yes costs a cast at load, and weights rounded to bfloat16."""
    try:
        built_for_cpu = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not built_for_cpu and not hidden and (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists())


def _identity(file: Path) -> tuple[str, int]:
    """Of the content, and its size in bytes; empty for what is no GGUF file.

    The same file copied or installed again is the same. Time of change is left out for that; a whole hash of 5 GB would take as long as
    the second start should. What tools change lies in the head (metadata) or is whole layers, which the samples meet.
    """
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as data:
        head = data.read(HEAD_BYTES)
        found.update(head)
        step = max((size - HEAD_BYTES) // NUM_SAMPLES, SAMPLE_BYTES)
        for begin in range(HEAD_BYTES, size - SAMPLE_BYTES, step):
            data.seek(begin)
            found.update(data.read(SAMPLE_BYTES))
        data.seek(max(0, size - SAMPLE_BYTES))
        found.update(data.read(SAMPLE_BYTES))
    return found.hexdigest()[:16] if head.startswith(MAGIC) else "", size


def _run(model: str, file: Path, folder: Path, dtype: str, report: Callable[[int], None]) -> None:
    """Start the process and follow it to its end. Raises: ModelError."""
    command = [sys.executable, "-m", "jackfield.engine.gguf", str(file), str(folder), dtype]
    refused = ""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:  # noqa: S603  (ourselves)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said = _decoder.decode(line)
                if isinstance(said, Refused):
                    refused = said.message
                else:
                    report(said.done)
        except BaseException:
            process.terminate()  # it removes what it has begun
            raise
    if refused:
        raise ModelError(f"model {model!r}: {file} cannot be converted: {refused}")
    if process.returncode or not folder.is_dir():
        why = "killed by the system, which may be out of memory" if process.returncode == -9 else f"exit code {process.returncode}"
        raise ModelError(f"model {model!r}: {file} cannot be converted: the converting process ended ({why})")


def _sweep(parent: Path) -> None:
    """Remove what conversions have left that were killed, with no chance to do it."""
    for part in parent.glob(".part-*"):
        try:
            old = time.time() - max(path.stat().st_mtime for path in (part, *part.iterdir())) > ABANDONED_S
        except OSError:
            continue  # another process was first
        if old:
            shutil.rmtree(part, ignore_errors=True)

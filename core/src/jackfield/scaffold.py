"""`jackfield new`: a package for a plugin, made of the templates beside this module."""

from __future__ import annotations

import json
import keyword
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from msgspec import Struct

from jackfield.errors import ConfigError
from jackfield.hookspecs import PLUGIN_API
from jackfield.plugins import installed_plugins
from jackfield.tiny import tiny_model

__all__ = ["KINDS", "make_package"]


class Kind(Struct, frozen=True, kw_only=True):
    """A kind of plugin.

    summary: of the package, until its author has a better one. target: its entry point, after the package's name. example: of its
    endpoint's route, None for a kind without one.
    """

    summary: str
    target: str = ""
    example: dict[str, Any] | None = None

    @property
    def has_endpoint(self) -> bool:
        """Whether it brings a route, which the contract can be run over."""
        return self.example is not None


KINDS = {
    "pooling": Kind(summary="For each text the one that is nearest to it.", example={"texts": ["a cat", "a dog", "a kitten"]}),
    "head": Kind(summary="What a head of its own computes of texts.", example={"input": ["a cat", "a dog"]}),
    "generation": Kind(summary="A text that a model writes of a text.", example={"text": "The cat sat on the mat.", "max_tokens": 16}),
    "cross-cutting": Kind(summary="Around every endpoint of a server.", target=":{title}Plugin"),
    "model-source": Kind(summary="A place where models come from.", target=":{title}Source"),
}
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def make_package(name: str, kind: str, folder: Path) -> list[Path]:
    """Write a package into a folder that is not there, or empty; returns its files.

    Raises: ConfigError for a name that cannot be one, or is taken, and for a folder that holds something.
    """
    _check(name, folder)
    chosen = KINDS[kind]
    context = _context(name, kind, chosen)
    environment = Environment(  # noqa: S701  (what it writes is no HTML)
        loader=PackageLoader("jackfield", "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made: list[Path] = []
    for template in environment.list_templates():
        part, _, path = template.partition("/")
        if part not in ("common", kind):
            continue
        target = folder / environment.from_string(path.removesuffix(".j2")).render(context)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(environment.get_template(template).render(context), encoding="utf-8")
        made.append(target)
    if kind == "model-source":
        shutil.copytree(tiny_model("bert"), folder / "models" / "tiny")
    return made


def _check(name: str, folder: Path) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} can be no plugin's name: lower-case letters and digits, in words joined by _, as in my_endpoint.")
    taken = next((point for point in installed_plugins() if point.name == name), None)
    if taken is not None:
        raise ConfigError(f"{name!r} is the name of an installed plugin ({taken.dist.name if taken.dist else 'unknown'}); take another.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and not empty.")


def _context(name: str, kind: str, chosen: Kind) -> dict[str, Any]:
    title = "".join(word.capitalize() for word in name.split("_"))
    package = f"jackfield_{name}"
    major, minor = version("jackfield").split(".")[:2]
    return {
        "name": name,
        "title": title,
        "package": package,
        "dist": package.replace("_", "-"),
        "kind": kind,
        "has_endpoint": chosen.has_endpoint,
        "table": f"{'endpoints' if chosen.has_endpoint else 'plugins'}.{name}",
        "target": package + chosen.target.format(title=title),
        "summary": chosen.summary,
        "example": json.dumps(chosen.example),
        "example_literal": repr(chosen.example).replace("'", '"'),
        "api": PLUGIN_API,
        "minor": f"{major}.{minor}",
        "next_minor": f"{major}.{int(minor) + 1}" if major == "0" else str(int(major) + 1),
    }

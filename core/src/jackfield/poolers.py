"""Poolers that plugins bring: the operation that one adds, where its code is, and which models it fits.

The code itself is imported by the engine's process alone, so that the HTTP process stays without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from jackfield.client import ModelCard
from jackfield.params import OPERATIONS

__all__ = ["Fits", "PoolerEntry", "PoolerRegistry"]

Fits = Callable[[ModelCard, Mapping[str, Any]], bool]

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class PoolerEntry(Struct, frozen=True, kw_only=True):
    """An operation, what computes it, and the models that can."""

    operation: str
    factory: str
    fits: Fits


class PoolerRegistry:
    """Handed to `jackfield_poolers`; collects what plugins add."""

    def __init__(self) -> None:
        self._entries: dict[str, PoolerEntry] = {}

    def add(self, operation: str, factory: str, *, fits: Fits) -> None:
        """Add an operation.

        operation: a new name, which the plugin's endpoint puts into its `operations`. factory: `package.module:name` of a callable that
        takes a `jackfield.engine.poolers.LoadedModel` and returns a `jackfield.engine.poolers.Pooler`. fits: told a model's card and its
        config.json, whether the model can do it; called once a model, at start-up, in the HTTP process.

        Raises: ValueError for a name that is taken or none, or a factory of another form; TypeError for a `fits` that cannot be called.
        """
        if not operation.isidentifier():
            raise ValueError(f"the operation {operation!r} is no identifier")
        if operation in OPERATIONS or operation in self._entries:
            raise ValueError(f"the operation {operation!r} is there already; a pooler of a plugin's has a name of its own")
        if not _FACTORY.fullmatch(factory):
            raise ValueError(f"the factory {factory!r} of {operation!r} is not of the form package.module:name")
        if not callable(fits):
            raise TypeError(f"the `fits` of {operation!r} is {type(fits).__name__}, no function of a card and a configuration")
        self._entries[operation] = PoolerEntry(operation=operation, factory=factory, fits=fits)

    @property
    def entries(self) -> tuple[PoolerEntry, ...]:
        """In the order in which they were added."""
        return tuple(self._entries.values())

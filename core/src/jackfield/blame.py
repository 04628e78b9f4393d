"""Whose code it was: the plugin that an exception comes from, or that a logger belongs to, told by module names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from jackfield.stages import WrongResult

__all__ = ["CORE", "Blame"]

# What is no plugin's.
CORE = "core"


class Blame:
    """Knows the modules of all loaded plugins. Where two plugins share a package, a module of neither is taken for the first one's."""

    def __init__(self, plugins: Iterable[tuple[str, Any]]) -> None:
        """plugins: names and objects: modules, or objects of classes."""
        self._owners: dict[str, str] = {}
        for name, plugin in sorted(plugins, key=lambda item: item[0]):
            module = str(getattr(plugin, "__name__", type(plugin).__module__))
            self._owners[module] = name
            self._owners.setdefault(module.partition(".")[0], name)
        self._owners.pop("jackfield", None)

    def of(self, error: BaseException) -> str:
        """The plugin whose code raised it, the innermost one of those it went through; CORE for none."""
        if isinstance(error, WrongResult):
            return "+".join(error.plugins)
        if error.__cause__ is not None:
            found = self.of(error.__cause__)
            if found != CORE:
                return found
        owners = [self.owner(module) for module in _modules(error.__traceback__)]
        return next((owner for owner in reversed(owners) if owner != CORE), CORE)

    def owner(self, module: str) -> str:
        """The plugin of a module, or of a logger that is named after one; CORE for none."""
        return self._owners.get(module) or self._owners.get(module.partition(".")[0], CORE)


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """Of the calls that an exception went through, outermost first."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next

"""Jackfield's own engine, for the application and for plugins that bring another forward pass. Torch-free in the mode `process`."""

from __future__ import annotations

from jackfield.client import EngineClient, ModelSpec
from jackfield.engine.process import EngineProcess
from jackfield.settings import EngineSettings

__all__ = ["local_engine"]


def local_engine(specs: list[ModelSpec], settings: EngineSettings, *, log_level: str = "info", backend: str = "") -> EngineClient:
    """The engine in a process of its own, or in this one's threads, as `[engine] mode` says.

    specs: its models; the list may grow until the engine is started. backend: `package.module:factory` of another forward pass
    (`jackfield.engine.backends`), imported where the engine runs; empty: torch.
    """
    if settings.mode == "process":
        return EngineProcess(specs, settings, log_level=log_level, backend=backend)
    from jackfield.engine.thread import EngineThread  # noqa: PLC0415  (imports torch, which the HTTP process goes without)

    return EngineThread(specs, settings, backend=backend)

"""Offers the engine. The server's process imports this and neither OpenVINO nor torch: the backend is the engine process' matter."""

from __future__ import annotations

from jackfield import EngineClient, EngineSettings, ModelSpec, hookimpl
from jackfield.engine import local_engine

__all__ = ["OpenVinoPlugin"]

NAME = "openvino"
BACKEND = "jackfield_openvino.backend:load"


class OpenVinoPlugin:
    """One engine for all models that ask for it by name, so that they share a scheduler and its threads."""

    def __init__(self) -> None:
        self._specs: list[ModelSpec] = []
        self._engine: EngineClient | None = None

    @hookimpl
    def jackfield_engine(self, spec: ModelSpec, settings: EngineSettings, log_level: str) -> EngineClient | None:
        """Take a model whose table says `engine = "openvino"`, and no other."""
        if spec.engine != NAME:
            return None
        self._specs.append(spec)
        if self._engine is None:
            self._engine = local_engine(self._specs, settings, log_level=log_level, backend=BACKEND)
        return self._engine

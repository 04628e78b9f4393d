"""The engine: models in, one step at a time, on a device. Knows nothing of HTTP or hooks; only `client` and the words above it."""

from jackfield.engine.local import local_engine

__all__ = ["local_engine"]

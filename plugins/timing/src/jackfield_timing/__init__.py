"""Server-Timing for jackfield: where the time of a request went, in a header of its answer."""

from jackfield_timing.plugin import TimingPlugin, TimingSettings

__all__ = ["TimingPlugin", "TimingSettings"]

PLUGIN_API = 1

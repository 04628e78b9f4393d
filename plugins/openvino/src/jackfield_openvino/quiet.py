"""OpenVINO without its telemetry. Of itself it reports every import and conversion over the network (openvino-telemetry, on unless its
`opt_in_out --opt_out` was run); where that package cannot be imported it takes a stub of its own, so that is what is arranged here."""

from __future__ import annotations

import sys

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

import openvino  # noqa: E402

__all__ = ["openvino"]

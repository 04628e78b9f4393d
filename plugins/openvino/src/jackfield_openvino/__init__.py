"""An engine for jackfield: encoder models through OpenVINO, for `engine = "openvino"` in a model's table."""

from jackfield_openvino.plugin import OpenVinoPlugin

__all__ = ["OpenVinoPlugin"]

PLUGIN_API = 1

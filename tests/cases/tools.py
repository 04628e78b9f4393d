"""Family D, tools: calls in streams, by an engine that says what the cases have a model say."""

from __future__ import annotations

from pathlib import Path

from tests.cases.bench import CASES, case, steps
from tests.chat_families import TEMPLATES, deltas, flat, serve_families

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


@case("D17")
def streamed_calls(tmp_path: Path) -> None:
    """By the way for templates that know no tools, and by the model's own."""
    body = dict(steps("D17")[0]["body"])
    assert CALL.replace("\n", "\\n") in CASES["D17"]["request"]["setup"]
    assert body.pop("model") == "smollm2"
    assert body.pop("stream")
    with serve_families(tmp_path, {name: TEMPLATES[name] for name in ("plain", "hermes")}) as families:
        for model in ("plain", "hermes"):
            for text, count in ((CALL, 1), (f"{CALL}\n{CALL}", 2)):
                families.will_say(text)
                whole = flat(families.choice(model, **body))
                assert whole == {
                    "content": "",
                    "reasoning": "",
                    "calls": [("add", '{"a": 2, "b": 2}')] * count,
                    "finish_reason": "tool_calls",
                }
                for pieces in deltas(text):
                    families.will_say(*pieces)
                    assert families.stream(model, **body) == whole, pieces

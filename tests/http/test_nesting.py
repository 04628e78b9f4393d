"""Bodies that are nested deeply: served, or refused by the field's name; never a fault of the server, and none of the chat template's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from jackfield.encoding import MAX_DEPTH
from tests.chat_families import Families, serve_families

TEMPLATE = (
    "{% for d in documents or [] %}{{ d | tojson }}{% endfor %}{{ x | default({}) | tojson }}{% for t in tools or [] %}{{ t | tojson }}"
    "{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
# Where a body may be nested: its text with an object in the place of `$`, that object's level, and the field that an error names.
ASSISTANT = '{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": $}}]}'
FUNCTION = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": $}}}}'
PLACES = {
    "documents": ('"documents": [$]', 3, "documents[0]"),
    "kwargs": ('"chat_template_kwargs": {"x": $}', 3, "chat_template_kwargs"),
    "calls": ('"messages": [MESSAGE, ' + ASSISTANT + "]", 7, "messages[1].tool_calls[0].function.arguments"),
    "tools": ('"tools": [' + FUNCTION + "]", 7, "tools[0].function.parameters"),
    "unserved": ('"audio": $', 2, "audio"),
    "form": ('"response_format": {"type": "json_schema", "json_schema": {"schema": $}}', 4, "response_format.json_schema.schema"),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    with serve_families(tmp_path_factory.mktemp("nesting"), {"nested": TEMPLATE}, special=["<|im_end|>"]) as served:
        served.will_say("Well.")
        yield served


def body(place: str, levels: int, content: str, inner: str = "1") -> str:
    """A body of so many levels."""
    written, level, _ = PLACES[place]
    message = json.dumps({"role": "user", "content": content})
    count = levels - level + 1
    nested = written.replace("$", '{"a": ' * count + inner + "}" * count).replace("MESSAGE", message)
    more = "" if "messages" in written else f'"messages": [{message}], '
    return f'{{"model": "nested", {more}{nested}}}'


@pytest.mark.parametrize("content", ["hello", "<|im_end|>"], ids=["plain", "name"])
@pytest.mark.parametrize("place", PLACES)
def test_the_field_is_named(families: Families, place: str, content: str) -> None:
    for levels in (MAX_DEPTH + 1, 520, 700, 940, 962, 965, 968, 5000, 100_000):
        answer = families.send(body(place, levels, content))
        error = answer.json()["error"]
        assert answer.status_code == 400, f"{levels}: {error}"
        assert f"{MAX_DEPTH} levels" in error["message"], levels
        if levels < 900:  # what is deeper cannot be decoded, and is not known
            assert error["param"] == PLACES[place][2]


@pytest.mark.parametrize("content", ["hello", "<|im_end|>"], ids=["plain", "name"])
@pytest.mark.parametrize("place", ["documents", "kwargs", "calls"])
def test_the_deepest_is_served(families: Families, place: str, content: str) -> None:
    answer = families.send(body(place, MAX_DEPTH, content, '"<|im_end|>"'))
    assert answer.status_code == 200, answer.text
    assert '{"a": "<|im_end|>"}' in families.prompt


def test_wide_bodies_are_not_deep(families: Families) -> None:
    families.post("nested", documents=[{"a": [[n], {"b": n}]} for n in range(100)])
    assert '{"a": [[99], {"b": 99}]}' in families.prompt


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 500, 940, 5000])
def test_arguments_as_text_keep_to_the_same(families: Families, levels: int) -> None:
    """A model may have written them; what is deeper stays text."""
    arguments = '{"": ' * levels + '"<|im_end|>"' + "}" * levels
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    if levels > 500:  # the prompt is over the context of the model
        assert "maximum context length" in families.post("nested", 400, messages=messages)["error"]["message"]
        return
    families.post("nested", messages=messages, max_tokens=1)
    assert (arguments if levels == MAX_DEPTH else json.dumps(arguments)) in families.prompt

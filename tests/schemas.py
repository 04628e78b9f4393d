"""JSON schemas by chance, over the keywords that grammars keep to; what matches one is short."""

from __future__ import annotations

from random import Random
from typing import Any

__all__ = ["schema_of"]

WORDS = ("name", "age", "city", "tags", "ok", "größe", "a b", 'q"uote', "ratio")
# With texts of a known, small length.
FORMATS = ("date", "uuid", "ipv4", "time")
PATTERNS = ("^[a-c]{1,3}$", "^(ab|cd)?x$", "^[0-9]{2}-[0-9]{2}$", "^\\w{1,4}$")


def schema_of(seed: int) -> dict[str, Any]:
    """The same for the same number."""
    random = Random(seed)
    schema = _schema(random, depth=0)
    if random.random() < 0.15:
        schema = {"$ref": "#/$defs/node", "$defs": {"node": schema}}
    return schema


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _choice, _constant, _simple]
    if depth < 3:
        kinds += [_object, _object, _array, _either, _several, _both]
    if depth == 0:
        kinds = [_object, _object, _object, _array, _either]
    return random.choice(kinds)(random, depth + 1)


def _string(random: Random, depth: int) -> dict[str, Any]:
    form = random.randrange(3)
    if form == 0:
        return {"type": "string", "pattern": random.choice(PATTERNS)}
    if form == 1:
        return {"type": "string", "format": random.choice(FORMATS)}
    least = random.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randrange(6)}


def _integer(random: Random, depth: int) -> dict[str, Any]:
    least = random.randrange(-200, 200)
    bounds: dict[str, Any] = {"minimum": least, "maximum": least + random.randrange(1, 300)}
    if random.random() < 0.3:
        bounds = {"exclusiveMinimum": least, "exclusiveMaximum": least + random.randrange(2, 300)}
    if random.random() < 0.2:
        bounds = {"minimum": 0, "maximum": 1000, "multipleOf": random.choice((2, 5, 10))}
    return {"type": "integer", **bounds}


def _number(random: Random, depth: int) -> dict[str, Any]:
    least = random.randrange(-20, 20) / 4
    return {"type": "number", "minimum": least, "maximum": least + random.randrange(1, 9) / 2}


def _choice(random: Random, depth: int) -> dict[str, Any]:
    return {"enum": random.sample(["red", "Grün", 3, -1.5, True, None, ["x"], {"k": 1}, 'a"b\\'], random.randrange(1, 5))}


def _constant(random: Random, depth: int) -> dict[str, Any]:
    return {"const": random.choice(["yes", 0, None, [1, 2], {"a": {"b": []}}, "\n\t"])}


def _simple(random: Random, depth: int) -> dict[str, Any]:
    return {"type": random.choice(["boolean", "null", ["boolean", "null"]])}


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(WORDS, random.randrange(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(random, depth) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": False,
    }
    if random.random() < 0.2:
        schema["description"] = "An object."
        schema["title"] = "Thing"
    return schema


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randrange(3)
    if random.random() < 0.3:
        return {"type": "array", "prefixItems": [_schema(random, depth) for _ in range(2)], "items": False, "minItems": 2}
    return {"type": "array", "items": _schema(random, depth), "minItems": least, "maxItems": least + random.randrange(3)}


def _either(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(random, depth) for _ in range(random.randrange(2, 4))]}


def _several(random: Random, depth: int) -> dict[str, Any]:
    return {"oneOf": [{"type": "boolean"}, _string(random, depth)]}


def _both(random: Random, depth: int) -> dict[str, Any]:
    least = random.randrange(10)
    return {"allOf": [{"type": "integer", "minimum": least}, {"maximum": least + 20}]}

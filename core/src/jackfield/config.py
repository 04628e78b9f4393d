"""Reading the configuration: a TOML file, then the environment, then flags, decoded strictly.

    JACKFIELD_SERVER__PORT=9000           [server] port
    JACKFIELD_MODELS__MINILM__DTYPE=...   [models.minilm] dtype; names match without regard to case, `-` and `.` as `_`
    JACKFIELD_API_KEY=...                 one more of [server] api_keys

Whatever is wrong is a ConfigError that names the source, the key, the value, what was expected and, for an unknown key, the nearest known.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from jackfield.errors import ConfigError
from jackfield.settings import Settings

__all__ = ["convert", "literal", "load_settings", "nearest"]

StructT = TypeVar("StructT", bound=msgspec.Struct)

ENV_PREFIX = "JACKFIELD_"
_AT = re.compile(r"^(?P<reason>.*?) - at `(?P<where>key in )?(?P<path>\$[^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]+)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def load_settings(path: Path | None, *, environ: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The effective settings.

    path: the TOML file, or None for defaults alone. environ: variables; those that begin with JACKFIELD_ count. overrides: values by
    dotted key (`server.port`), from flags.

    Raises: ConfigError.
    """
    table: dict[str, Any] = {}
    origin = "the defaults"
    if path is not None:
        origin = str(path)
        table = _read(path)
    for name, value in (environ or {}).items():
        _overlay_variable(table, name, value)
    for key, value in (overrides or {}).items():
        _put(table, key.split("."), value)
    return convert(table, Settings, where=origin)


def convert(table: Mapping[str, Any], kind: type[StructT], *, where: str, prefix: str = "") -> StructT:
    """Decode a table strictly into its struct.

    where: the file or variable it came from; prefix: the table's own dotted name. Raises: ConfigError.
    """
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), table, kind, where, prefix)) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean ...?`, or the list of what is known, or nothing."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(options)}." if options else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file. Give the path of a TOML file, or a model's id or folder.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no valid TOML: {error}.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def _overlay_variable(table: dict[str, Any], name: str, value: str) -> None:
    if name == "JACKFIELD_API_KEY":
        server = table.setdefault("server", {})
        server["api_keys"] = [*server.get("api_keys", []), value]
        return
    if not name.startswith(ENV_PREFIX) or "__" not in name:
        return
    keys: list[str] = []
    node: Any = table
    for segment in name.removeprefix(ENV_PREFIX).lower().split("__"):
        existing = list(node) if isinstance(node, dict) else []
        key = next((k for k in existing if _flat(k) == segment), segment)
        keys.append(key)
        node = node.get(key) if isinstance(node, dict) else None
    if keys[0] not in Settings.__struct_fields__:
        raise ConfigError(f"{name}: [{keys[0]}] is no table of the configuration.{nearest(keys[0], Settings.__struct_fields__)}")
    _put(table, keys, literal(keys, value))


def _flat(key: str) -> str:
    return re.sub(r"[-.]", "_", key.lower())


def literal(keys: list[str], value: str) -> Any:
    """What a text from the environment or a flag means for that key: the text where text is due, else a TOML value, else the text."""
    if _is_text(_type_at(Settings, keys)):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _put(table: dict[str, Any], keys: list[str], value: Any) -> None:
    node = table
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(keys)} cannot be set: {key} is no table.")
    node[keys[-1]] = value


def _unwrap(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _type_at(kind: Any, keys: Iterable[str]) -> Any:
    """The type of a key inside a struct, following dict values and optional arms; None where nothing is known."""
    for key in keys:
        kind = _unwrap(kind)
        if get_origin(kind) in (Union, types.UnionType):
            kind = next((arm for arm in get_args(kind) if isinstance(arm, type) and issubclass(arm, msgspec.Struct)), None)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            kind = get_type_hints(kind, include_extras=True).get(key)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return None
    return kind


def _is_text(kind: Any) -> bool:
    kind = _unwrap(kind)
    return kind is str or (get_origin(kind) is Literal and all(isinstance(arm, str) for arm in get_args(kind)))


def _explain(text: str, table: Mapping[str, Any], kind: type[msgspec.Struct], where: str, prefix: str) -> str:
    match = _AT.match(text)
    reason, path = (match["reason"], match["path"]) if match else (text, "$")
    keys = [key for key in re.split(r"[.\[\]]+", path.removeprefix("$")) if key]
    parent = f"[{'.'.join(filter(None, [prefix, *keys]))}]" if prefix or keys else "the file"
    unknown = _UNKNOWN.search(reason)
    if unknown:
        known = _type_at(kind, keys) if keys else kind
        fields = known.__struct_fields__ if isinstance(known, type) and issubclass(known, msgspec.Struct) else ()
        return f"{where}: {parent} has an unknown key {unknown['name']!r}.{nearest(unknown['name'], fields)}"
    missing = _MISSING.search(reason)
    if missing:
        return f"{where}: {parent} lacks the key {missing['name']!r}, which has no default."
    value: Any = table
    for key in keys:
        value = value[int(key)] if isinstance(value, list) and key.isdigit() else value.get(key) if isinstance(value, Mapping) else None
    name = ".".join(filter(None, [prefix, *keys])) or "the file"
    return f"{where}: {name} = {value!r}: {reason[0].lower()}{reason[1:].replace('`', '')}."

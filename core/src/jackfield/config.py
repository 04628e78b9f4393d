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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from jackfield.errors import ConfigError
from jackfield.settings import ModelSettings, Settings

__all__ = ["Where", "convert", "inside", "literal", "load_settings", "nearest", "read_settings", "split_key"]

StructT = TypeVar("StructT", bound=msgspec.Struct)
# What a table came from (a file, a variable, a flag), or a function that tells it for the keys of a value in it.
Where = str | Callable[[list[str]], str]

ENV_PREFIX = "JACKFIELD_"
API_KEY_VARIABLE = "JACKFIELD_API_KEY"
_AT = re.compile(r"^(?P<reason>.*?) - at `(?P<where>key in )?(?P<path>\$[^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]+)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def load_settings(path: Path | None, *, environ: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The effective settings: `read_settings` without their origins. Raises: ConfigError."""
    return read_settings(path, environ=environ, overrides=overrides)[0]


def read_settings(
    path: Path | None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    model: tuple[str, str] | None = None,
) -> tuple[Settings, Where]:
    """The effective settings, and where each key comes from.

    path: the TOML file, or None for defaults alone. environ: variables; those that begin with JACKFIELD_ count. overrides: values by
    dotted key (`server.port`), from flags. model: id and source of one that is served without a file.

    Raises: ConfigError.
    """
    table: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    if path is not None:
        table = _read(path)
    elif model is not None:
        table = {"models": {model[0]: {"source": model[1]}}}
    for name, value in (environ or {}).items():
        keys = _variable_keys(table, name)
        if keys:
            _put(table, keys, literal(keys, value), name)
            origins[tuple(keys)] = name
    for key, value in (overrides or {}).items():
        keys = split_key(key)
        _put(table, keys, value, f"--set {key}")
        origins[tuple(keys)] = f"the flag for {key}"

    def where(keys: list[str]) -> str:
        found = next((origin for place, origin in origins.items() if place == tuple(keys[: len(place)])), None)
        return found or (str(path) if path is not None else "the defaults")

    for name in ("models", "endpoints", "plugins"):
        _check_tables(table, name, where)
    settings = convert(table, Settings, where=where)
    extra = (environ or {}).get(API_KEY_VARIABLE)
    if extra is not None:
        server = msgspec.structs.replace(settings.server, api_keys=[*settings.server.api_keys, extra])
        settings = msgspec.structs.replace(settings, server=server)
    return settings, where


def split_key(key: str) -> list[str]:
    """The parts of a dotted key; a part with dots of its own stands in double quotes."""
    return [quoted or bare for quoted, bare in re.findall(r'"([^"]+)"|([^."]+)', key)]


def _check_tables(table: Mapping[str, Any], name: str, where: Callable[[list[str]], str]) -> None:
    """Tables of tables one by one, since msgspec does not say which key of a dict is at fault. Raises: ConfigError."""
    entries = table.get(name, {})
    if not isinstance(entries, dict):
        raise ConfigError(f"{where([name])}: {name} = {entries!r}: expected tables, such as [{name}.example].")
    for key, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{where([name, key])}: {name}.{key} = {entry!r}: expected a table, [{name}.{key}].")
        if name == "models":
            convert(entry, ModelSettings, where=inside(where, [name, key]), prefix=f"models.{key}")


def inside(where: Where, outer: list[str]) -> Where:
    """`where` for the keys of an inner table."""
    return where if isinstance(where, str) else lambda keys: where([*outer, *keys])


def convert(table: Mapping[str, Any], kind: type[StructT], *, where: Where, prefix: str = "") -> StructT:
    """Decode a table strictly into its struct. prefix: the table's own dotted name. Raises: ConfigError."""
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


def _variable_keys(table: dict[str, Any], name: str) -> list[str]:
    """The keys that a variable sets; none if it is no overlay. Raises: ConfigError for a table that there is not."""
    if not name.startswith(ENV_PREFIX) or "__" not in name:
        return []
    keys: list[str] = []
    node: Any = table
    for segment in name.removeprefix(ENV_PREFIX).lower().split("__"):
        existing = list(node) if isinstance(node, dict) else []
        key = next((k for k in existing if _flat(k) == segment), segment)
        keys.append(key)
        node = node.get(key) if isinstance(node, dict) else None
    if keys[0] not in Settings.__struct_fields__:
        raise ConfigError(f"{name}: [{keys[0]}] is no table of the configuration.{nearest(keys[0], Settings.__struct_fields__)}")
    return keys


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


def _put(table: dict[str, Any], keys: list[str], value: Any, origin: str) -> None:
    node: Any = table
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{origin}: {'.'.join(keys)} cannot be set: {key} is no table.")
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


def _explain(text: str, table: Mapping[str, Any], kind: type[msgspec.Struct], where: Where, prefix: str) -> str:
    match = _AT.match(text)
    reason, path = (match["reason"], match["path"]) if match else (text, "$")
    keys = [key for key in re.split(r"[.\[\]]+", path.removeprefix("$")) if key]
    source = where if isinstance(where, str) else where(keys)
    parent = f"[{'.'.join(filter(None, [prefix, *keys]))}]" if prefix or keys else "the file"
    unknown = _UNKNOWN.search(reason)
    if unknown:
        known = _type_at(kind, keys) if keys else kind
        fields = known.__struct_fields__ if isinstance(known, type) and issubclass(known, msgspec.Struct) else ()
        return f"{source}: {parent} has an unknown key {unknown['name']!r}.{nearest(unknown['name'], fields)}"
    missing = _MISSING.search(reason)
    if missing:
        return f"{source}: {parent} lacks the key {missing['name']!r}, which has no default."
    value: Any = table
    for key in keys:
        value = value[int(key)] if isinstance(value, list) and key.isdigit() else value.get(key) if isinstance(value, Mapping) else None
    name = ".".join(filter(None, [prefix, *keys])) or "the file"
    choices = _unwrap(_type_at(kind, keys)) if keys else None
    if reason.startswith("Invalid enum value") and get_origin(choices) is Literal:
        reason = f"expected one of {', '.join(map(repr, get_args(choices)))}"
    return f"{source}: {name} = {value!r}: {reason[0].lower()}{reason[1:].replace('`', '')}."

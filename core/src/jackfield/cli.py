"""The command line: serve, check, config, plugins, models.

Only what a command needs is imported when it runs: `--help` and `plugins` must be instant, and the HTTP process must never import torch.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import tomli_w
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from jackfield.config import Where, literal, read_settings, split_key
from jackfield.errors import ConfigError, PluginError, StartupError
from jackfield.logs import FloodGate
from jackfield.plugins import PluginInfo, Plugins, installed_plugins, load_plugins, plugin_tables
from jackfield.settings import Settings

if TYPE_CHECKING:
    from jackfield.app import App
    from jackfield.client import Progress

__all__ = ["main"]

EXIT_CODES = (
    "Exit codes: 0 it went well (for serve: it was told to end, and drained); 1 a bug; 2 wrong usage, configuration, plugin or model."
)

_SECRET = re.compile(r"(^|_)(key|token|secret|password|credentials?|dsn)$", re.IGNORECASE)

_target = click.argument("target", metavar="[CONFIG | MODEL]", required=False)
_set = click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set a key, such as server.port=9000; wins over all else."
)
_json = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(package_name="jackfield", message="jackfield %(version)s")
def cli() -> None:
    """Serve transformer models over HTTP, through endpoints that plug in."""


@cli.command(epilog=EXIT_CODES)
@_target
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 8000 by default, 0 for any free one.")
@click.option("--offline", is_flag=True, help="Make no network call: hub models come from the local cache alone.")
@_set
def serve(target: str | None, host: str | None, port: int | None, offline: bool, assignments: tuple[str, ...]) -> None:
    """Serve a TOML configuration, or a model alone (hub id, folder, .gguf file, package:...) through every installed endpoint that fits."""
    flags = {
        key: value
        for key, value in (("server.host", host), ("server.port", port), ("server.offline", offline or None))
        if value is not None
    }
    given = _read(target, {**flags, **_assignments(assignments)})
    gate = _logging(given.settings)
    app = _app(given)
    app.watch_log(gate)
    from jackfield.serve import serve as run  # noqa: PLC0415

    sys.exit(run(app))


@cli.command(epilog=EXIT_CODES)
@_target
@_set
@_json
def check(target: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Try everything but the weights: the configuration, the plugins, the models' files, the routes."""
    given = _read(target, _assignments(assignments))
    app = _app(given)
    app.asgi  # noqa: B018  (builds the routes and their document)
    names = sorted(app.plugins.endpoints)
    known = sorted(given.settings.models)
    if as_json:
        click.echo(msgspec.json.encode({"ok": True, "models": known, "endpoints": names}).decode())
    else:
        click.echo(f"ok: {len(known)} models ({', '.join(known)}), endpoints {', '.join(names)}")


@cli.command(name="config", epilog=EXIT_CODES)
@_target
@_set
@_json
def show_config(target: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Print the effective configuration, defaults included; keys are hidden."""
    given = _read(target, _assignments(assignments))
    plugins = _plugins(given)
    table: dict[str, Any] = msgspec.to_builtins(given.settings)
    table["endpoints"] = {name: msgspec.to_builtins(loaded.settings) for name, loaded in sorted(plugins.endpoints.items())}
    table = _masked(table)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(table)).decode())
    else:
        click.echo(tomli_w.dumps(_without_none(table)).rstrip())


@cli.command(epilog=EXIT_CODES)
@_target
@_json
def plugins(target: str | None, as_json: bool) -> None:
    """List installed plugins with version, state and reason; with a CONFIG, what becomes of each."""
    if target is None:
        rows = [
            PluginInfo(
                name=point.name,
                distribution=point.dist.name if point.dist else "unknown",
                version=point.dist.version if point.dist else "0",
                state="not configured",
            )
            for point in installed_plugins()
        ]
    else:
        rows = _plugins(_read(target, {})).infos
    _show(rows, ("name", "distribution", "version", "state", "reason"), as_json)


@cli.command(epilog=EXIT_CODES)
@_target
@_set
@_json
def models(target: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """List the configured models with what their files say: length, operations, size of vectors, endpoints."""
    entries = _app(_read(target, _assignments(assignments))).model_entries()
    _show(entries, ("id", "root", "max_model_len", "embedding_size", "operations", "endpoints", "aliases"), as_json)


@cli.command(epilog=EXIT_CODES)
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(["pooling", "head", "generation", "cross-cutting", "model-source"]),
    default="pooling",
    help="pooling: an endpoint that computes vectors; head: an endpoint with a head of its own in the engine; generation: an endpoint that "
    "generates and streams; cross-cutting: around every endpoint; model-source: where models come from.",
)
@click.option("--into", type=click.Path(path_type=Path), help="The folder to make; jackfield-NAME here by default.")
def new(name: str, kind: str, into: Path | None) -> None:
    """Make a package for a plugin: code, settings, tests, README and a CI file, all of which work at once."""
    from jackfield.scaffold import KINDS, make_package  # noqa: PLC0415

    folder = into or Path(f"jackfield-{name.replace('_', '-')}")
    files = make_package(name, kind, folder)
    click.echo(f"{folder}: {len(files)} files. Next:\n")
    check = f" --jackfield-conformance={name}" if KINDS[kind].has_endpoint else ""
    for line in (f"cd {folder}", "pip install -e . --group dev", f"pytest{check}", "jackfield serve"):
        click.echo(f"    {line}")


class _Given(msgspec.Struct, frozen=True):
    """What the command line named. from_file: a configuration; else a model alone, which every installed endpoint serves that fits."""

    settings: Settings
    where: Where
    from_file: bool


def _read(target: str | None, overrides: dict[str, Any]) -> _Given:
    from jackfield.sources import looks_like_model  # noqa: PLC0415

    if target is None:
        target = "jackfield.toml"
        if not Path(target).is_file():
            raise ConfigError("Give the path of a TOML file, or a model's id or folder (there is no jackfield.toml here).")
    is_model = looks_like_model(target)
    settings, where = read_settings(
        None if is_model else Path(target),
        environ=os.environ,
        overrides=overrides,
        model=(_model_name(target), target) if is_model else None,
    )
    return _Given(settings, where, from_file=not is_model)


def _plugins(given: _Given) -> Plugins:
    """What becomes of each plugin; one that fails is listed and stops nothing."""
    settings = given.settings
    tables = plugin_tables(settings)
    return load_plugins(settings.endpoints, tables, on_error="skip", all_endpoints=not given.from_file, where=given.where)


def _model_name(target: str) -> str:
    """A hub id keeps its name; a path is called by its last part."""
    is_path = target.startswith(("package:", "/", ".", "~")) or Path(target).exists()
    return Path(target).expanduser().resolve().name if is_path and not target.startswith("package:") else target.removeprefix("package:")


def _assignments(pairs: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or "." not in key:
            raise ConfigError(f"--set {pair}: KEY=VALUE is expected, with a dotted key such as server.port=9000.")
        values[key] = literal(split_key(key), value)
    return values


def _app(given: _Given) -> App:
    """The application; transformers is imported with torch hidden from it, before anything else can."""
    settings = given.settings
    if settings.server.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, here and in the engine's process
    if settings.engine.mode == "process":
        from jackfield.tokenization import hide_torch  # noqa: PLC0415

        with hide_torch():
            from jackfield.app import App  # noqa: PLC0415
    else:
        from jackfield.app import App  # noqa: PLC0415
    return App(settings, where=given.where, all_endpoints=not given.from_file, background=True, progress=_Steps())


class _Steps:
    """Shows on standard error what takes long before there is a server: on a terminal in one line, elsewhere a line every 25 percent."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._last = -1

    def __call__(self, step: Progress) -> None:
        percent = 100 * step.done // step.total if step.total else 100
        text = step.what if not step.total else f"{step.what}: {percent} %"
        if self._console.is_terminal:
            self._console.print(text, end="\r" if step.total else "\n", highlight=False, soft_wrap=True)
        elif not step.total or percent // 25 != self._last:
            self._console.print(text, highlight=False, soft_wrap=True)
        self._last = percent // 25


def _logging(settings: Settings) -> FloodGate:
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    gate = FloodGate(
        settings.server.max_log_lines_per_s, hint=" and counted in jackfield_log_lines_dropped_total ([server] max_log_lines_per_s)"
    )
    handler.addFilter(gate)
    logging.basicConfig(level=settings.server.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return gate


def _show(rows: list[Any], columns: tuple[str, ...], as_json: bool) -> None:
    """A table on a terminal, tab-separated text elsewhere, JSON on request."""
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    cells = [[_cell(getattr(row, column)) for column in columns] for row in rows]
    if sys.stdout.isatty():
        table = Table(*columns)
        for line in cells:
            table.add_row(*line)
        Console().print(table)
    else:
        for line in [list(columns), *cells]:
            click.echo("\t".join(line))


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _masked(table: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Without what would give access to something: the server's keys, and what a plugin's key is called after."""
    masked: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            masked[key] = _masked(value, key)
        elif (name, key) == ("server", "api_keys"):
            masked[key] = ["..."] * len(value)
        else:
            masked[key] = "..." if value and isinstance(value, str) and _SECRET.search(key) else value
    return masked


def _without_none(value: Any) -> Any:
    """What TOML can hold: it has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def main() -> None:
    """Entry point; a StartupError is one paragraph and exit code 2."""
    run: Callable[..., Any] = cli.main
    try:
        run(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except StartupError as error:
        kind = {ConfigError: "configuration", PluginError: "plugin"}.get(type(error), "model")
        click.echo(f"jackfield cannot start ({kind}): {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

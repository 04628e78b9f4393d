"""The command line: serve, check, config, plugins, models.

Only what a command needs is imported when it runs: `--help` and `plugins` must be instant, and the HTTP process must never import torch.
"""

from __future__ import annotations

import logging
import os
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

from jackfield.config import load_settings
from jackfield.errors import ConfigError, PluginError, StartupError
from jackfield.plugins import PluginInfo, installed_plugins, load_plugins
from jackfield.settings import ModelSettings, Settings

if TYPE_CHECKING:
    from jackfield.app import App

__all__ = ["main"]

EXIT_CODES = (
    "Exit codes: 0 it went well (for serve: it was told to end, and drained); 1 a bug; 2 wrong usage, configuration, plugin or model."
)

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
    """Serve a TOML configuration, or a model alone (hub id, folder or package:...) through every installed endpoint that fits."""
    flags = {
        key: value
        for key, value in (("server.host", host), ("server.port", port), ("server.offline", offline or None))
        if value is not None
    }
    settings, from_file = _settings(target, {**flags, **_assignments(assignments)})
    _logging(settings)
    app = _app(settings, all_endpoints=not from_file)
    from jackfield.serve import serve as run  # noqa: PLC0415

    sys.exit(run(app))


@cli.command(epilog=EXIT_CODES)
@_target
@_set
@_json
def check(target: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Try everything but the weights: the configuration, the plugins, the models' files, the routes."""
    settings, from_file = _settings(target, _assignments(assignments))
    app = _app(settings, all_endpoints=not from_file)
    app.asgi  # noqa: B018  (builds the routes and their document)
    names = sorted(app.plugins.endpoints)
    if as_json:
        click.echo(msgspec.json.encode({"ok": True, "models": sorted(settings.models), "endpoints": names}).decode())
    else:
        click.echo(f"ok: {len(settings.models)} models ({', '.join(sorted(settings.models))}), endpoints {', '.join(names)}")


@cli.command(name="config", epilog=EXIT_CODES)
@_target
@_set
@_json
def show_config(target: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Print the effective configuration, defaults included; keys are hidden."""
    settings, from_file = _settings(target, _assignments(assignments))
    plugins = load_plugins(settings.endpoints, settings.plugins, on_error="skip", all_endpoints=not from_file)
    table: dict[str, Any] = msgspec.to_builtins(settings)
    table["server"]["api_keys"] = ["..."] * len(settings.server.api_keys)
    table["endpoints"] = {name: msgspec.to_builtins(loaded.settings) for name, loaded in sorted(plugins.endpoints.items())}
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
        settings, from_file = _settings(target, {})
        rows = load_plugins(settings.endpoints, settings.plugins, on_error="skip", all_endpoints=not from_file).infos
    _show(rows, ("name", "distribution", "version", "state", "reason"), as_json)


@cli.command(epilog=EXIT_CODES)
@_target
@_set
@_json
def models(target: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """List the configured models with what their files say: length, operations, size of vectors, endpoints."""
    settings, from_file = _settings(target, _assignments(assignments))
    entries = _app(settings, all_endpoints=not from_file).model_entries()
    _show(entries, ("id", "root", "max_model_len", "embedding_size", "operations", "aliases"), as_json)


def _settings(target: str | None, overrides: dict[str, Any]) -> tuple[Settings, bool]:
    """The effective settings, and whether they come from a file; a model alone makes its own."""
    from jackfield.sources import looks_like_model  # noqa: PLC0415

    if target is None:
        default = Path("jackfield.toml")
        if not default.is_file():
            raise ConfigError("Give the path of a TOML file, or a model's id or folder (there is no jackfield.toml here).")
        return load_settings(default, environ=os.environ, overrides=overrides), True
    if not looks_like_model(target):
        return load_settings(Path(target), environ=os.environ, overrides=overrides), True
    settings = load_settings(None, environ=os.environ, overrides=overrides)
    return msgspec.structs.replace(settings, models={**settings.models, _model_name(target): ModelSettings(source=target)}), False


def _model_name(target: str) -> str:
    """A hub id keeps its name; a path is called by its last part."""
    is_path = target.startswith(("package:", "/", ".", "~")) or Path(target).exists()
    return Path(target).expanduser().resolve().name if is_path and not target.startswith("package:") else target.removeprefix("package:")


def _assignments(pairs: tuple[str, ...]) -> dict[str, Any]:
    from jackfield.config import literal  # noqa: PLC0415

    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or "." not in key:
            raise ConfigError(f"--set {pair}: KEY=VALUE is expected, with a dotted key such as server.port=9000.")
        values[key] = literal(key.split("."), value)
    return values


def _app(settings: Settings, *, all_endpoints: bool) -> App:
    """The application; transformers is imported with torch hidden from it, before anything else can."""
    if settings.server.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, here and in the engine's process
    if settings.engine.mode == "process":
        from jackfield.tokenization import hide_torch  # noqa: PLC0415

        with hide_torch():
            from jackfield.app import App  # noqa: PLC0415
    else:
        from jackfield.app import App  # noqa: PLC0415
    return App(settings, all_endpoints=all_endpoints, background=True)


def _logging(settings: Settings) -> None:
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.server.log_level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)


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

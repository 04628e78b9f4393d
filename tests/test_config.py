"""Configuration: strict decoding with errors that say what to do, and three sources of which the nearer wins. No model is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jackfield.config import convert, literal, load_settings, nearest
from jackfield.errors import ConfigError, StartupError
from jackfield.settings import CorsSettings, EndpointSettings, ModelSettings, ServerSettings, Settings
from tests.conftest import Run, Write


def error(path: Path | None, environ: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(path, environ=environ, overrides=overrides)
    return str(caught.value)


# --- the file


def test_defaults_alone() -> None:
    assert load_settings(None) == Settings()
    assert Settings().server == ServerSettings(host="127.0.0.1", port=8000, api_keys=[], cors=CorsSettings(allow_origins=[]))


def test_a_file_sets_what_it_names(write: Write) -> None:
    path = write(
        """
        [server]
        port = 0
        api_keys = ["a", "b"]
        drain_timeout_s = 5
        [server.cors]
        allow_origins = ["https://a.example"]
        [engine]
        mode = "thread"
        [models.m]
        source = "org/name"
        matryoshka = [64, 128]
        options = {deep = {er = 1}}
        [endpoints.embed]
        models = ["m"]
        """
    )
    settings = load_settings(path)
    assert (settings.server.port, settings.server.api_keys, settings.server.drain_timeout_s) == (0, ["a", "b"], 5.0)
    assert settings.server.host == ServerSettings().host
    assert settings.server.cors == CorsSettings(allow_origins=["https://a.example"])
    assert settings.engine.mode == "thread"
    assert settings.models == {"m": ModelSettings(source="org/name", matryoshka=[64, 128], options={"deep": {"er": 1}})}
    assert settings.endpoints == {"embed": {"models": ["m"]}}


@pytest.mark.parametrize(
    ("text", "table", "key", "hint"),
    [
        ("[server]\nprot = 1", "[server]", "'prot'", "Did you mean 'port'?"),
        ("[server.cors]\nallow_orgins = []", "[server.cors]", "'allow_orgins'", "Did you mean 'allow_origins'?"),
        ("[engine]\ntoken_budgets = 1", "[engine]", "'token_budgets'", "Did you mean 'token_budget'?"),
        ("[srever]\nport = 1", "the file", "'srever'", "Did you mean 'server'?"),
        (
            "[engine]\nzzz = 1",
            "[engine]",
            "'zzz'",
            (
                "Known: heartbeat_s, kv_cache_mib, lanes, max_restarts, max_running, max_step_ms, max_wait_ms, mode, prefix_cache, "
                "stall_s, threads, token_budget."
            ),
        ),
    ],
    ids=["server", "nested", "engine", "table", "far from all"],
)
def test_an_unknown_key_names_the_nearest(text: str, table: str, key: str, hint: str, write: Write) -> None:
    path = write(text)
    assert error(path) == f"{path}: {table} has an unknown key {key}. {hint}"


@pytest.mark.parametrize(
    ("text", "key", "value", "expected"),
    [
        ('[server]\nport = "8000"', "server.port", "'8000'", "expected int, got str"),
        ("[server]\nport = 70000", "server.port", "70000", "expected int <= 65535"),
        ("[server]\nport = -1", "server.port", "-1", "expected int >= 0"),
        ("[server]\nport = true", "server.port", "True", "expected int, got bool"),
        ("[server]\ndocs = 1", "server.docs", "1", "expected bool, got int"),
        ("[server]\nhost = 1", "server.host", "1", "expected str, got int"),
        ("[server]\nmax_prompts = 0", "server.max_prompts", "0", "expected int >= 1"),
        ('[server]\napi_keys = "secret"', "server.api_keys", "'secret'", "expected array, got str"),
        ("[server]\napi_keys = [1]", "server.api_keys.0", "1", "expected str, got int"),
        ("[server]\ncors = 1", "server.cors", "1", "expected object, got int"),
        ("[server.cors]\nallow_origins = '*'", "server.cors.allow_origins", "'*'", "expected array, got str"),
        ("[server.cors]\nmax_age_s = -1", "server.cors.max_age_s", "-1", "expected int >= 0"),
        ("[engine]\nstall_s = 0", "engine.stall_s", "0", "expected float > 0.0"),
        ("engine = 1", "engine", "1", "expected object, got int"),
        ("models = 1", "models", "1", "expected tables, such as [models.example]"),
        ("[models]\nm = 1", "models.m", "1", "expected a table, [models.m]"),
        ("[models.m]\nsource = 1", "models.m.source", "1", "expected str, got int"),
        ("[server]\nlog_level = 'loud'", "server.log_level", "'loud'", "expected one of 'debug', 'info', 'warning', 'error'"),
    ],
    ids=lambda value: str(value).replace("\n", " "),
)
def test_a_wrong_value_is_named_with_its_key_and_what_was_expected(text: str, key: str, value: str, expected: str, write: Write) -> None:
    path = write(text)
    assert error(path) == f"{path}: {key} = {value}: {expected}."


@pytest.mark.parametrize("text", ['[server]\nlog_level = "loud"', '[engine]\nmode = "fast"'])
def test_a_choice_that_does_not_exist(text: str, write: Write) -> None:
    message = error(write(text))
    key, value = next(iter(next(iter(tomllib.loads(text).values())).items()))
    assert f".{key} = {value!r}" in message


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert error(path).startswith(f"{path}: there is no such file.")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert error(tmp_path).startswith(f"{tmp_path}: cannot be read: ")


@pytest.mark.parametrize(
    "content", [b"[server\nport = 1", b"[server]\nport = ", b"[server]\nport = 1\nport = 2", b"[server]\nhost = '\xff'"]
)
def test_invalid_toml(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert error(path).startswith(f"{path}: no valid TOML: ")


def test_an_endpoints_own_table() -> None:
    """Decoded by its owner's struct, with the table's name in every error."""

    class Own(EndpointSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
        size: int = 3

    assert convert({"size": 4, "models": ["m"]}, Own, where="here", prefix="endpoints.own") == Own(size=4, models=["m"])
    with pytest.raises(ConfigError) as caught:
        convert({"sise": 4}, Own, where="here", prefix="endpoints.own")
    assert str(caught.value) == "here: [endpoints.own] has an unknown key 'sise'. Did you mean 'size'?"
    with pytest.raises(ConfigError) as caught:
        convert({"size": "4"}, Own, where="here", prefix="endpoints.own")
    assert str(caught.value) == "here: endpoints.own.size = '4': expected int, got str."
    assert isinstance(caught.value, StartupError)


def test_a_key_without_default() -> None:
    with pytest.raises(ConfigError) as caught:
        convert({"dtype": "auto"}, ModelSettings, where="here", prefix="models.m")
    assert str(caught.value) == "here: [models.m] lacks the key 'source', which has no default."


def test_nearest() -> None:
    assert nearest("prot", ["host", "port"]) == " Did you mean 'port'?"
    assert nearest("zzz", ["port", "host"]) == " Known: host, port."
    assert nearest("zzz", []) == ""


# --- the environment


def test_environment_wins_over_the_file(write: Write) -> None:
    path = write('[server]\nport = 1\nhost = "a"')
    settings = load_settings(path, environ={"JACKFIELD_SERVER__PORT": "2", "PORT": "3", "JACKFIELD_HOME": "4"})
    assert (settings.server.port, settings.server.host) == (2, "a")


def test_overrides_win_over_the_environment(write: Write) -> None:
    path = write("[server]\nport = 1\n[engine]\nthreads = 1")
    environ = {"JACKFIELD_SERVER__PORT": "2", "JACKFIELD_ENGINE__THREADS": "2"}
    settings = load_settings(path, environ=environ, overrides={"server.port": 3, "server.cors.max_age_s": 5})
    assert (settings.server.port, settings.engine.threads, settings.server.cors.max_age_s) == (3, 2, 5)


@pytest.mark.parametrize(
    ("variable", "value", "dotted", "meant"),
    [
        ("JACKFIELD_SERVER__DOCS", "false", "server.docs", False),
        ("JACKFIELD_SERVER__ACCESS_LOG", "true", "server.access_log", True),
        ("JACKFIELD_SERVER__API_KEYS", '["a", "b"]', "server.api_keys", ["a", "b"]),
        ("JACKFIELD_SERVER__CORS__ALLOW_ORIGINS", '["https://a.example"]', "server.cors.allow_origins", ["https://a.example"]),
        ("JACKFIELD_SERVER__DRAIN_TIMEOUT_S", "2.5", "server.drain_timeout_s", 2.5),
        ("JACKFIELD_SERVER__DRAIN_TIMEOUT_S", "2", "server.drain_timeout_s", 2.0),
        ("JACKFIELD_SERVER__HOST", "0.0.0.0", "server.host", "0.0.0.0"),
        ("JACKFIELD_SERVER__HOST", "12", "server.host", "12"),
        ("JACKFIELD_SERVER__ROOT_PATH", '"quoted"', "server.root_path", '"quoted"'),
        ("JACKFIELD_SERVER__LOG_LEVEL", "debug", "server.log_level", "debug"),
        ("JACKFIELD_ENGINE__MODE", "thread", "engine.mode", "thread"),
    ],
)
def test_values_from_the_environment(variable: str, value: str, dotted: str, meant: object) -> None:
    """Text where text is due, else as in TOML."""
    found: Any = load_settings(None, environ={variable: value})
    for name in dotted.split("."):
        found = getattr(found, name)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("JACKFIELD_SERVER__PORT", "many", "server.port = 'many': expected int, got str."),
        ("JACKFIELD_SERVER__DOCS", "yes", "server.docs = 'yes': expected bool, got str."),
        ("JACKFIELD_SERVER__API_KEYS", "a,b", "server.api_keys = 'a,b': expected array, got str."),
        ("JACKFIELD_SERVER__PROT", "1", "[server] has an unknown key 'prot'. Did you mean 'port'?"),
        ("JACKFIELD_SERVER__CORS__ALLOW_ORGINS", "[]", "[server.cors] has an unknown key 'allow_orgins'. Did you mean 'allow_origins'?"),
    ],
)
def test_a_wrong_variable_is_as_wrong_as_a_file(variable: str, value: str, named: str) -> None:
    assert error(None, {variable: value}).endswith(named)


@pytest.mark.parametrize(("variable", "hint"), [("JACKFIELD_SERVR__PORT", "'server'"), ("JACKFIELD_MODEL__M__DTYPE", "'models'")])
def test_a_variable_of_no_table(variable: str, hint: str) -> None:
    message = error(None, {variable: "1"})
    assert message.startswith(f"{variable}: ")
    assert message.endswith(f"Did you mean {hint}?")


def test_a_variable_below_a_plain_value(write: Write) -> None:
    assert "port is no table" in error(write("[server]\nport = 1"), {"JACKFIELD_SERVER__PORT__X": "1"})


def test_names_match_whatever_their_case_and_dashes(write: Write) -> None:
    path = write(
        """
        [models.all-MiniLM-L6]
        source = "a"
        [models."smol.v2"]
        source = "b"
        [endpoints.my-embed]
        prefix = ""
        """
    )
    environ = {
        "JACKFIELD_MODELS__ALL_MINILM_L6__DTYPE": "bfloat16",
        "JACKFIELD_MODELS__ALL_MINILM_L6__REVISION": "12",
        "JACKFIELD_MODELS__SMOL_V2__MAX_LENGTH": "12",
        "JACKFIELD_MODELS__NEW__SOURCE": "c",
        "JACKFIELD_ENDPOINTS__MY_EMBED__PREFIX": "/tei",
        "JACKFIELD_ENDPOINTS__MY_EMBED__MODELS": '["new"]',
    }
    settings = load_settings(path, environ=environ)
    assert settings.models == {
        "all-MiniLM-L6": ModelSettings(source="a", dtype="bfloat16", revision="12"),
        "smol.v2": ModelSettings(source="b", max_length=12),
        "new": ModelSettings(source="c"),
    }
    assert settings.endpoints == {"my-embed": {"prefix": "/tei", "models": ["new"]}}


def test_an_api_key_of_the_environment_is_one_more(write: Write) -> None:
    environ = {"JACKFIELD_API_KEY": "123"}
    assert load_settings(None, environ=environ).server.api_keys == ["123"]
    assert load_settings(write('[server]\napi_keys = ["a"]'), environ=environ).server.api_keys == ["a", "123"]
    both = {"JACKFIELD_SERVER__API_KEYS": '["b"]', **environ}
    assert load_settings(None, environ=both).server.api_keys == ["b", "123"]


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("server.port", "1", 1),
        ("server.host", "1", "1"),
        ("server.docs", "false", False),
        ("server.api_keys", '["1"]', ["1"]),
        ("models.m.source", "true", "true"),
        ("models.m.dtype", "float32", "float32"),
        ("models.m.matryoshka", "true", True),
        ("models.m.options.deep", "{a = 1}", {"a": 1}),
        ("endpoints.embed.prefix", "/tei", "/tei"),
        ("no.such.key", "x y", "x y"),
    ],
)
def test_literal(key: str, text: str, meant: object) -> None:
    assert literal(key.split("."), text) == meant


# --- the command line


def effective(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run("config", *arguments, "--json")
    assert code == 0, err
    table: dict[str, Any] = json.loads(out)
    return table


def test_flags_win_over_environment_over_file(run: Run, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write("[server]\nport = 1"))
    assert effective(run, path)["server"]["port"] == 1
    monkeypatch.setenv("JACKFIELD_SERVER__PORT", "2")
    assert effective(run, path)["server"]["port"] == 2
    assert effective(run, path, "--set", "server.port=3", "--set", "server.docs=false")["server"] == {
        **msgspec.to_builtins(ServerSettings()),
        "port": 3,
        "docs": False,
    }


def test_config_prints_toml_that_reads_back(run: Run, write: Write) -> None:
    text = '[server]\napi_keys = ["secret"]\n[server.cors]\nallow_origins = ["*"]\n[models."a.b/c"]\nsource = "x\\"y"\nmatryoshka = [64]'
    code, out, err = run("config", str(write(text)))
    assert (code, err) == (0, "")
    assert "secret" not in out
    printed = tomllib.loads(out)
    assert printed["server"].pop("api_keys") == ["..."]
    printed["server"]["api_keys"] = ["secret"]
    assert msgspec.convert(printed, Settings, strict=True) == load_settings(write(text))


def test_config_takes_the_file_in_this_folder(run: Run) -> None:
    code, _, err = run("config")
    assert code == 2
    assert "there is no jackfield.toml here" in err
    Path("jackfield.toml").write_text("[server]\nport = 5\n", encoding="utf-8")
    assert effective(run)["server"]["port"] == 5


@pytest.mark.parametrize("command", ["config", "plugins"])
def test_a_wrong_configuration_ends_with_2_and_one_line(command: str, run: Run, write: Write) -> None:
    path = write("[server]\nprot = 1")
    expected = f"jackfield cannot start (configuration): {path}: [server] has an unknown key 'prot'. Did you mean 'port'?\n"
    assert run(command, str(path)) == (2, "", expected)


def test_a_plugin_that_is_not_installed(run: Run, write: Write) -> None:
    code, out, err = run("config", str(write("[endpoints.no-such-thing]")))
    assert (code, out) == (2, "")
    assert "[endpoints.no-such-thing] names a plugin that is not installed" in err


@pytest.mark.parametrize("pair", ["server.port", "port=1", "=1"])
def test_an_assignment_without_key_or_value(pair: str, run: Run, write: Write) -> None:
    code, _, err = run("config", str(write("")), "--set", pair)
    assert code == 2
    assert f"--set {pair}: KEY=VALUE is expected" in err


@pytest.mark.parametrize("arguments", [["serve", "--port", "99999"], ["serve", "--prot", "1"], ["serv"]], ids=" ".join)
def test_wrong_usage_ends_with_2(arguments: list[str], run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: " in err


def test_version_and_help(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out.split()[0]) == (0, "jackfield")
    code, out, _ = run("-h")
    assert code == 0
    assert all(command in out for command in ("serve", "check", "config", "plugins", "models"))


def test_check_of_a_configuration_without_endpoints(tmp_path: Path, write: Write) -> None:
    """In a process of its own: the command hides torch from transformers, which lasts."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JACKFIELD_")}
    command = [sys.executable, "-m", "jackfield.cli", "check", str(write("[server]\nport = 0"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jackfield cannot start (configuration): No endpoint is enabled")


def test_a_variable_or_a_flag_at_fault_is_named(write: Write) -> None:
    path = write("[server]\nport = 1\n")
    for settings, source in (
        ({"environ": {"JACKFIELD_SERVER__PORT": "abc"}}, "JACKFIELD_SERVER__PORT"),
        ({"overrides": {"server.port": "abc"}}, "the flag for server.port"),
    ):
        with pytest.raises(ConfigError, match=f"^{source}: server.port = 'abc'"):
            load_settings(path, **settings)


def test_the_key_variable_adds_to_the_keys_whatever_the_order() -> None:
    pairs = [("JACKFIELD_API_KEY", "k"), ("JACKFIELD_SERVER__API_KEYS", '["a"]')]
    for order in (pairs, pairs[::-1]):
        assert load_settings(None, environ=dict(order)).server.api_keys == ["a", "k"]


def test_a_models_unknown_key_names_the_model_and_the_nearest(write: Write) -> None:
    path = write('[models.m]\nsource = "x"\ndtpe = "float32"\n')
    with pytest.raises(ConfigError, match=r"\[models\.m\] has an unknown key 'dtpe'\. Did you mean 'dtype'\?"):
        load_settings(path)

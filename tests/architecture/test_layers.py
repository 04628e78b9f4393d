"""The house rules that a machine can check: who imports whom, sizes, public names, the configuration in three places."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import jackfield
from jackfield.plugins import installed_plugins, load_plugins
from jackfield.settings import EndpointSettings, ModelSettings, Settings

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "jackfield"
MSGSPEC = {"msgspec"}
WORDS = {"cache", "client", "config", "errors", "inputs", "outputs", "params", "prompts", "schema", "settings"}
CONTRACT = {"context", "endpoint", "hookspecs", "parsers", "poolers"}
PIPELINE = {
    "admission",
    "binding",
    "blame",
    "checker",
    "detokenization",
    "encoding",
    "generation",
    "grammar",
    "history",
    "pairing",
    "parsing",
    "pipeline",
    "plugins",
    "rendering",
    "sampling",
    "sources",
    "stages",
    "tiny",
    "tokenization",
    "trial",
    "watchdog",
}
ROOT_MODULES = {"app", "cli", "conformance", "logs", "scaffold", "serve", "testing", "worker"}
# What plugins that supply an engine may import beside `jackfield`.
PUBLIC_ENGINE = {"jackfield.engine", "jackfield.engine.backends", "jackfield.engine.poolers"}

# layer -> (modules of it, core modules it may import, libraries it may import); None: anything
LAYERS: dict[str, tuple[set[str], set[str] | None, set[str] | None]] = {
    "words": (WORDS, WORDS, {"msgspec", "numpy"}),
    "contract": (CONTRACT, WORDS | CONTRACT, {"msgspec", "pluggy"}),
    "engine": (
        {"engine"},
        WORDS | {"engine"},
        {"gguf", "llguidance", "msgspec", "numpy", "safetensors", "tokenizers", "torch", "transformers"},
    ),
    "pipeline": (
        PIPELINE,
        WORDS | CONTRACT | PIPELINE,
        {
            "huggingface_hub",
            "jinja2",
            "llguidance",
            "msgspec",
            "numpy",
            "orjson",
            "packaging",
            "pluggy",
            "safetensors",
            "tokenizers",
            "transformers",
        },
    ),
    "http": ({"http"}, WORDS | CONTRACT | PIPELINE | {"http"}, {"litestar", "msgspec", "prometheus_client", "uvicorn"}),
    "root": (ROOT_MODULES, None, None),
}


def modules() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


def own_name(path: Path) -> str:
    return path.relative_to(CORE).with_suffix("").parts[0]


def test_every_module_has_a_layer() -> None:
    known = set().union(*(entry[0] for entry in LAYERS.values())) | {"__init__"}
    assert {own_name(path) for path in modules()} == known


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(CORE)))
def test_imports_stay_in_their_layer(path: Path) -> None:
    name = own_name(path)
    if name == "__init__":
        return
    _, core, libraries = next(entry for entry in LAYERS.values() if name in entry[0])
    for dotted in imports(path):
        top, _, rest = dotted.partition(".")
        if top == "jackfield":
            assert core is None or rest.split(".")[0] in core, f"{path} imports {dotted}"
        elif top.startswith("jackfield_"):
            pytest.fail(f"{path} imports the plugin {dotted}")
        elif top not in sys.stdlib_module_names:
            assert libraries is None or top in libraries, f"{path} imports {dotted}"


def supplies_an_engine(path: Path) -> bool:
    """Whether a file is of a plugin that implements `jackfield_engine`."""
    package = ROOT.joinpath(*path.relative_to(ROOT).parts[:4])
    return any("def jackfield_engine(" in module.read_text() for module in package.rglob("*.py"))


@pytest.mark.parametrize("path", sorted(ROOT.glob("plugins/*/src/**/*.py")), ids=lambda p: str(p.relative_to(ROOT / "plugins")))
def test_plugins_use_the_public_names_alone(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[2]
    for dotted in imports(path):
        top = dotted.partition(".")[0]
        assert top not in ("litestar", "torch"), f"{path} imports {dotted}"
        public = {"jackfield", *(PUBLIC_ENGINE if supplies_an_engine(path) else ())}
        assert dotted in public or top != "jackfield", f"{path} imports {dotted}, a submodule of the core"
        assert top == own or not top.startswith("jackfield_"), f"{path} imports another plugin, {dotted}"


def test_no_core_file_names_an_endpoint() -> None:
    """A new endpoint is a new folder and no edit elsewhere."""
    paths = [path for loaded in load_all().values() for route in loaded.endpoint.routes for path in route.paths if path != "/"]
    for module in modules():
        text = module.read_text()
        for path in paths:
            assert f'"{path}"' not in text, f"{module} names {path}"


def load_all() -> Any:
    return load_plugins({}, {}, all_endpoints=True, installed=installed_plugins()).endpoints


def python_files() -> list[Path]:
    return [p for folder in ("core", "plugins", "tests", "benchmarks", "examples") for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 60, f"{path}: {node.name}"


def test_public_names_are_sorted_and_there() -> None:
    assert list(jackfield.__all__) == sorted(jackfield.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(jackfield, name) for name in jackfield.__all__)
    tree = ast.parse((CORE / "__init__.py").read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(jackfield.__all__)


@pytest.mark.parametrize("path", [p for p in modules() if p.name != "__init__.py"], ids=lambda p: str(p.relative_to(CORE)))
def test_modules_declare_what_they_offer(path: Path) -> None:
    tree = ast.parse(path.read_text())
    declared = [ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"]
    assert declared
    defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    defined |= {target.id for n in tree.body if isinstance(n, ast.Assign) for target in n.targets if isinstance(target, ast.Name)}
    defined |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert set(declared[0]) <= defined


def fresh(code: str) -> set[str]:
    """Top-level modules that a new interpreter has after running the code."""
    command = f"{code}\nimport sys; print(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    return set(subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout.split())


def test_import_is_light() -> None:
    assert not fresh("import jackfield") & {"torch", "litestar", "transformers", "uvicorn", "tokenizers"}


def test_the_door_of_engines_is_light() -> None:
    assert not fresh("import jackfield.engine") & {"torch", "litestar", "transformers", "uvicorn", "tokenizers"}


def test_default_toml_is_the_structs() -> None:
    table = tomllib.loads((ROOT / "config" / "default.toml").read_text())
    assert table.pop("models") == {"example": without_none(msgspec.to_builtins(ModelSettings(source="...")))}
    assert table.pop("endpoints") == {"example": msgspec.to_builtins(EndpointSettings())}
    defaults = msgspec.to_builtins(Settings())
    assert table == {"server": defaults["server"], "engine": defaults["engine"]}


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def test_default_toml_of_each_endpoint_is_its_struct() -> None:
    for name, loaded in load_all().items():
        module = sys.modules[type(loaded.endpoint).__module__.partition(".")[0]]
        assert module.__file__
        table = tomllib.loads((Path(module.__file__).parent / "default.toml").read_text())
        assert set(table) == {"endpoints"}
        assert table["endpoints"][name] == without_none(msgspec.to_builtins(loaded.endpoint.settings()))


def test_default_toml_of_each_plugin_without_endpoint_is_its_struct() -> None:
    for point in installed_plugins():
        target = point.load()
        kind = getattr(target, "settings", None)
        if not isinstance(target, type) or kind is None:
            continue
        module = sys.modules[target.__module__.partition(".")[0]]
        assert module.__file__
        table = tomllib.loads((Path(module.__file__).parent / "default.toml").read_text())
        assert table == {"plugins": {point.name: without_none(msgspec.to_builtins(kind()))}}


def test_default_toml_comments_every_key() -> None:
    for line in (ROOT / "config" / "default.toml").read_text().splitlines():
        if "=" in line and not line.startswith(("#", "[")) and "allow_" not in line:
            assert "#" in line, line

"""The pages are held to the code: keys with their defaults, errors, routes, fields, metrics, links and examples.

What belongs to one endpoint alone may stand in its package's README instead of the page under docs/.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from jackfield import errors
from jackfield.config import convert, load_settings
from jackfield.endpoint import mounted
from jackfield.errors import JackfieldError, ServingError, StartupError
from jackfield.http.system import SYSTEM_PATHS, ModelEntry
from jackfield.plugins import LoadedEndpoint, load_plugins
from jackfield.settings import CorsSettings, EndpointSettings, EngineSettings, ModelSettings, ServerSettings, Settings
from jackfield.testing import make_client, make_server
from tests.checkpoints import IN_BUCKETS, KINDS
from tests.parity import NOT_CONVERTED, TASKS, name_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
READMES = sorted(ROOT.glob("plugins/*/README.md"))
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", *READMES])
TABLES: dict[str, type[msgspec.Struct]] = {
    "[server]": ServerSettings,
    "[server.cors]": CorsSettings,
    "[engine]": EngineSettings,
    "[models.NAME]": ModelSettings,
    "[endpoints.NAME]": EndpointSettings,
}
# Roots of the tree, which are never raised themselves.
ROOTS = {JackfieldError, ServingError, StartupError}


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next of its level."""
    found = re.search(rf"^## `?{re.escape(heading)}`?\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"no section {heading}"
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the tables' rows whose first is code."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def code(cell: str) -> list[str]:
    """The code spans of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def cases(language: str) -> list[Any]:
    found = [(path, number, text) for path in PAGES for number, text in enumerate(blocks(path, language))]
    return [pytest.param(text, id=f"{short(path)}-{number}") for path, number, text in found]


@cache
def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@cache
def endpoints() -> dict[str, LoadedEndpoint]:
    return load_plugins({}, {}, all_endpoints=True).endpoints


def readme(endpoint: str) -> str:
    """An endpoint's own page; empty for one that is installed from elsewhere."""
    for path in READMES:
        project = tomllib.loads((path.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if endpoint in project["entry-points"]["jackfield"]:
            return path.read_text(encoding="utf-8")
    return ""


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Any]]:
    """What a server over every installed endpoint says of itself, after a request to each route."""
    objects = [loaded.endpoint for loaded in endpoints().values()]
    with make_server(*objects) as server, server.client() as client:
        for endpoint in objects:
            for route in endpoint.routes:
                client.request(route.method, mounted(endpoint.settings().prefix, route.paths[0]), json=route.example)
        yield {"document": client.get("/openapi.json").json(), "metrics": client.get("/metrics").text}


# Configuration


def documented_keys(heading: str) -> dict[str, list[str]]:
    return {code(cells[0])[0]: cells for cells in rows(section(page("configuration.md"), heading)) if len(cells) == 4}


def defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Defaults by key, as TOML has them; keys whose value is a table of its own, or that have no default, have none here."""
    required = {"source": "..."} if kind is ModelSettings else {}
    table: dict[str, Any] = msgspec.to_builtins(kind(**required))
    return {key: value for key, value in table.items() if key not in required and value is not None and key != "cors"}


@pytest.mark.parametrize("heading", TABLES)
def test_every_key_is_documented_with_its_default(heading: str) -> None:
    documented = documented_keys(heading)
    kind = TABLES[heading]
    assert set(documented) == set(kind.__struct_fields__) - {"cors"}
    for key, default in defaults(kind).items():
        assert tomllib.loads(f"x = {code(documented[key][2])[0]}")["x"] == default, key


def test_the_keys_of_default_toml_are_documented() -> None:
    table = tomllib.loads((ROOT / "config" / "default.toml").read_text(encoding="utf-8"))
    cors = table["server"].pop("cors")
    found = {
        "[server]": table["server"],
        "[server.cors]": cors,
        "[engine]": table["engine"],
        "[models.NAME]": table["models"]["example"],
        "[endpoints.NAME]": table["endpoints"]["example"],
    }
    for heading, keys in found.items():
        assert set(keys) <= set(documented_keys(heading)), heading


@pytest.mark.parametrize("path", sorted(ROOT.glob("plugins/*/src/*/default.toml")), ids=lambda path: path.parts[-4])
def test_a_plugins_own_keys_are_documented(path: Path) -> None:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    text = (path.parents[2] / "README.md").read_text(encoding="utf-8")
    for kind, common in (("endpoints", documented_keys("[endpoints.NAME]")), ("plugins", {})):
        for name, keys in tables.get(kind, {}).items():
            for key in keys:
                assert key in common or f"`{key}`" in text, f"{key} of [{kind}.{name}]"


# Errors


def documented_errors() -> dict[str, list[str]]:
    return {code(cells[0])[0]: cells for cells in rows(page("errors.md")) if isinstance(getattr(errors, code(cells[0])[0], None), type)}


def test_every_error_is_documented() -> None:
    classes = {kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)}
    assert set(documented_errors()) == {kind.__name__ for kind in classes - ROOTS}


@pytest.mark.parametrize("name", documented_errors())
def test_an_error_has_its_status_and_type(name: str) -> None:
    kind, cells = getattr(errors, name), documented_errors()[name]
    if issubclass(kind, ServingError):
        assert (int(cells[1]), code(cells[2])) == (kind.status, [kind.type])
    else:
        assert int(cells[1]) == 2


# Parity


def test_every_architecture_is_in_the_parity_table() -> None:
    """The page is measured (`make parity`); that it is of these checkpoints and tasks is held here."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page("parity.md").splitlines() if line.startswith("| ")]
    rows = {(name, task): (float(difference), path) for name, task, _, difference, path in cells[1:]}
    for kind, (family, _) in KINDS.items():
        for task, _, _ in TASKS:
            if task == "token_classify" and not hasattr(transformers, f"{family}ForTokenClassification"):
                continue
            difference, path = rows[name_of(kind), task]
            assert difference <= 1e-5
            assert path == ("buckets" if kind in IN_BUCKETS else "packed")
            if kind not in NOT_CONVERTED:
                difference, path = rows[name_of(kind, "openvino"), task]
                assert difference <= 2e-5
                assert path == "other"


# Routes, fields, metrics


def text_for(operation: dict[str, Any]) -> str:
    return page("http-api.md") + "".join(readme(tag) for tag in operation["tags"])


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield f"{method.upper()} {path}", operation


def test_every_route_is_documented(served: dict[str, Any]) -> None:
    for name, operation in operations(served["document"]):
        assert f"`{name}`" in text_for(operation), name
    for method, path in SYSTEM_PATHS:
        assert f"`{method} {path}`" in page("http-api.md"), path


def test_every_field_of_a_request_is_documented(served: dict[str, Any]) -> None:
    schemas = served["document"]["components"]["schemas"]
    for name, operation in operations(served["document"]):
        fields = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
        if "requestBody" in operation:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            fields += schemas[reference.rpartition("/")[2]]["properties"]
        for field in fields:
            assert f"`{field}`" in text_for(operation), f"{field} of {name}"


def test_the_fields_of_a_model_are_documented() -> None:
    found = {name for cells in rows(section(page("http-api.md"), "GET /v1/models")) for name in code(cells[0])}
    assert found == set(ModelEntry.__struct_fields__)


def test_every_metric_is_documented_with_its_labels(served: dict[str, Any]) -> None:
    table = {code(cells[0])[0]: cells for cells in rows(section(page("http-api.md"), "GET /metrics"))}
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", served["metrics"], re.MULTILINE))
    for name, kind in kinds.items():
        assert name in table, name
        assert table[name][1] == kind, name
        samples = re.findall(rf"^{name}(?:_bucket|_count|_sum)?\{{(.*)\}} ", served["metrics"], re.MULTILINE)
        labels = {label for sample in samples for label in re.findall(r'(\w+)="', sample)} - {"le"}
        assert not samples or labels == set(code(table[name][2])), name


# Links and examples


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


@pytest.mark.parametrize("text", cases("toml"))
def test_configurations_are_accepted(text: str, tmp_path: Path) -> None:
    """Each parses; one that is whole is read as `jackfield check` reads it, as far as no model is needed."""
    table = tomllib.loads(text)
    if not ({"models", "endpoints"} <= set(table) <= set(Settings.__struct_fields__)):
        return
    path = tmp_path / "server.toml"
    path.write_text(text, encoding="utf-8")
    settings = load_settings(path)
    for name, own in settings.endpoints.items():
        if name in endpoints():
            chosen = convert(own, endpoints()[name].endpoint.settings, where=str(path), prefix=f"endpoints.{name}")
            assert set(chosen.models) <= set(settings.models)


@pytest.mark.parametrize("text", cases("json"))
def test_replies_are_json(text: str) -> None:
    """As they came, but for what `…` leaves out."""
    json.loads(text.replace(",…", "").replace("…", ""))


@pytest.mark.parametrize("text", cases("python"))
def test_code_is_python(text: str) -> None:
    ast.parse(text)


def test_the_plugin_of_the_readme_answers_as_it_says(tmp_path: Path, minilm: str) -> None:
    """Its code served over the real model, and the replies that stand under it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class SimilarEndpoint" in block)
    module = types.ModuleType("similar")
    exec(compile(code, "README.md", "exec"), module.__dict__)
    with make_client(module, real=True, models={"minilm": {"source": minilm}}) as client:
        answer = client.post("/similar", json={"a": "The cat sits outside", "b": "A cat is in the garden"}).json()
        said = re.search(r'\{"cosine":([0-9.]+)\}', text)
        assert said is not None
        assert answer["cosine"] == pytest.approx(float(said[1]), abs=1e-5)
        assert client.post("/similar", json={"a": "The cat sits outside", "b": 7}).json()["error"]["param"] == "b"

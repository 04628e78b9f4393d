"""What every endpoint keeps, checked over a real socket with the fake engine, without knowing any endpoint.

`pytest --jackfield-conformance` runs it over what is installed (`jackfield.conformance`), or in a test:

    @pytest.mark.parametrize("case", contract_cases(MyEndpoint()), ids=str)
    def test_contract(case):
        case.run()

An endpoint takes part by giving its routes an `example`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jackfield.endpoint import Endpoint, EndpointRegistry, Route
from jackfield.errors import InternalError
from jackfield.params import OPERATIONS
from jackfield.plugins import installed_plugins, load_plugins
from jackfield.testing import checks, streams
from jackfield.testing.bench import Bench, operations_of, paths_of
from jackfield.testing.engine import FakeEngine
from jackfield.testing.probe import StageProbe
from jackfield.testing.server import make_server

__all__ = ["ContractCase", "contract_cases"]

Check = Callable[[Bench], None]


@dataclass
class ContractCase:
    """One check of one route. stages_ms: after a run, the median CPU time of each stage that ran."""

    plugin: object
    endpoint: Endpoint[Any, Any]
    route: Route
    check: Check
    server: dict[str, Any] = field(default_factory=dict)
    engine: Callable[[], FakeEngine] = FakeEngine
    stages_ms: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.endpoint.name}-{self.route.paths[0]}-{self.check.__name__}"

    def run(self) -> None:
        """Start a server, check, stop it. Raises: AssertionError."""
        engine, probe = self.engine(), StageProbe()
        if self.check is not checks.wrong_capability:
            engine.operations += tuple(name for name in operations_of(self.endpoint, self.route) if name not in engine.operations)
        with make_server(self.plugin, probe, engine=engine, server=self.server) as server, server.client() as client:
            self.check(Bench(client, self.endpoint, self.route, paths_of(self.endpoint, self.route), engine, probe))
        self.stages_ms = probe.medians_ms()


def contract_cases(*plugins: object, names: Iterable[str] = ()) -> list[ContractCase]:
    """The checks for these Endpoint objects and plugins, or for every endpoint that is installed, or those that `names` has.

    Raises: AssertionError when an installed plugin cannot be loaded; LookupError for a name that no installed endpoint has.
    """
    pairs = [pair for plugin in plugins for pair in _endpoints(plugin)] if plugins else _installed(tuple(names))
    return [case for plugin, endpoint in pairs for route in endpoint.routes for case in _cases(plugin, endpoint, route)]


def _endpoints(plugin: Any) -> list[tuple[object, Endpoint[Any, Any]]]:
    """A plugin's endpoints, each with what a server is given to serve it."""
    if isinstance(plugin, Endpoint):
        return [(plugin, plugin)]
    registry = EndpointRegistry()
    plugin.jackfield_register_endpoints(registry=registry)
    return [(plugin, endpoint) for endpoint in registry.endpoints]


def _installed(names: tuple[str, ...]) -> list[tuple[object, Endpoint[Any, Any]]]:
    points = [point for point in installed_plugins() if not names or point.name in names]
    loaded = load_plugins({}, {}, all_endpoints=True, installed=points)
    failed = [info for info in loaded.infos if info.state == "failed"]
    if failed:
        raise AssertionError(f"installed plugins that fail to load: {failed}")
    missing = [name for name in names if name not in loaded.endpoints]
    if missing:
        known = ", ".join(point.name for point in installed_plugins())
        raise LookupError(f"{missing[0]!r} is no installed endpoint; installed plugins: {known or 'none'}")
    return [(loaded.manager.get_plugin(entry.plugin), entry.endpoint) for entry in loaded.endpoints.values()]


def _cases(plugin: object, endpoint: Endpoint[Any, Any], route: Route) -> Iterator[ContractCase]:
    def case(check: Check, **options: Any) -> ContractCase:
        return ContractCase(plugin, endpoint, route, check, **options)

    yield case(checks.every_path_is_documented)
    if route.refusal:
        yield case(checks.refusal_is_told, server={"api_keys": ["secret"]})
        return
    yield case(checks.example_answers)
    yield case(checks.schema_round_trip)
    yield case(checks.unknown_model)
    yield case(checks.metrics_have_bounded_labels)
    yield case(checks.stages_are_quick_and_leave_the_request_alone)
    yield case(checks.key_is_needed, server={"api_keys": ["secret"]})
    if route.method != "GET":
        yield case(checks.malformed_bodies)
        yield case(checks.wrong_fields_are_named)
        yield case(checks.unknown_fields_are_ignored)
        yield case(checks.body_limit, server={"max_body_bytes": 2000})
    operations = operations_of(endpoint, route)
    if operations:
        others = [name for name in OPERATIONS if name not in operations][:2]
        yield case(checks.wrong_capability, engine=lambda: FakeEngine(operations=others))
        yield case(checks.overload, server={"max_queue_requests": 2})
        yield case(checks.deadline)
        yield case(checks.a_client_that_leaves_ends_its_work)
        yield case(checks.engine_fault, engine=lambda: FakeEngine(fault=lambda request: InternalError("a fault on demand")))
        yield case(checks.engine_death)
    if route.streams:
        yield case(streams.a_stream_ends_well)
        yield case(streams.a_stream_that_never_begins_is_an_error)
        yield case(streams.a_stream_that_breaks_ends_with_the_error)
        yield case(streams.a_client_that_leaves_a_stream_ends_its_work)

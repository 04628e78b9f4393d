"""Which endpoint serves which model, by which operation: decided once the models' cards are known, checked, and written into the routes."""

from __future__ import annotations

from collections.abc import Mapping

from jackfield.client import ModelCard
from jackfield.config import nearest
from jackfield.endpoint import Endpoint, Route
from jackfield.errors import ConfigError, PluginError
from jackfield.pipeline import BoundModel, BoundRoute
from jackfield.plugins import LoadedEndpoint
from jackfield.settings import ModelSettings

__all__ = ["bind_models", "check_aliases", "check_models", "choose_operation", "endpoint_models", "needs_engine", "serves_model"]


def choose_operation(wanted: tuple[str, ...], card: ModelCard) -> str | None:
    """The first of the wanted operations, best first, that the model can do."""
    return next((operation for operation in wanted if operation in card.operations), None)


def wanted_operations(endpoint: Endpoint[object, object], route: Route) -> tuple[str, ...]:
    """What a route needs of the engine; empty: nothing."""
    return endpoint.operations if route.operations is None else route.operations


def needs_engine(endpoint: Endpoint[object, object]) -> bool:
    """Whether any of its routes meets the engine."""
    return any(wanted_operations(endpoint, route) for route in endpoint.routes)


def endpoint_models(loaded: LoadedEndpoint, models: Mapping[str, object]) -> list[str]:
    """Ids that the endpoint's table names, else all. Raises: ConfigError for one that is not configured."""
    name = loaded.endpoint.name
    for model in loaded.settings.models:
        if model not in models:
            raise ConfigError(f"[endpoints.{name}] models names {model!r}, and there is no [models.{model}].{nearest(model, models)}")
    return list(loaded.settings.models or models)


def check_models(loaded: LoadedEndpoint, cards: Mapping[str, ModelCard], configured: Mapping[str, object]) -> None:
    """Every model that the table names must have an operation that the endpoint can use. Raises: PluginError."""
    endpoint = loaded.endpoint
    for model in endpoint_models(loaded, configured):
        if model not in cards:
            continue
        for route in endpoint.routes:
            wanted = wanted_operations(endpoint, route)
            if wanted and loaded.settings.models and choose_operation(wanted, cards[model]) is None:
                can = ", ".join(cards[model].operations) or "nothing that an endpoint could use"
                raise PluginError(
                    f"endpoint {endpoint.name!r} is bound to model {model!r}, which cannot {' or '.join(wanted)}: "
                    f"{cards[model].architecture} can {can}. Take the model out of [endpoints.{endpoint.name}] models"
                )


def serves_model(route: Route, loaded: LoadedEndpoint, model: str, card: ModelCard, models: Mapping[str, object]) -> bool:
    """Whether a route serves a model; models: all that are configured."""
    wanted = wanted_operations(loaded.endpoint, route)
    return model in endpoint_models(loaded, models) and (not wanted or choose_operation(wanted, card) is not None)


def bind_models(route: BoundRoute, loaded: LoadedEndpoint, bound: Mapping[str, BoundModel], settings: Mapping[str, ModelSettings]) -> None:
    """Fill a route's models, in place, ids and aliases alike."""
    route.models.clear()
    route.others.clear()
    wanted = wanted_operations(route.endpoint, route.route)
    named = endpoint_models(loaded, settings)
    for model_id, model in bound.items():
        operation = choose_operation(wanted, model.model.card)
        fits = operation is not None or not wanted
        for name in (model_id, *model.model.aliases):
            if fits and model_id in named:
                route.models[name] = (model, operation)
            elif not fits:
                route.others[name] = model.model.card
    first = next((model for model in named if model in route.models), None)
    if first is not None:
        route.models[""] = route.models[first]


def check_aliases(models: Mapping[str, ModelSettings]) -> None:
    """Ids and aliases share one namespace. Raises: ConfigError."""
    owners: dict[str, str] = dict.fromkeys(models, "")
    for model, settings in models.items():
        for alias in settings.aliases:
            if alias in owners:
                other = owners[alias] or alias
                raise ConfigError(f"[models.{model}] aliases: {alias!r} is a name of [models.{other}] already")
            owners[alias] = model

"""A plugin as it should be: mypy --strict has nothing to say."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from msgspec import Struct

from jackfield import (
    Context,
    Endpoint,
    EndpointRegistry,
    EndpointSettings,
    PoolingOutputs,
    PoolingParams,
    Prompt,
    Request,
    Route,
    Submit,
    TextPrompt,
    hookimpl,
    stageimpl,
)
from jackfield.client import EngineRequest


class Question(Request, frozen=True, kw_only=True):
    text: str


class Answer(Struct, frozen=True, kw_only=True):
    size: int


class Settings(EndpointSettings, frozen=True, kw_only=True):
    limit: int = 10


class EchoEndpoint(Endpoint[Question, Answer]):
    name = id_prefix = "echo"
    operations = ("embed",)
    settings = Settings
    routes = (Route(method="POST", paths=("/echo",), request=Question, response=Answer),)

    def preprocess(self, ctx: Context[Question]) -> list[Prompt]:
        return [TextPrompt(text=ctx.request.text, param="text")]

    def pooling_params(self, ctx: Context[Question]) -> PoolingParams:
        return PoolingParams()

    def build_response(self, ctx: Context[Question]) -> Answer:
        return Answer(size=len(ctx.outputs["embed"][0]))


class Around:
    @stageimpl(wrapper=True)
    def build_response(self, ctx: Context[Any]) -> Generator[None, Any, Any]:
        answer = yield
        return answer

    @hookimpl
    def jackfield_wrap_submit(self, endpoint: Endpoint[Any, Any], submit: Submit) -> Submit:
        async def counted(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            return await submit(ctx, request)

        return counted


@hookimpl
def jackfield_register_endpoints(registry: EndpointRegistry) -> None:
    registry.add(EchoEndpoint())

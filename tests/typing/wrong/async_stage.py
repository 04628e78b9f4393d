from jackfield import Context, Endpoint, PoolingParams, Prompt, Request, Route, TextPrompt
from msgspec import Struct


class Question(Request, frozen=True, kw_only=True):
    text: str


class Answer(Struct, frozen=True, kw_only=True):
    size: int


class Echo(Endpoint[Question, Answer]):
    async def pooling_params(self, ctx: Context[Question]) -> PoolingParams:  # E: Return type "Coroutine[Any, Any, PoolingParams]" of "pooling_params" incompatible with return type "PoolingParams" in supertype "jackfield.endpoint.Endpoint"
        return PoolingParams()

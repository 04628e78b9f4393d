from jackfield import Context, Endpoint, PoolingParams, Prompt, Request, Route, TextPrompt
from msgspec import Struct


class Question(Request, frozen=True, kw_only=True):
    text: str


class Answer(Struct, frozen=True, kw_only=True):
    size: int


class Echo(Endpoint[Question, Answer]):
    def build_response(self, ctx: Context[Question]) -> dict[str, int]:  # E: Return type "dict[str, int]" of "build_response" incompatible with return type "Answer" in supertype "jackfield.endpoint.Endpoint"
        return {"size": 1}

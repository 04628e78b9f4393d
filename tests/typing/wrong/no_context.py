from jackfield import Context, Endpoint, PoolingParams, Prompt, Request, Route, TextPrompt
from msgspec import Struct


class Question(Request, frozen=True, kw_only=True):
    text: str


class Answer(Struct, frozen=True, kw_only=True):
    size: int


class Echo(Endpoint[Question, Answer]):
    def preprocess(self) -> list[Prompt]:  # E: Signature of "preprocess" incompatible with supertype "jackfield.endpoint.Endpoint"
        return []

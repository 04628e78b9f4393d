from jackfield import Context, Endpoint, PoolingParams, Prompt, Request, Route, TextPrompt
from msgspec import Struct


class Question(Request, frozen=True, kw_only=True):
    text: str


class Answer(Struct, frozen=True, kw_only=True):
    size: int


class Echo(Endpoint[Question, Answer]):
    def preprocess(self, ctx: Context[Question]) -> list[Prompt]:
        return [ctx.request.text]  # E: List item 0 has incompatible type "str"; expected "Prompt"

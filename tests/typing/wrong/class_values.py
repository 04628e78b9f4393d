from jackfield import Context, Endpoint, PoolingParams, Prompt, Request, Route, TextPrompt
from msgspec import Struct


class Question(Request, frozen=True, kw_only=True):
    text: str


class Answer(Struct, frozen=True, kw_only=True):
    size: int


class Echo(Endpoint[Question, Answer]):
    operations = "embed"  # E: Incompatible types in assignment
    routes = (Route(method="FETCH", paths=("/echo",), request=Question, response=Answer),)  # E: Argument "method" to "Route" has incompatible type "Literal['FETCH']"

"""Every error that jackfield raises, as one tree.

    JackfieldError
    ├── StartupError                    the process ends with exit code 2 and this text
    │   ├── ConfigError                 a file, key or value of the configuration
    │   ├── PluginError                 a plugin that cannot be used, by name
    │   └── ModelError                  a model that cannot be found, read or loaded
    └── ServingError                    answered to the client with `status` and `type`
        ├── BadRequest                  400
        │   ├── InvalidBody             the body is no JSON, or not of the route's type
        │   ├── EmptyPrompt
        │   ├── PromptTooLong
        │   ├── TokenOutOfVocabulary
        │   └── UnsupportedOperation    the model cannot do what the endpoint needs
        ├── Unauthorized                401
        ├── NotFound                    404
        │   └── ModelNotFound
        ├── MethodNotAllowed            405
        ├── BodyTooLarge                413
        ├── Overloaded                  429, with Retry-After
        ├── HeaderTooLarge              431
        ├── ClientGone                  499, never sent: the client has left
        ├── InternalError               500
        │   ├── NonFiniteOutput         the model gave NaN or infinity
        │   └── StepFailed              the model raised on this very request
        ├── NotSupported                501
        ├── EngineUnavailable           503
        ├── Draining                    503
        └── DeadlineExceeded            504

Errors are raised, never returned. The status is an attribute of the class; nothing infers it from a built-in exception. An exception
outside this tree that reaches the HTTP layer is a bug: 500 with a generic text, the traceback in the log.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BadRequest",
    "BodyTooLarge",
    "ClientGone",
    "ConfigError",
    "DeadlineExceeded",
    "Draining",
    "EmptyPrompt",
    "EngineUnavailable",
    "HeaderTooLarge",
    "InternalError",
    "InvalidBody",
    "JackfieldError",
    "MethodNotAllowed",
    "ModelError",
    "ModelNotFound",
    "NonFiniteOutput",
    "NotFound",
    "NotSupported",
    "Overloaded",
    "PluginError",
    "PromptTooLong",
    "ServingError",
    "StartupError",
    "StepFailed",
    "TokenOutOfVocabulary",
    "Unauthorized",
    "UnsupportedOperation",
    "engine_error",
]


class JackfieldError(Exception):
    """The root. Its text is meant for the person who meets it."""


class StartupError(JackfieldError):
    """The server cannot start: exit code 2, and this text as one paragraph."""


class ConfigError(StartupError):
    """A file, a key or a value of the configuration; the text names all three and the fix."""


class PluginError(StartupError):
    """A plugin that cannot be used; the text begins with its name."""


class ModelError(StartupError):
    """A model that cannot be found, read or loaded; the text begins with its id."""


class ServingError(JackfieldError):
    """An answer to a client.

    `param` names the field at fault as a path (`input[3]`), or is None. `headers` go out with the answer.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}


class BadRequest(ServingError):
    """The request is at fault, and says the same thing however often it is sent."""

    status = 400
    type = "BadRequestError"


class InvalidBody(BadRequest):
    """The body is no JSON, of another content type, or not of the route's type."""


class EmptyPrompt(BadRequest):
    """No prompt, or a prompt without a single token."""


class PromptTooLong(BadRequest):
    """The prompt has more tokens than the model takes."""

    def __init__(self, *, limit: int, got: int, cut_by: str | None = None, param: str | None = None) -> None:
        """cut_by: the field of the request, if there is one, that asks for truncation."""
        how = f"{cut_by} (-1 cuts to {limit})" if cut_by == "truncate_prompt_tokens" else cut_by
        advice = f"Shorten it, or ask for truncation with {how}." if how else "Shorten it."
        super().__init__(f"This model's maximum context length is {limit} tokens, but the prompt has {got}. {advice}", param=param)


class TokenOutOfVocabulary(BadRequest):
    """A token id that the model does not know."""

    def __init__(self, *, token_id: int, vocab_size: int, param: str | None = None) -> None:
        super().__init__(f"Token id {token_id} is out of vocabulary: ids go from 0 to {vocab_size - 1}.", param=param)


class UnsupportedOperation(BadRequest):
    """The model exists and cannot do what this endpoint needs."""


class Unauthorized(ServingError):
    """The API key is missing or wrong."""

    status = 401
    type = "AuthenticationError"


class NotFound(ServingError):
    """No such path."""

    status = 404
    type = "NotFoundError"


class ModelNotFound(NotFound):
    """No such model at this endpoint."""

    def __init__(self, *, model: str, known: list[str]) -> None:
        names = ", ".join(f"`{name}`" for name in known) or "none"
        super().__init__(f"The model `{model[:100]}` does not exist here. Models of this endpoint: {names}.", param="model")


class MethodNotAllowed(ServingError):
    """The path exists, with other methods."""

    status = 405
    type = "MethodNotAllowedError"


class BodyTooLarge(ServingError):
    """The body is over `[server] max_body_bytes`."""

    status = 413
    type = "RequestTooLargeError"

    def __init__(self, *, limit: int) -> None:
        super().__init__(f"The request body is over the limit of {limit} bytes ([server] max_body_bytes).")


class Overloaded(ServingError):
    """The queue is full. `Retry-After` says when it is worth trying again, in whole seconds."""

    status = 429
    type = "RateLimitError"

    def __init__(self, message: str, *, retry_after_s: int, reason: str) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after_s)})
        self.reason = reason


class HeaderTooLarge(ServingError):
    """The request's head, its first line and all headers, is longer than the server takes."""

    status = 431
    type = "BadRequestError"

    def __init__(self, *, limit: int) -> None:
        super().__init__(f"The request's headers are over the limit of {limit} bytes.")


class ClientGone(ServingError):
    """The client left before the answer; seen in metrics and logs only."""

    status = 499
    type = "ClientClosedRequest"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


class InternalError(ServingError):
    """A fault of the server; the text is safe to show."""


class NonFiniteOutput(InternalError):
    """The model gave NaN or infinity: an answer with null in it would be worse than none."""


class StepFailed(InternalError):
    """The model raised on this request, and on it alone."""


class NotSupported(ServingError):
    """Known, and not served here."""

    status = 501
    type = "NotImplementedError"


class EngineUnavailable(ServingError):
    """The engine is loading, dead or stuck; trying again later is right."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_s: int = 2) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after_s)})


class Draining(ServingError):
    """The server is going down and takes no new work."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", headers={"retry-after": "5", "connection": "close"})


class DeadlineExceeded(ServingError):
    """The request's own deadline passed before its answer was ready."""

    status = 504
    type = "DeadlineExceededError"

    def __init__(self, message: str = "The request's deadline passed before its answer was ready.") -> None:
        super().__init__(message)


# What an engine may say went wrong with a request. The engine sends the name and the text; both sides share this table.
_ENGINE_ERRORS: dict[str, type[ServingError]] = {
    kind.__name__: kind for kind in (BadRequest, InternalError, NonFiniteOutput, StepFailed, DeadlineExceeded, EngineUnavailable)
}


def engine_error(kind: str, message: str) -> ServingError:
    """The error that an engine reported by class name; an unknown name is an InternalError."""
    return _ENGINE_ERRORS.get(kind, InternalError)(message)

"""The HTTP side: Litestar inside a pure ASGI shell. Nothing here knows an endpoint by name, or an engine."""

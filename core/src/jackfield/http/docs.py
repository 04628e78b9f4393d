"""`/docs` and `/openapi.json`: the page's assets lie in the package, already compressed, and nothing is loaded from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from litestar import Request
from litestar.handlers import HTTPRouteHandler, get
from litestar.response.base import ASGIResponse

from jackfield.errors import NotFound

__all__ = ["docs_handlers"]

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jackfield</title>
<link rel="icon" href="{root}/docs/favicon-32x32.png">
<link rel="stylesheet" href="{root}/docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="{root}/docs/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({{
  url: "{root}/openapi.json", dom_id: "#page", deepLinking: true, defaultModelsExpandDepth: 0, docExpansion: "list",
  validatorUrl: null, tryItOutEnabled: true,
}});
</script>
</body>
</html>
"""


def docs_handlers(document: bytes, *, root_path: str) -> list[HTTPRouteHandler]:
    """Handlers of the document, the page and its assets. root_path: a proxy's prefix, which the page's links need."""
    page = _PAGE.format(root=root_path.rstrip("/")).encode()
    folder = files("jackfield.http") / "assets"
    assets = {name: (folder / f"{name}.gz").read_bytes() for name in _ASSETS}

    @get("/openapi.json", include_in_schema=False)
    async def openapi() -> ASGIResponse:
        return ASGIResponse(body=document, media_type="application/json", status_code=200)

    @get("/docs", include_in_schema=False)
    async def docs() -> ASGIResponse:
        return ASGIResponse(body=page, media_type="text/html", status_code=200)

    @get("/docs/{asset:str}", include_in_schema=False)
    async def asset(request: Request[Any, Any, Any]) -> ASGIResponse:
        name = str(request.path_params["asset"])
        if name not in assets:
            raise NotFound(f"There is no asset {name[:100]!r}.")
        headers = {"content-encoding": "gzip", "cache-control": "max-age=86400"}
        return ASGIResponse(body=assets[name], media_type=_ASSETS[name], status_code=200, headers=headers)

    return [openapi, docs, asset]

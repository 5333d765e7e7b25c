"""The page at / and its files: static, from the package, and nothing from anywhere else.

The files hold no data and no key, so they need none; what the pages show they ask of the guarded
API with the key that the person types in.
"""

from __future__ import annotations

import importlib.resources

from fastapi import APIRouter, Request, Response

from jaxserve.server.errors import ApiError

router = APIRouter(include_in_schema=False)

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}


def _load() -> dict[str, tuple[bytes, str]]:
    """Every file by name, with its media type: names from requests never reach a file system."""
    folder = importlib.resources.files("jaxserve.server") / "static"
    files = {}
    for file in folder.iterdir():
        kind = _KINDS.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            files[file.name] = (file.read_bytes(), kind)
    return files


_FILES = _load()


def _file(name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, "There is no such file here.", "not_found")
    content, kind = _FILES[name]
    return Response(content, headers=_HEADERS, media_type=f"{kind}; charset=utf-8")


@router.get("/")
async def chat_page(request: Request):
    return _file("index.html")


@router.get("/dashboard")
async def dashboard_page(request: Request):
    return _file("dashboard.html")


@router.get("/static/{name}")
async def static_file(request: Request, name: str):
    return _file(name)

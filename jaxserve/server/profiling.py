"""POST /debug/profile: a trace of the device for some seconds. Served with --profile_dir only.

Whoever holds a key may ask for one: a trace names programs and operations, no text, and costs
everybody some speed while it lasts. So traces are short, one at a time, and few.
"""

from __future__ import annotations

import pathlib
import time
from typing import Annotated

import pydantic
from fastapi import APIRouter, Request

from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import Body
from jaxserve.server.service import service_of

router = APIRouter()

MAX_SECONDS = 30.0
MAX_KEPT = 16  # traces in the folder; some are hundreds of MB


class ProfileRequest(Body):
    """POST /debug/profile."""

    seconds: Annotated[float, pydantic.Field(gt=0, le=MAX_SECONDS)] = 3.0


@router.post("/debug/profile", **takes(ProfileRequest))
async def profile(request: Request):
    """Traces the device; answers when the trace is written. See it with TensorBoard or Perfetto."""
    service = service_of(request)
    body = await service.parse(request, ProfileRequest)
    folder = pathlib.Path(service.config.profile_dir)
    kept = await service.in_thread(_count, folder)
    if kept >= MAX_KEPT:
        message = f"There are {kept} traces already; the server's owner must take some away."
        raise ApiError(409, message, "too_many_profiles")
    if service.profiling.locked():
        raise ApiError(409, "Another trace is being made.", "busy", retry_after=body.seconds)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{request.state.request_id[:8]}"
    async with service.profiling:
        await service.engine.profile(folder / name, body.seconds)
    return json_response({"name": name, "seconds": body.seconds})


def _count(folder: pathlib.Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return sum(1 for _ in folder.iterdir())

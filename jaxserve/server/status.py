"""Probes and facts: /live, /ready, /health, /metrics, /version, /v1/models.

Live: the process can still do its work (an orchestrator restarts it when not). Ready: send it
traffic now. Health: live, and past its start-up. An idle engine is healthy; one that has work and
finished no step for its documented limit is stuck, and says 503 on all three.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from jaxserve.obs import manifest
from jaxserve.server import embeddings
from jaxserve.server.errors import ApiError, json_response, quote
from jaxserve.server.service import Service, caller_of, service_of

router = APIRouter()


def _report(service: Service, good_states: tuple[str, ...]) -> Response:
    health = service.engine.health()
    content = {
        "status": health.state,
        "message": health.message,
        "seconds_since_step": health.seconds_since_step,
    }
    good = health.state in good_states
    headers = {"Cache-Control": "no-store"} | ({} if good else {"Retry-After": "5"})
    return json_response(content, status=200 if good else 503, headers=headers)


@router.get("/live")
async def live(request: Request):
    """200 unless the engine is dead or stuck."""
    return _report(service_of(request), ("starting", "ready", "draining"))


@router.get("/ready")
async def ready(request: Request):
    """200 while new requests are welcome."""
    return _report(service_of(request), ("ready",))


@router.get("/health")
async def health(request: Request):
    """200 while the engine works, draining included."""
    return _report(service_of(request), ("ready", "draining"))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request):
    """Prometheus text: jaxserve:* and, for existing dashboards, the same values as vllm:*."""
    text, kind = await service_of(request).in_thread(service_of(request).metrics.render)
    return Response(text, headers={"Content-Type": kind, "Cache-Control": "no-store"})


@router.get("/stats")
async def stats(request: Request):
    """The engine's gauges and counters as JSON, for the dashboard, and how tenants stand: by the
    digests of their keys, with the caller's own marked."""
    engine = service_of(request).engine
    own = caller_of(request).tenant
    health = engine.health()
    return json_response(
        {
            "health": {"status": health.state, "message": health.message},
            "engine": dataclasses.asdict(engine.stats()),
            "tenants": [
                dataclasses.asdict(standing) | {"you": standing.tenant == own}
                for standing in engine.standings()
            ],
        }
    )


@router.get("/version")
async def version(request: Request):
    """The package's version, and what this run is made of: versions, hashes, settings, hardware."""
    made_of = manifest.for_clients(service_of(request).engine.manifest)
    return json_response({"version": importlib.metadata.version("jaxserve"), **made_of})


def _model(service: Service) -> dict:
    name = service.engine.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "jaxserve",
        "root": name,
        "parent": None,
        "max_model_len": service.engine.max_model_len,
        "embeddings": embeddings.card(service),
    }


@router.get("/v1/models")
async def models(request: Request):
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str):
    """Facts of one model."""
    service = service_of(request)
    if name != service.engine.model_name:
        message = f"The model {quote(name)} is not served here; see /v1/models."
        raise ApiError(404, message, "model_not_found", "model")
    return json_response(_model(service))

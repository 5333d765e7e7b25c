"""POST /v1/embeddings: the served model's own hidden states, pooled over each input.

The model was trained to continue text, not to compare it: these vectors are what it has, useful
for probing and rough search, and no match for a model made for embeddings. Answers and the model's
card say so ("pooling", "trained_for_embeddings": false). Vectors have length 1.
"""

from __future__ import annotations

import base64

import numpy as np
from fastapi import APIRouter, Request, Response

from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.generation import Choice, collect, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import EmbeddingsRequest
from jaxserve.server.service import Service, service_of
from jaxserve.types import EngineFailed

router = APIRouter()


@router.post("/v1/embeddings", **takes(EmbeddingsRequest))
async def embeddings(request: Request):
    """One vector for each input."""
    service = service_of(request)
    body = await service.parse(request, EmbeddingsRequest)
    service.check_model(body.model)
    size = service.engine.hidden_size
    if body.dimensions not in (None, size):
        message = (
            f"dimensions={body.dimensions}: vectors of this model have {size} and mean nothing "
            "when cut; leave dimensions out"
        )
        raise ApiError(400, message, "unsupported_value", "dimensions")
    params = service.open_for(body.params())
    special = body.add_special_tokens is not False
    prompts = await service.encode_prompts(body.input, special=special, field="input")
    work = work_of(request, "embd-", prompts, params, body)
    choices, tally = await run_while_connected(request, collect(service, work))
    content = {
        "object": "list",
        "model": service.engine.model_name,
        "data": None,
        "usage": {"prompt_tokens": tally.prompt_tokens, "total_tokens": tally.prompt_tokens},
        "pooling": params.pooling,
        "trained_for_embeddings": False,
    }
    return await service.in_thread(_answer, content, choices, body.encoding_format == "base64")


def _answer(content: dict, choices: list[Choice], as_text: bool) -> Response:
    """For a thread: a thousand vectors are millions of digits."""
    return json_response(content | {"data": [_entry(choice, as_text) for choice in choices]})


def _entry(choice: Choice, as_text: bool) -> dict:
    vector_D = _unit(choice)
    shown = base64.b64encode(vector_D.astype("<f4").tobytes()).decode() if as_text else None
    return {
        "object": "embedding",
        "index": choice.index,
        "embedding": shown if as_text else vector_D.tolist(),
    }


def _unit(choice: Choice) -> np.ndarray:
    """The pooled vector at length 1, float32 [D]. Raises ApiError when there is none."""
    if choice.pooled is None:
        message = f"input {choice.index} was not finished: {choice.finish_reason}"
        raise ApiError(503, message, "timeout", "input", retry_after=1)
    norm = np.linalg.norm(choice.pooled)
    if not np.isfinite(norm) or norm == 0:
        raise EngineFailed("the model's hidden states were not finite")
    return choice.pooled / np.float32(norm)


def card(service: Service) -> dict:
    """What /v1/models says about it."""
    return {
        "dimensions": service.engine.hidden_size,
        "pooling": ["mean", "last"],
        "trained_for_embeddings": False,
    }

"""The model's tokenizer over HTTP: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import DetokenizeRequest, TokenizeRequest
from jaxserve.server.service import Service, service_of

router = APIRouter()


@router.post("/tokenize", **takes(TokenizeRequest))
async def tokenize(request: Request):
    """Token ids of a prompt, or of messages through the chat template."""
    service = service_of(request)
    body = await service.parse(request, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", "invalid_value", "prompt")
    if body.messages is not None:
        tokens = await encode_chat(service, body)
        encode = lambda: tokens
    else:
        service.check_chars(len(body.prompt), "prompt")
        special = body.add_special_tokens is not False
        encode = functools.partial(service.tokenizer.encode, body.prompt, special)
    return await service.in_thread(_tokens, service, encode, bool(body.return_token_strs))


def _tokens(service: Service, encode: Callable[[], list[int]], with_texts: bool) -> Response:
    """The answer, for a thread: a million ids take a while to make, to write and to forget."""
    tokens = encode()
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": service.engine.max_model_len,
            "tokens": tokens,
            "token_strs": list(map(service.tokenizer.token_text, tokens)) if with_texts else None,
        }
    )


@router.post("/detokenize", **takes(DetokenizeRequest))
async def detokenize(request: Request):
    """Text of token ids, special tokens shown."""
    service = service_of(request)
    body = await service.parse(request, DetokenizeRequest)
    service.check_model(body.model)
    return await service.in_thread(_text, service, body.tokens)


def _text(service: Service, tokens: list[int]) -> Response:
    """The answer, for a thread."""
    service.check_ids(tokens, "tokens")
    return json_response({"prompt": service.tokenizer.decode(tokens, False)})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request):
    """The tokens that have names, and the chat template: with the two above, all that an
    evaluation harness needs of the tokenizer."""
    tokenizer = service_of(request).tokenizer
    named = {name: text or None for name, text in tokenizer.named_tokens.items()}
    return json_response({**named, "chat_template": tokenizer.chat_template})

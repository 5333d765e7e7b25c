"""The model's tokenizer over HTTP: /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from fastapi import APIRouter, Request

from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import DetokenizeRequest, TokenizeRequest
from jaxserve.server.service import service_of

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
    else:
        service.check_chars(len(body.prompt), "prompt")
        special = body.add_special_tokens is not False
        tokens = await service.in_thread(service.tokenizer.encode, body.prompt, special)
    texts = None
    if body.return_token_strs:
        texts = [service.tokenizer.token_text(token) for token in tokens]
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": service.engine.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }
    )


@router.post("/detokenize", **takes(DetokenizeRequest))
async def detokenize(request: Request):
    """Text of token ids, special tokens shown."""
    service = service_of(request)
    body = await service.parse(request, DetokenizeRequest)
    service.check_model(body.model)
    service.check_ids(body.tokens, "tokens")
    text = await service.in_thread(service.tokenizer.decode, body.tokens, False)
    return json_response({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request):
    """The tokens that have names, and the chat template: with the two above, all that an
    evaluation harness needs of the tokenizer."""
    tokenizer = service_of(request).tokenizer
    named = {name: text or None for name, text in tokenizer.named_tokens.items()}
    return json_response({**named, "chat_template": tokenizer.chat_template})

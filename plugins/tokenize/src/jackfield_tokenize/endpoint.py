"""The endpoint: three routes that never meet the engine, so it serves every model, loaded or not."""

from __future__ import annotations

from typing import Any

from jackfield import BadRequest, ChatPrompt, Context, Endpoint, Prompt, Route, TextPrompt, TokensPrompt, template_messages
from jackfield_tokenize.protocol import DetokenizeRequest, DetokenizeResponse, InfoRequest, TokenizeRequest, TokenizeResponse

__all__ = ["TokenizeEndpoint"]

AnyRequest = TokenizeRequest | DetokenizeRequest | InfoRequest
AnyResponse = TokenizeResponse | DetokenizeResponse | dict[str, Any]


class TokenizeEndpoint(Endpoint[AnyRequest, AnyResponse]):
    """Texts to token ids and back."""

    name = "tokenize"
    id_prefix = "tokenize"
    routes = (
        Route(
            method="POST",
            paths=("/tokenize",),
            request=TokenizeRequest,
            response=TokenizeResponse,
            summary="The token ids of a text or a conversation.",
            example={"prompt": "hello world"},
        ),
        Route(
            method="POST",
            paths=("/detokenize",),
            request=DetokenizeRequest,
            response=DetokenizeResponse,
            summary="The text of token ids.",
            example={"tokens": [72, 73]},
        ),
        Route(
            method="GET",
            paths=("/tokenizer_info",),
            request=InfoRequest,
            response=dict[str, Any],
            summary="The settings of a model's tokenizer.",
            example={},
        ),
    )

    def preprocess(self, ctx: Context[AnyRequest]) -> list[Prompt]:
        request = ctx.request
        if isinstance(request, TokenizeRequest):
            return [_prompt(request)]
        if isinstance(request, DetokenizeRequest):
            return [TokensPrompt(token_ids=request.tokens, with_text=True, param="tokens")]
        return []

    def build_response(self, ctx: Context[AnyRequest]) -> AnyResponse:
        if isinstance(ctx.request, InfoRequest):
            return {"model": ctx.model.id, "max_model_len": ctx.model.card.max_length, **ctx.model.tokenizer_info}
        prompt = ctx.prompts[0]
        if isinstance(ctx.request, DetokenizeRequest):
            return DetokenizeResponse(prompt=prompt.text or "")
        ids = prompt.token_ids
        return TokenizeResponse(count=len(ids), max_model_len=ctx.model.card.max_length, tokens=ids, token_strs=prompt.token_strs)


def _prompt(request: TokenizeRequest) -> Prompt:
    strings = bool(request.return_token_strs)
    if request.chat_template is not None:
        raise BadRequest("Chat templates of a request are refused; the model's own is used.", param="chat_template")
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("One of `prompt` and `messages` is needed, and not both.", param="prompt")
    if request.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(request, name):
                raise BadRequest(f"{name} has no meaning for a prompt, only for messages; leave it out.", param=name)
        special = request.add_special_tokens is not False
        return TextPrompt(text=request.prompt, add_special_tokens=special, with_token_strs=strings, param="prompt")
    assert request.messages is not None
    generation = request.add_generation_prompt if request.add_generation_prompt is not None else not request.continue_final_message
    if generation and request.continue_final_message:
        raise BadRequest("add_generation_prompt and continue_final_message exclude each other.", param="add_generation_prompt")
    return ChatPrompt(
        messages=template_messages(request.messages),
        add_generation_prompt=generation,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        tools=request.tools,
        template_kwargs=request.chat_template_kwargs or {},
        with_token_strs=strings,
        param="messages",
    )

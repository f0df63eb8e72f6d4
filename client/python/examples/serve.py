"""OpenAI-style completions and chats of a transformers model, with K/V on the server and continuous batching.

    pip install aiohttp prometheus_client
    python serve.py Qwen/Qwen3-0.6B --system_prompt "You are brief."      # the server is $FLASHCORE_TARGET
    curl -N localhost:8000/v1/completions -d '{"prompt": "Hello", "stream": true}'
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

One thread runs the model (serving_engine.py): each pass has the new tokens of all active requests, packed.
The system prompt is stored once; each request begins with a fork of it. A request whose client goes away is
dropped before the next pass, and a pass that fails ends its requests only. Without a temperature, the
likeliest token is taken. openai_api.py says what a request may have. Also: /v1/models, /health and /metrics.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
import traceback

import prometheus_client
import torch
import transformers
from aiohttp import web

import flashcore
import flashcore.transformers
from openai_api import Answer, Reader, Refused, error_body, model_card
from serving_engine import FAILED, Engine, Metrics, Unserved, make_request, missing, stop_tokens


@web.middleware
async def errors_as_json(http, handler):
    try:
        return await handler(http)
    except Refused as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPError as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.json_response(error_body(error.reason, "invalid_request_error"), status=error.status,
                                 headers=headers)
    except Exception:
        traceback.print_exc()
        return web.json_response(error_body("a defect of the server", "server_error"), status=500)


class Service:
    """The HTTP API. reader: of openai_api."""

    def __init__(self, engine, reader):
        self.engine, self.reader = engine, reader
        self.created = int(time.time())

    def app(self):
        app = web.Application(middlewares=[errors_as_json])
        app.add_routes([
            web.post("/v1/completions", self.completions), web.post("/v1/chat/completions", self.chats),
            web.get("/v1/models", self.models), web.get("/v1/models/{name:.+}", self.model),
            web.get("/health", self.health), web.get("/metrics", self.metrics)])
        return app

    async def metrics(self, _):
        return web.Response(body=prometheus_client.generate_latest(self.engine.metrics.registry),
                            headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def models(self, _):
        return web.json_response({"object": "list", "data": [model_card(self.reader.name, self.created)]})

    async def model(self, http):
        name = http.match_info["name"]
        if name != self.reader.name:
            raise Refused("model", json.dumps(name), self.reader.name, 404, "model_not_found")
        return web.json_response(model_card(name, self.created))

    async def health(self, _):
        """200 if a request could be answered now."""
        try:
            await asyncio.to_thread(self.engine.client.server_info, timeout=5)
            problem = "" if self.engine.alive() else "the thread of the model has ended"
        except flashcore.Error as error:
            problem = str(error)
        return web.json_response({"status": problem or "ok"}, status=503 if problem else 200)

    async def completions(self, http):
        return await self.serve(http, chat=False)

    async def chats(self, http):
        return await self.serve(http, chat=True)

    async def serve(self, http, chat):
        try:
            body = json.loads(await http.read())
        except (ValueError, RecursionError) as error:
            raise Refused("the body", f"cannot be read: {error}", "JSON in UTF-8") from None
        asked = self.reader.read(body, chat)
        tokens, loop = asyncio.Queue(), asyncio.get_running_loop()
        request = make_request(asked, lambda *found: loop.call_soon_threadsafe(tokens.put_nowait, found))
        answer = Answer(asked, self.reader.name)
        self.engine.submit(request)
        try:
            return await (self.stream if asked.stream else self.whole)(http, answer, tokens)
        finally:  # also where the client has gone: aiohttp then cancels this task
            request.cancelled = True

    def text(self, tokens):
        return self.reader.tokenizer.decode(tokens, skip_special_tokens=True)

    async def whole(self, _, answer, tokens):
        found = []
        while True:
            token, why = await tokens.get()
            if why == FAILED:
                return web.json_response(error_body("the request failed: try again later", "server_error"),
                                         status=503, headers={"Retry-After": "1"})
            if why:
                return web.json_response(answer.whole(self.text(found), why, len(found)))
            found.append(token)

    async def stream(self, http, answer, tokens):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream",
                                               "Cache-Control": "no-cache"})
        await response.prepare(http)
        with contextlib.suppress(ConnectionResetError):  # the client has gone
            await self.send_all(response, answer, tokens)
        return response

    async def send_all(self, response, answer, tokens):
        found, sent, why = [], "", None
        while not why:
            token, why = await tokens.get()
            if why == FAILED:
                await self.send(response, error_body("the request failed: try again later", "server_error"))
                return
            if token is not None:
                found.append(token)
            text = self.text(found)
            if why or not text.endswith("\ufffd"):  # a part of a character
                await self.send(response, answer.chunk(text[len(sent):], why))
                sent = text
        if answer.asked.include_usage:
            await self.send(response, answer.usage_chunk(len(found)))
        await response.write(b"data: [DONE]\n\n")

    @staticmethod
    async def send(response, message):
        await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")


def load(name, implementation):
    """The model and its tokenizer. Raises Unserved."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
        if lacks := missing(model):
            raise Unserved("; ".join(lacks))
        model.set_attn_implementation(implementation)
    except (Unserved, OSError, ValueError, KeyError) as error:
        raise Unserved(f"{name} cannot be served: {error}") from error
    return model, tokenizer


def make_service(args, client):
    model, tokenizer = load(args.model, flashcore.transformers.register(client))
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    reader = Reader(tokenizer, args.model, config.vocab_size, positions, args.system_prompt)
    engine = Engine(model, client, reader.prefixes(), Metrics(), args.max_batch_tokens,
                    stop_tokens(model, tokenizer))
    return Service(engine, reader)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", help="a name on the hub, or a folder")
    parser.add_argument("--system_prompt", default="", help="text, or @file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_batch_tokens", type=int, default=512, help="of one pass of the model")
    args = parser.parse_args()
    if args.system_prompt.startswith("@"):
        with open(args.system_prompt[1:], encoding="utf-8") as file:
            args.system_prompt = file.read()
    try:
        with flashcore.connect() as client:
            service = make_service(args, client)
            try:
                web.run_app(service.app(), host=args.host, port=args.port, handler_cancellation=True)
            finally:
                service.engine.close()
    except (flashcore.Error, Refused, Unserved) as error:
        sys.exit(f"serve.py: {error}")


if __name__ == "__main__":
    main()

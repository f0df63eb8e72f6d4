"""OpenAI-style /v1/completions over a model of transformers, with K/V on the server and continuous batching.

    pip install aiohttp prometheus_client
    python serve.py Qwen/Qwen3-0.6B --system_prompt "You are brief."      # the server is $FLASHCORE_TARGET
    curl -N localhost:8000/v1/completions -d '{"prompt": "Hello", "stream": true}'

One thread runs the model: each pass has the new tokens of all active requests, packed, and is one request to
the server in each layer. The system prompt is stored once; each request begins with a fork of it. A request
whose client goes away is dropped before the next pass. GET /metrics has Prometheus's metrics.
"""

import argparse
import asyncio
import dataclasses
import json
import queue
import threading
import uuid

import prometheus_client
import torch
import transformers
from aiohttp import web

import flashcore
import flashcore.transformers

FAILED = object()  # in place of a token


class Metrics:
    def __init__(self):
        self.registry = prometheus_client.CollectorRegistry()

        def metric(kind, name, text):
            return kind(f"completions_{name}", text, registry=self.registry)

        self.active = metric(prometheus_client.Gauge, "active", "Requests that have a sequence.")
        self.passes = metric(prometheus_client.Counter, "passes", "Forward passes of the model.")
        self.tokens = metric(prometheus_client.Counter, "tokens", "Tokens generated.")
        self.cancelled = metric(prometheus_client.Counter, "cancelled", "Requests whose client went away.")
        self.failed = metric(prometheus_client.Counter, "failed", "Requests that failed.")


@dataclasses.dataclass(eq=False)
class Request:
    """Of the thread of the model, but for `cancelled`, which any thread may set, and `put`."""

    todo: list  # tokens that have not been through the model
    left: int  # tokens to generate
    temperature: float
    generator: torch.Generator
    put: object  # called with each token, None at the end, FAILED
    cancelled: bool = False
    sequence: object = None
    length: int = 0  # tokens in the sequence


class Engine:
    """Runs the model in a thread of its own."""

    def __init__(self, model, client, system_tokens, metrics, max_batch_tokens=512, stop=()):
        self.model, self.client, self.metrics = model, client, metrics
        self.max_batch_tokens, self.stop_tokens = max_batch_tokens, frozenset(stop)
        self.arrivals = queue.SimpleQueue()
        self.active = []
        self.closing = False
        self.system_tokens = system_tokens
        self.store_prefix()
        self.thread = threading.Thread(target=self.run, name="model")
        self.thread.start()

    def store_prefix(self):
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.prefix = self.client.create_sequence(
            config.num_hidden_layers, config.num_key_value_heads, head_dim, dtype=self.model.dtype)
        for start in range(0, len(self.system_tokens), self.max_batch_tokens):
            self.forward([(self.prefix, start, self.system_tokens[start:start + self.max_batch_tokens])])

    def fork_prefix(self):
        try:
            return self.prefix.fork()
        except flashcore.SequenceLost:  # it expired, or the server has restarted
            self.store_prefix()
            return self.prefix.fork()

    def close(self):
        self.closing = True
        self.arrivals.put(None)
        self.thread.join()
        self.prefix.delete()

    def submit(self, request):
        self.arrivals.put(request)

    def forward(self, work):
        """Logits [spans, words] after the last token of each (sequence, its length, new tokens)."""
        counts = [len(tokens) for _, _, tokens in work]
        positions = [place for _, length, tokens in work for place in range(length, length + len(tokens))]
        cache = flashcore.transformers.PackedCache([sequence for sequence, _, _ in work], counts, self.client)
        last = torch.tensor(counts).cumsum(0) - 1
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([[token for _, _, tokens in work for token in tokens]]),
                              position_ids=torch.tensor([positions]), cache=cache,
                              logits_to_keep=last).logits[0].float()

    def run(self):
        while not self.closing or self.active:
            self.admit()
            self.drop(lambda request: request.cancelled or self.closing, FAILED, self.metrics.cancelled)
            if self.active:
                self.step()
            self.metrics.active.set(len(self.active))

    def admit(self):
        """Takes what has arrived; waits if there is nothing else to do."""
        while not self.arrivals.empty() or not (self.active or self.closing):
            request = self.arrivals.get()
            if request is None:
                return
            try:
                request.sequence = self.fork_prefix()
            except flashcore.Error:
                self.metrics.failed.inc()
                request.put(FAILED)
                continue
            request.length = len(self.system_tokens)
            self.active.append(request)

    def step(self):
        """One pass: each request's next tokens, as far as the batch has room."""
        room, work = self.max_batch_tokens, []
        for request in self.active:
            tokens = request.todo[:room]
            if tokens:
                work.append((request, tokens))
                room -= len(tokens)
        # Who was left out, or did the least, comes first next time.
        served = {id(request) for request, _ in work}
        self.active.sort(key=lambda request: id(request) in served)
        try:
            logits = self.forward([(request.sequence, request.length, tokens) for request, tokens in work])
        except flashcore.Error as error:
            print(f"a pass failed: {error}", flush=True)
            self.drop(lambda request: id(request) in served, FAILED, self.metrics.failed)
            return
        self.metrics.passes.inc()
        for (request, tokens), row in zip(work, logits):
            request.length += len(tokens)
            del request.todo[:len(tokens)]
            if not request.todo:
                self.answer(request, row)
        self.drop(lambda request: not request.left, None)

    def answer(self, request, logits):
        if request.temperature:
            share = torch.softmax(logits / request.temperature, dim=-1)
            token = torch.multinomial(share, 1, generator=request.generator).item()
        else:
            token = logits.argmax().item()
        request.left -= 1
        if token in self.stop_tokens:
            request.left = 0
        else:
            self.metrics.tokens.inc()
            request.put(token)
        request.todo = [token]

    def drop(self, which, result, counter=None):
        dropped = [request for request in self.active if which(request)]
        self.active = [request for request in self.active if not which(request)]
        for request in dropped:
            try:
                request.sequence.delete()
            except flashcore.Error as error:
                print(f"a sequence is left to expire: {error}", flush=True)
            if counter is not None:
                counter.inc()
            request.put(result)


class Service:
    def __init__(self, engine, tokenizer, name):
        self.engine, self.tokenizer, self.name = engine, tokenizer, name

    def app(self):
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.completions), web.get("/metrics", self.metrics)])
        return app

    async def metrics(self, _):
        return web.Response(body=prometheus_client.generate_latest(self.engine.metrics.registry),
                            headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    def read(self, body):
        """(tokens, max_tokens, temperature, seed, stream) of a request's JSON. Raises ValueError."""
        def field(name, default, kinds, allowed, good):
            value = body.get(name, default)
            fits = isinstance(value, kinds) and isinstance(value, bool) is (kinds is bool)
            if not fits or not good(value):
                raise ValueError(f"{name}: {json.dumps(value)}; allowed: {allowed}")
            return value

        if not isinstance(body, dict):
            raise ValueError("the body; allowed: a JSON object")
        words = self.engine.model.config.vocab_size
        prompt = field(
            "prompt", None, (str, list), f"text, or a list of tokens below {words}",
            lambda p: p and (isinstance(p, str)
                             or all(type(token) is int and 0 <= token < words for token in p)))
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=False)
            if not prompt:
                raise ValueError("prompt: has no tokens; allowed: at least one")
        return (prompt, field("max_tokens", 16, int, "1 to 4096", lambda n: 1 <= n <= 4096),
                field("temperature", 0, (int, float), "0 to 2", lambda t: 0 <= t <= 2),
                field("seed", 0, int, "0 to 2**63 - 1", lambda s: 0 <= s < 2**63),
                field("stream", False, bool, "true, false", lambda _: True))

    async def completions(self, http):
        try:
            prompt, max_tokens, temperature, seed, stream = self.read(await http.json())
        except ValueError as error:  # JSON that cannot be read is one, too
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}},
                                     status=400)
        tokens, loop = asyncio.Queue(), asyncio.get_running_loop()
        request = Request(list(prompt), max_tokens, temperature, torch.Generator().manual_seed(seed),
                          lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token))
        identity = f"cmpl-{uuid.uuid4().hex}"
        self.engine.submit(request)
        try:
            return await (self.stream if stream else self.whole)(http, identity, tokens)
        finally:  # also where the client has gone: aiohttp then cancels this task
            request.cancelled = True

    def message(self, identity, text, finish):
        return {"id": identity, "object": "text_completion", "model": self.name,
                "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}]}

    async def whole(self, _, identity, tokens):
        found = []
        while (token := await tokens.get()) is not None:
            if token is FAILED:
                return web.json_response({"error": {"message": "try again later", "type": "server_error"}},
                                         status=503)
            found.append(token)
        return web.json_response(self.message(identity, self.tokenizer.decode(found), "stop"))

    async def stream(self, http, identity, tokens):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        found, sent = [], ""
        while (token := await tokens.get()) is not None:
            if token is FAILED:
                await response.write(b'data: {"error": {"type": "server_error"}}\n\n')
                return response
            found.append(token)
            text = self.tokenizer.decode(found)
            if not text.endswith("\ufffd"):  # a part of a character
                await self.send(response, self.message(identity, text[len(sent):], None))
                sent = text
        await self.send(response, self.message(identity, self.tokenizer.decode(found)[len(sent):], "stop"))
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def send(response, message):
        await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", help="a name on the hub, or a folder")
    parser.add_argument("--system_prompt", default="", help="text, or @file")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_batch_tokens", type=int, default=512, help="of one pass of the model")
    args = parser.parse_args()
    if args.system_prompt.startswith("@"):
        with open(args.system_prompt[1:], encoding="utf-8") as file:
            args.system_prompt = file.read()

    client = flashcore.connect()
    name = flashcore.transformers.register(client)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation=name).eval()
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    system_tokens = tokenizer.encode(args.system_prompt) if args.system_prompt else []
    engine = Engine(model, client, system_tokens, Metrics(), args.max_batch_tokens, stop)
    try:
        web.run_app(Service(engine, tokenizer, args.model).app(), host="127.0.0.1", port=args.port,
                    handler_cancellation=True)
    finally:
        engine.close()
        client.close()


if __name__ == "__main__":
    main()

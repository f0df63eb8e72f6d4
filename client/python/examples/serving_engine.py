"""The thread that runs the model of serve.py, with continuous batching: each pass has the new tokens of all
active requests, packed, and is one request to the server in each layer.
"""

import dataclasses
import inspect
import queue
import threading

import prometheus_client
import torch

import flashcore
import flashcore.transformers

FAILED = "failed"  # in place of "stop" and "length"
GREEDY_BELOW = 1e-4  # a lower temperature takes the likeliest token, and would overflow float32


class Unserved(Exception):
    """The model cannot be served: says what it lacks."""


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
    """Belongs to the thread of the model, except `cancelled`, which any thread may set, and `put`."""

    todo: list  # tokens that have not been through the model
    left: int  # tokens to generate
    temperature: float
    top_p: float
    generator: torch.Generator
    put: object  # called with (token, None) for each, and at the end with (None, why it ended)
    cancelled: bool = False
    ended: "str | None" = None
    sequence: object = None
    length: int = 0  # tokens in the sequence


def stop_tokens(model, tokenizer):
    """All that end an answer: of the generation config, which may have several, and of the tokenizer."""
    stops = set()
    for owner in (model.generation_config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        stops.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return stops


def missing(model):
    """The feature that a model lacks to be served here; empty if none is known."""
    lacks = []
    if "position_ids" not in inspect.signature(model.forward).parameters:
        lacks.append("it takes no position_ids, so that prompts cannot be packed")
    if not getattr(model, "_supports_attention_backend", False):
        lacks.append("its attention does not go through transformers' attention interface")
    return lacks


def sample(logits, request):
    """A token, from logits [words]."""
    if logits.isnan().any():
        raise ValueError("the model's logits are NaN")
    if request.temperature < GREEDY_BELOW:
        return logits.argmax().item()
    share = torch.softmax((logits - logits.max()) / request.temperature, dim=-1)
    if request.top_p < 1:
        ordered, words = share.sort(descending=True)
        share[words[ordered.cumsum(0) - ordered >= request.top_p]] = 0  # of words after enough likelier ones
    return torch.multinomial(share, 1, generator=request.generator).item()


def make_request(asked, put):
    """Makes a request from openai_api's Asked."""
    generator = torch.Generator()
    if asked.seed is None:
        generator.seed()
    else:
        generator.manual_seed(asked.seed)
    return Request(list(asked.tokens), asked.max_tokens, asked.temperature, asked.top_p, generator, put)


class Engine:
    """Runs the model in a thread of its own. prefixes: lists of tokens that many requests begin with: stored
    once. stop: tokens that end an answer. Raises Unserved."""

    def __init__(self, model, client, prefixes, metrics, max_batch_tokens=512, stop=()):
        self.model, self.client, self.metrics = model, client, metrics
        self.max_batch_tokens, self.stop_tokens = max_batch_tokens, frozenset(stop)
        self.arrivals = queue.SimpleQueue()
        self.active = []
        self.closing = False
        self.submitting = threading.Lock()  # no request arrives after closing is set
        self.prefixes = {tuple(tokens): None for tokens in prefixes if tokens}  # their sequences
        self.check()
        for tokens in self.prefixes:
            self.store_prefix(tokens)
        self.thread = threading.Thread(target=self.run, name="model")
        self.thread.start()

    def check(self):
        """Compares a packed pass and the next one with the model's own attention: one that does not use our
        cache, positions or attention differs. Raises Unserved."""
        words = self.model.config.get_text_config().vocab_size
        first, second = [[token % words for token in tokens] for tokens in ((3, 5, 7, 2), (11, 2, 4))]
        sequences = []
        try:
            if lacks := missing(self.model):
                raise Unserved("; ".join(lacks))
            sequences += [self.create_sequence() for _ in range(2)]
            one, other = sequences
            self.forward([(one, 0, first[:2]), (other, 0, second[:2])])
            packed = self.forward([(other, 2, second[2:]), (one, 2, first[2:])])[1]
            wanted = self.own_logits(first)
            error = ((packed - wanted).abs().max() / wanted.std()).item()
            if not error < 0.3:  # far more than rounding is, far less than what was found wrong
                raise Unserved(f"packed prompts move its logits by {error:.2g} standard deviations")
        except Unserved as error:
            raise Unserved(f"{type(self.model).__name__} cannot be served: {error}") from None
        except Exception as error:
            raise Unserved(f"{type(self.model).__name__} cannot be served: {error}") from error
        finally:
            self.delete(sequences)

    def own_logits(self, tokens):
        """After the last of the tokens, with transformers' own attention."""
        implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                return self.model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
        finally:
            self.model.set_attn_implementation(implementation)

    def create_sequence(self):
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return self.client.create_sequence(config.num_hidden_layers, kv_heads, head_dim,
                                           dtype=self.model.dtype)

    def store_prefix(self, tokens):
        sequence = self.create_sequence()
        for start in range(0, len(tokens), self.max_batch_tokens):
            self.forward([(sequence, start, tokens[start:start + self.max_batch_tokens])])
        self.prefixes[tokens] = sequence

    def fork_prefix(self, tokens):
        """A fork of the longest prefix that leaves at least one of `tokens`, and its length."""
        fits = [prefix for prefix in self.prefixes
                if len(prefix) < len(tokens) and list(prefix) == tokens[:len(prefix)]]
        if not fits:
            return self.create_sequence(), 0
        prefix = max(fits, key=len)
        try:
            return self.prefixes[prefix].fork(), len(prefix)
        except flashcore.SequenceLost:  # it expired, or the server has restarted
            self.store_prefix(prefix)
            return self.prefixes[prefix].fork(), len(prefix)

    def close(self):
        with self.submitting:
            self.closing = True
        self.arrivals.put(None)
        self.thread.join()
        self.delete(self.prefixes.values())

    def submit(self, request):
        with self.submitting:
            if not self.closing:
                self.arrivals.put(request)
                return
        request.put(None, FAILED)

    def alive(self):
        return self.thread.is_alive() and not self.closing

    def forward(self, work):
        """Logits [spans, words] after the last token of each (sequence, its length, new tokens)."""
        counts = [len(tokens) for _, _, tokens in work]
        positions = [place for _, length, tokens in work for place in range(length, length + len(tokens))]
        cache = flashcore.transformers.PackedCache([sequence for sequence, _, _ in work], counts, self.client)
        last = torch.tensor(counts).cumsum(0) - 1
        keeps = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        ids = [token for _, _, tokens in work for token in tokens]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]),
                                cache=cache, **({"logits_to_keep": last} if keeps else {})).logits[0]
        return (logits if keeps else logits[last]).float()

    def run(self):
        try:
            while not self.closing or self.active:
                try:
                    self.turn()
                except Exception as error:  # a defect of ours: the requests at hand fail, the thread goes on
                    print(f"a turn failed: {type(error).__name__}: {error}", flush=True)
                    self.fail(self.active)
                self.metrics.active.set(len(self.active))
        finally:
            with self.submitting:
                self.closing = True
            while not self.arrivals.empty():
                request = self.arrivals.get()
                if request is not None:
                    self.tell(request, None, FAILED)

    def turn(self):
        self.admit()
        gone = [request for request in self.active if request.cancelled or self.closing]
        self.metrics.cancelled.inc(len(gone))
        self.drop(gone, FAILED)
        if self.active:
            self.step()

    def admit(self):
        """Takes what has arrived; waits if there is nothing else to do."""
        while not self.arrivals.empty() or not (self.active or self.closing):
            request = self.arrivals.get()
            if request is None:
                return
            if request.cancelled:
                self.metrics.cancelled.inc()
                continue
            try:
                request.sequence, request.length = self.fork_prefix(request.todo)
            except Exception as error:
                print(f"a request failed: {error}", flush=True)
                self.metrics.failed.inc()
                self.tell(request, None, FAILED)
                continue
            del request.todo[:request.length]
            self.active.append(request)

    def step(self):
        """One pass: each request's next tokens, as far as the batch has room."""
        room, work = self.max_batch_tokens, []
        for request in self.active:
            tokens = request.todo[:room]
            if tokens:
                work.append((request, tokens))
                room -= len(tokens)
        # The one that was left out, or did the least, comes first next time.
        served = {id(request) for request, _ in work}
        self.active.sort(key=lambda request: id(request) in served)
        for (request, tokens), logits in zip(work, self.logits(work)):
            try:
                if isinstance(logits, Exception):
                    raise logits
                request.length += len(tokens)
                del request.todo[:len(tokens)]
                if not request.todo:
                    self.answer(request, logits)
            except Exception as error:
                print(f"a request failed: {type(error).__name__}: {error}", flush=True)
                self.fail([request])
        for request in [request for request in self.active if request.ended]:
            self.drop([request], request.ended)

    def logits(self, work):
        """For each (request, its new tokens) the logits after them, or the error. One request may be why a
        pass fails, so each is then tried alone, unless the server is gone."""
        self.metrics.passes.inc()
        try:
            return self.forward([(request.sequence, request.length, tokens) for request, tokens in work])
        except Exception as error:
            print(f"a pass failed: {type(error).__name__}: {error}", flush=True)
            if len(work) == 1 or isinstance(error, (flashcore.Unavailable, flashcore.DeadlineExceeded)):
                return [error] * len(work)
        return [self.logits_alone(request, tokens) for request, tokens in work]

    def logits_alone(self, request, tokens):
        """After a pass that failed, and may have appended some layers."""
        try:
            request.sequence.truncate(request.length)
            return self.forward([(request.sequence, request.length, tokens)])[0]
        except Exception as error:
            return error

    def answer(self, request, logits):
        token = sample(logits, request)
        request.left -= 1
        if token in self.stop_tokens:
            request.ended = "stop"
            return
        self.metrics.tokens.inc()
        self.tell(request, token, None)
        request.todo = [token]
        if not request.left:
            request.ended = "length"

    def fail(self, requests):
        self.metrics.failed.inc(len(requests))
        self.drop(list(requests), FAILED)

    def drop(self, requests, why):
        dropped = {id(request) for request in requests}
        self.active = [request for request in self.active if id(request) not in dropped]
        self.delete([request.sequence for request in requests])
        for request in requests:
            self.tell(request, None, why)

    @staticmethod
    def delete(sequences):
        for sequence in sequences:
            try:
                sequence.delete()
            except Exception as error:
                print(f"a sequence is left to expire: {error}", flush=True)

    @staticmethod
    def tell(request, token, why):
        try:
            request.put(token, why)
        except RuntimeError:  # its event loop is closed: nobody waits any more
            request.cancelled = True

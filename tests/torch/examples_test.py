"""The examples of the Python package that need PyTorch, on a real server."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.error
import urllib.request

from models import NO_TORCH, VOCABULARY, causal_model, flashcore, harness, prompts

import tokenizers
import torch
import transformers

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    import serve
    from aiohttp import web
except ImportError as error:
    print(f"skipped: {sys.executable}: {error}; the examples need aiohttp and prometheus_client")
    sys.exit(NO_TORCH)

CLIENTS = 32
SYSTEM_TOKENS = 2000


class Numbers:
    """A tokenizer whose text is the numbers of the tokens."""

    def encode(self, text, **_):
        return [int(number) for number in text.split()]

    def decode(self, tokens):
        return "".join(f"{token} " for token in tokens)


class Running:
    """serve.py's service in threads of this process, on a free port."""

    def __init__(self, client, system_tokens=()):
        self.model = causal_model("Llama", max_position_embeddings=8192)
        self.model.set_attn_implementation(flashcore.transformers.register(client))
        self.engine = serve.Engine(self.model, client, list(system_tokens), serve.Metrics())
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.port = self.call(self._start())

    async def _start(self):
        self.runner = web.AppRunner(serve.Service(self.engine, Numbers(), "tiny").app(),
                                    handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return self.runner.addresses[0][1]

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(harness.PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()
        self.call(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def post(self, **body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions",
                                         json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=harness.PATIENCE) as response:
            return response.read().decode()

    def ask(self, tokens, stream=False, **body):
        """The tokens of the answer."""
        said = self.post(prompt=tokens, stream=stream, **body)
        if not stream:
            return Numbers().encode(json.loads(said)["choices"][0]["text"])
        *events, done = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
        assert done == "[DONE]", said
        return Numbers().encode("".join(json.loads(event)["choices"][0]["text"] for event in events))

    def metric(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as response:
            lines = response.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server())
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))
        cls.addClassCleanup(flashcore.set_default_client, None)

    def alone(self, model, tokens, count):
        """What generate says, or None where rounding may change a token."""
        with torch.no_grad(), flashcore.transformers.FlashCoreCache(model.config) as cache:
            ids = torch.tensor([tokens])
            found = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache,
                                   max_new_tokens=count, do_sample=False, return_dict_in_generate=True,
                                   output_logits=True)
        for logits in found.logits:
            first, second = logits[0].float().topk(2).values.tolist()
            if first - second < 0.05 * logits.float().std().item():
                return None
        return found.sequences[0, len(tokens):].tolist()

    @contextlib.contextmanager
    def held(self, service, count, before_pass=lambda width: None):
        """Holds the first pass of the model until `count` requests have come, so that later ones serve all of
        them. before_pass: called with the number of requests of each pass. Yields a list of these."""
        engine, widths, arrived, all_there = service.engine, [], [], threading.Event()
        submit, forward = engine.submit, engine.forward

        def counted_submit(request):
            submit(request)
            arrived.append(request)
            if len(arrived) == count:
                all_there.set()

        def held_forward(work):
            all_there.wait(harness.PATIENCE)
            before_pass(len(work))
            widths.append(len(work))
            return forward(work)

        engine.submit, engine.forward = counted_submit, held_forward
        yield widths
        engine.submit, engine.forward = submit, forward

    def test_many_clients_get_the_answers_of_one(self):
        count = 6
        with Running(self.client) as service:
            wanted = {}
            for seed in range(100, 100 + 10 * CLIENTS):
                tokens = prompts(4 + seed % 9, seed=seed)[0].tolist()
                answer = self.alone(service.model, tokens, count)
                if answer is not None:
                    wanted[tuple(tokens)] = answer
                if len(wanted) == CLIENTS:
                    break
            self.assertEqual(len(wanted), CLIENTS)
            threads = concurrent.futures.ThreadPoolExecutor(CLIENTS)
            with self.held(service, CLIENTS) as widths, threads as pool:
                answers = list(pool.map(lambda asked: service.ask(list(asked[1]), stream=bool(asked[0] % 2),
                                                                  max_tokens=count), enumerate(wanted)))
            self.assertEqual(answers, list(wanted.values()))
            self.assertEqual(max(widths), CLIENTS)
            self.assertEqual(service.metric("completions_tokens_total"), CLIENTS * count)
            self.assertEqual(len(self.client.list_sequences()), 1)  # the system prompt's
        self.assertEqual(self.client.list_sequences(), [])

    def test_a_killed_client_frees_its_sequence(self):
        with Running(self.client) as service, socket.create_connection(("127.0.0.1", service.port)) as killed:
            body = json.dumps({"prompt": "5 6 7", "max_tokens": 4096, "stream": True}).encode()
            killed.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
                           % (len(body), body))
            self.assertTrue(killed.recv(1))
            killed.close()
            harness.wait_until(lambda: len(self.client.list_sequences()) == 1, "its sequence is gone")
            harness.wait_until(lambda: service.metric("completions_cancelled_total") == 1, "it is counted")
            self.assertEqual(len(service.ask("5 6 7", max_tokens=3)), 3)

    def test_a_system_prompt_is_stored_once(self):
        used = 'flashcore_kv_bytes{segment="cold",state="used"}'
        system = prompts(SYSTEM_TOKENS)[0].tolist()
        with Running(self.client, system) as service:
            stored = self.server.metric(used)
            readings = []

            def read(width):
                if width == 8:
                    readings.append((len(self.client.list_sequences()), self.server.metric(used)))

            with self.held(service, 8, read), concurrent.futures.ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: service.ask([5, 6, 7], max_tokens=8), range(8)))
            self.assertEqual(len({tuple(answer) for answer in answers}), 1)
            sequences, with_forks = readings[-1]
            self.assertEqual(sequences, 9)
            # Of 32 pages a layer, each fork has its own copy of the last one, and at most one more.
            print(f"K/V of {SYSTEM_TOKENS} tokens: {stored:.0f} bytes; with 8 requests {with_forks:.0f}")
            self.assertLessEqual(with_forks, stored * (1 + 8 * 2 / 32))
            service.engine.prefix.delete()  # as if it had expired: it is stored again
            whole = self.alone(service.model, system + [5, 6, 7], 3)
            self.assertIn(whole, (None, service.ask([5, 6, 7], max_tokens=3)))

    def test_bad_requests(self):
        with Running(self.client) as service:
            for body, said in (({}, "prompt: null; allowed: text, or a list of tokens below 211"),
                               ({"prompt": [VOCABULARY]}, "prompt: [211]"), ({"prompt": ""}, 'prompt: ""'),
                               ({"prompt": "5", "max_tokens": 0}, "max_tokens: 0; allowed: 1 to 4096"),
                               ({"prompt": "5", "temperature": True}, "temperature: true; allowed: 0 to 2"),
                               ({"prompt": "5", "stream": 1}, "stream: 1; allowed: true, false")):
                with self.subTest(body), self.assertRaises(urllib.error.HTTPError) as caught:
                    service.post(**body)
                with contextlib.closing(caught.exception) as reply:
                    self.assertEqual(reply.code, 400)
                    self.assertIn(said, json.loads(reply.read())["error"]["message"])


class GenerateTest(unittest.TestCase):
    def test_it_runs(self):
        with harness.Server() as server, tempfile.TemporaryDirectory() as folder:
            words = dict(zip(("<pad>", "<s>", "</s>", "<unk>", "to", "be", "or"), range(7)))
            tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>",
                pad_token="<pad>").save_pretrained(folder)
            causal_model("Qwen3", vocab_size=len(words)).save_pretrained(folder)
            done = subprocess.run(
                [sys.executable, "-B", EXAMPLES / "generate.py", folder, "to be or", "be", "--num_beams=2",
                 "--max_new_tokens=4"], text=True, capture_output=True, timeout=harness.PATIENCE,
                env={**os.environ, "FLASHCORE_TARGET": server.target})
            self.assertEqual(done.returncode, 0, done.stderr)
            first, second = done.stdout.splitlines()
            self.assertTrue(first.startswith("to be or") and second.startswith("be"), done.stdout)


if __name__ == "__main__":
    harness.main()

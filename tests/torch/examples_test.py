"""The examples of the Python package that need PyTorch, on a real server."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock
import urllib.error
import urllib.request

from models import NO_TORCH, VOCABULARY, causal_model, flashcore, harness, prompts

import tokenizers
import torch
import transformers

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))
try:
    import openai_api
    import serve
    import serving_engine
    from aiohttp import web
except ImportError as error:
    print(f"skipped: {sys.executable}: {error}; the examples need aiohttp and prometheus_client")
    sys.exit(NO_TORCH)

CLIENTS = 32
SYSTEM_TOKENS = 2000


class Numbers:
    """A tokenizer whose text is the numbers of the tokens. A chat is its numbers, then 7."""

    chat_template = None

    def encode(self, text, **_):
        return [int(number) for number in text.split()]

    def decode(self, tokens, **_):
        return "".join(f"{token} " for token in tokens)

    def apply_chat_template(self, messages, **_):
        return " ".join([*(message["content"] for message in messages), "7"])


class Running:
    """serve.py's service in threads of this process, on a free port."""

    def __init__(self, client, system_tokens=(), positions=8192, stop=()):
        self.model = causal_model("Llama", max_position_embeddings=positions)
        self.model.set_attn_implementation(flashcore.transformers.register(client))
        system_prompt = " ".join(map(str, system_tokens))
        self.reader = openai_api.Reader(Numbers(), "tiny", VOCABULARY, positions, system_prompt)
        self.engine = serve.Engine(self.model, client, self.reader.prefixes(), serve.Metrics(), stop=stop)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.port = self.call(self._start())

    async def _start(self):
        self.runner = web.AppRunner(serve.Service(self.engine, self.reader).app(), handler_cancellation=True)
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

    def http(self, path, data=None, method=None):
        """(status, text) of the answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data,
                                         {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=harness.PATIENCE) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                return error.code, error.read().decode()

    def post(self, path="/v1/completions", **body):
        """The answer, and its events where it is a stream."""
        status, said = self.http(path, json.dumps(body).encode())
        assert status == 200, said
        if not body.get("stream"):
            return json.loads(said)
        *events, done = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
        assert done == "[DONE]", said
        return [json.loads(event) for event in events]

    def ask(self, tokens, stream=False, **body):
        """The tokens of the answer."""
        said = self.post(prompt=tokens, stream=stream, **body)
        parts = said if stream else [said]
        return Numbers().encode("".join(part["choices"][0]["text"] for part in parts))

    def metric(self, name):
        lines = self.http("/metrics")[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server())
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))
        cls.addClassCleanup(flashcore.set_default_client, None)

    def alone(self, model, tokens, count):
        """The output of generate, or None where rounding may change a token."""
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
            harness.wait_until(lambda: not self.client.list_sequences(), "their sequences are gone")
        self.assertEqual(self.client.list_sequences(), [])

    def test_a_killed_client_frees_its_sequence(self):
        with Running(self.client) as service:
            for count, stream in enumerate((True, False), 1):
                with socket.create_connection(("127.0.0.1", service.port)) as killed:
                    body = json.dumps({"prompt": "5 6 7", "max_tokens": 4096, "stream": stream}).encode()
                    killed.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
                                   b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                    harness.wait_until(lambda: service.engine.active, "it is answered")
                harness.wait_until(lambda: not self.client.list_sequences(), "its sequence is gone")
                harness.wait_until(lambda: service.metric("completions_cancelled_total") == count, "counted")
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
            # Each fork has its own copy of the last of 32 pages a layer, and at most one more.
            print(f"K/V of {SYSTEM_TOKENS} tokens: {stored:.0f} bytes; with 8 requests {with_forks:.0f}")
            self.assertLessEqual(with_forks, stored * (1 + 8 * 2 / 32))
            for prefix in service.engine.prefixes.values():
                prefix.delete()  # as if it had expired: it is stored again
            whole = self.alone(service.model, system + [5, 6, 7], 3)
            self.assertIn(whole, (None, service.ask([5, 6, 7], max_tokens=3)))

    def test_bad_requests(self):
        completions, chats = "/v1/completions", "/v1/chat/completions"
        with Running(self.client) as service:
            for path, body, wanted, said in (
                    (completions, b"{}", 400, "prompt: null; allowed: text, or a list of tokens below 211"),
                    (completions, b'{"prompt": [211]}', 400, "prompt: [211]"),
                    (completions, b'{"prompt": "5", "temperature": 3}', 400, "temperature: 3; allowed: 0"),
                    (completions, b'{"prompt": "5", "stop": "6"}', 400, 'stop: "6"; allowed: null or []'),
                    (completions, b'{"prompt": "5", "model": "other"}', 404, 'model: "other"; allowed: tiny'),
                    (completions, b"{", 400, "the body: cannot be read"),
                    (completions, b"\xff", 400, "the body: cannot be read"),
                    (completions, b"[" * 100000, 400, "the body: cannot be read"),
                    (completions, b" " * (2 << 20), 413, "Request Entity Too Large"),
                    (completions, None, 405, "Method Not Allowed"), ("/v1/other", b"{}", 404, "Not Found"),
                    (chats, b'{"messages": [{"role": "user", "content": "5"}]}', 400, "no chat template"),
                    ("/v1/models/other", None, 404, 'model: "other"; allowed: tiny')):
                with self.subTest(path, body=body and body[:40]):
                    status, text = service.http(path, body)
                    self.assertEqual(status, wanted)
                    self.assertIn(said, json.loads(text)["error"]["message"])
            self.assertEqual(len(service.ask([5], max_tokens=2)), 2)

    def test_a_defect_of_the_api_is_an_error_of_json(self):
        with Running(self.client) as service:
            with unittest.mock.patch.object(service.reader.tokenizer, "encode", side_effect=TypeError("odd")):
                status, text = service.http("/v1/completions", b'{"prompt": "5"}')
            self.assertEqual((status, json.loads(text)["error"]["type"]), (500, "server_error"))
            self.assertEqual(len(service.ask([5], max_tokens=2)), 2)

    def test_temperatures_and_seeds(self):
        with Running(self.client) as service:
            likeliest = service.ask([5, 6], max_tokens=4)
            for temperature in (1e-300, 5e-324, 1e-5, 0, 1e-3):
                self.assertEqual(service.ask([5, 6], max_tokens=4, temperature=temperature), likeliest)
            self.assertEqual(service.ask([5, 6], max_tokens=4, temperature=2, top_p=1e-9), likeliest)
            drawn = [service.ask([5, 6], max_tokens=8, temperature=2, seed=seed) for seed in (1, 1, 2)]
            self.assertEqual(drawn[0], drawn[1])
            self.assertNotEqual(drawn[0], drawn[2])
            fresh = [service.ask([5, 6], max_tokens=8, temperature=2) for _ in range(2)]
            self.assertNotEqual(*fresh)
            harness.wait_until(lambda: service.metric("completions_active") == 0, "no request is left")

    def test_a_pass_that_fails_ends_its_requests_only(self):
        with Running(self.client) as service:
            forward = service.engine.forward
            for error in (RuntimeError("out of memory"), flashcore.Unavailable("gone"), KeyError("x")):
                with unittest.mock.patch.object(service.engine, "forward", side_effect=error):
                    status, text = service.http("/v1/completions", b'{"prompt": "5"}')
                self.assertEqual((status, json.loads(text)["error"]["type"]), (503, "server_error"))
                self.assertEqual(len(service.ask([5], max_tokens=2)), 2)
            self.assertEqual(service.metric("completions_failed_total"), 3)

            def first_pass_works(work):
                service.engine.forward = unittest.mock.Mock(side_effect=RuntimeError("the second does not"))
                return forward(work)

            service.engine.forward = first_pass_works
            status, text = service.http("/v1/completions", b'{"prompt": "5", "stream": true}')
            service.engine.forward = forward
            *_, last = [line for line in text.split("\n\n") if line]
            self.assertEqual(json.loads(last.removeprefix("data: "))["error"]["type"], "server_error")
            harness.wait_until(lambda: not self.client.list_sequences(), "their sequences are gone")

    def test_a_lost_sequence_ends_its_request_only(self):
        with Running(self.client) as service:
            wanted, lost = service.ask([5, 6], max_tokens=4), []

            def before_pass(width):
                if width == 2 and not lost:
                    lost.extend(request for request in service.engine.active if request.temperature == 2)
                    lost[0].sequence.delete()

            with self.held(service, 2, before_pass), concurrent.futures.ThreadPoolExecutor(2) as pool:
                bad = pool.submit(service.http, "/v1/completions", b'{"prompt": "5", "temperature": 2}')
                good = pool.submit(service.ask, [5, 6], max_tokens=4)
                self.assertEqual((bad.result()[0], good.result()), (503, wanted))
            self.assertTrue(lost)

    def test_a_token_that_cannot_be_drawn_ends_its_request_only(self):
        real = serving_engine.sample

        def sample(logits, request):
            return real(logits * float("nan") if request.temperature == 1.5 else logits, request)

        with Running(self.client) as service, unittest.mock.patch.object(serving_engine, "sample", sample):
            with self.held(service, 2), concurrent.futures.ThreadPoolExecutor(2) as pool:
                bad = pool.submit(service.http, "/v1/completions", b'{"prompt": "5", "temperature": 1.5}')
                good = pool.submit(service.ask, [5, 6], max_tokens=3)
                self.assertEqual((bad.result()[0], len(good.result())), (503, 3))
            self.assertEqual(service.metric("completions_failed_total"), 1)

    def test_a_defect_of_the_engine_ends_the_requests_at_hand_only(self):
        with Running(self.client) as service:
            with unittest.mock.patch.object(service.engine, "step", side_effect=ZeroDivisionError):
                self.assertEqual(service.http("/v1/completions", b'{"prompt": "5"}')[0], 503)
            self.assertEqual(len(service.ask([5], max_tokens=2)), 2)
            service.engine.close()
            self.assertEqual(service.http("/v1/completions", b'{"prompt": "5"}')[0], 503)
            self.assertEqual(service.http("/health")[0], 503)

    def test_why_an_answer_ends_and_what_it_counts(self):
        with Running(self.client) as service:
            first, second, *_ = service.ask([5, 6], max_tokens=4)
        self.assertNotEqual(first, second)
        with Running(self.client, stop=[second]) as service:
            for stream in (False, True):
                for tokens, why, said in ((1, "length", [first]), (4, "stop", [first])):
                    with self.subTest(stream=stream, why=why):
                        options = dict(stream_options={"include_usage": True}) if stream else {}
                        answer = service.post(prompt=[5, 6], max_tokens=tokens, stream=stream, **options)
                        *parts, end = answer if stream else [answer, answer]
                        self.assertEqual(parts[-1]["choices"][0]["finish_reason"], why)
                        self.assertEqual([part["choices"][0]["finish_reason"] for part in parts[:-1]],
                                         [None] * (len(parts) - 1))
                        text = "".join(part["choices"][0]["text"] for part in parts)
                        self.assertEqual(Numbers().encode(text), said)
                        self.assertEqual(end["usage"],
                                         dict(prompt_tokens=2, completion_tokens=1, total_tokens=3))

    def test_all_ends_of_the_generation_config_and_the_tokenizer(self):
        model, tokenizer = causal_model("Llama"), Numbers()
        for of_config, of_tokenizer, wanted in ((None, None, set()), (5, None, {5}), ([5, 6], 7, {5, 6, 7}),
                                                (None, 7, {7})):
            model.generation_config.eos_token_id, tokenizer.eos_token_id = of_config, of_tokenizer
            self.assertEqual(serving_engine.stop_tokens(model, tokenizer), wanted)

    def test_prompts_beyond_the_positions_are_refused(self):
        with Running(self.client, positions=64) as service:
            status, text = service.http("/v1/completions", json.dumps({"prompt": [5] * 64}).encode())
            self.assertEqual(status, 400)
            self.assertIn("allowed: at most 63: the model has 64 positions", text)
            self.assertEqual(len(service.ask([5] * 60)), 4)

    def test_chats(self):
        with Running(self.client, (9, 8)) as service:
            wanted = service.ask([5, 7], max_tokens=4)  # after 9 and 8
            service.reader.tokenizer.chat_template = "there is one"
            messages = [{"role": "user", "content": "5"}]
            answer = service.post("/v1/chat/completions", messages=messages, max_tokens=4)
            message = answer["choices"][0]["message"]
            self.assertEqual((message["role"], Numbers().encode(message["content"])), ("assistant", wanted))
            self.assertEqual(answer["usage"]["prompt_tokens"], 4)
            chunks = service.post("/v1/chat/completions", messages=messages, max_tokens=4, stream=True)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            self.assertEqual(deltas[0]["role"], "assistant")
            self.assertEqual(Numbers().encode("".join(delta["content"] for delta in deltas)), wanted)

    def test_models_and_health(self):
        with Running(self.client) as service:
            status, text = service.http("/v1/models")
            model, = json.loads(text)["data"]
            self.assertEqual((status, model["id"], model["object"]), (200, "tiny", "model"))
            self.assertEqual(json.loads(service.http("/v1/models/tiny")[1]), model)
            self.assertEqual(service.http("/health"), (200, '{"status": "ok"}'))
            gone = flashcore.Unavailable("gone")
            with unittest.mock.patch.object(type(self.client), "server_info", side_effect=gone):
                self.assertEqual(service.http("/health"), (503, '{"status": "UNAVAILABLE: gone"}'))

    def test_models_that_cannot_be_served_say_what_they_lack(self):
        name = flashcore.transformers.register(self.client)
        small = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2)
        served = (
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, **small)),
            transformers.OPTForCausalLM(transformers.OPTConfig(
                hidden_size=128, ffn_dim=192, num_hidden_layers=2, num_attention_heads=4,
                word_embed_proj_dim=128, **small)))
        for model in served:
            with self.subTest(type(model).__name__):
                model.to(torch.bfloat16).eval().set_attn_implementation(name)
                serve.Engine(model, self.client, [], serve.Metrics()).close()
        bloom = transformers.BloomForCausalLM(transformers.BloomConfig(
            hidden_size=128, n_layer=2, n_head=4, **small))
        deaf = causal_model("Llama")
        forward = deaf.forward

        def without_positions(*args, position_ids=None, **kwargs):
            return forward(*args, **kwargs)

        deaf.forward = without_positions
        local = causal_model("Llama")
        soft = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
            hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, **small)).to(torch.bfloat16)
        for model, implementation, lacks in (
                (bloom, None, "Bloom.*: it takes no position_ids.*; its attention does not go through"),
                (deaf, name, "Llama.*: packed prompts move its logits by "),
                (soft, name, "Gemma2.*: .*soft-cap"), (local, None, "Llama.*: .*attn_implementation")):
            with self.subTest(lacks):
                if implementation:
                    model.set_attn_implementation(implementation)
                with self.assertRaisesRegex(serve.Unserved, lacks):
                    serve.Engine(model.eval(), self.client, [], serve.Metrics())
        self.assertEqual(self.client.list_sequences(), [])


def save_model(folder):
    """A tiny Qwen3 with its tokenizer and a chat template. Returns its words."""
    words = dict(zip(("<pad>", "<s>", "</s>", "<unk>", "to", "be", "or"), range(7)))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>",
                                                unk_token="<unk>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    fast.save_pretrained(folder)
    causal_model("Qwen3", vocab_size=len(words)).save_pretrained(folder)
    return words


class ScriptTest(unittest.TestCase):
    """serve.py as a process."""

    def start(self, target, *arguments):
        return subprocess.Popen(
            [sys.executable, "-B", EXAMPLES / "serve.py", *arguments, "--port=0"], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "FLASHCORE_TARGET": target, "PYTHONUNBUFFERED": "1"})

    def test_it_serves_a_folder(self):
        with harness.Server() as server, tempfile.TemporaryDirectory() as folder:
            save_model(folder)
            process = self.start(server.target, folder, "--system_prompt=or be")
            with process, contextlib.ExitStack() as stack:
                stack.callback(process.kill)
                lines = iter(process.stdout.readline, "")
                port = next(int(found[1]) for found in (re.search(r"http://127\.0\.0\.1:(\d+)", line)
                                                        for line in lines) if found)
                message = {"role": "user", "content": "to be"}
                body = json.dumps({"messages": [message], "max_tokens": 2}).encode()
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/chat/completions", body) as response:
                    answer = json.loads(response.read())
                self.assertEqual(answer["usage"]["prompt_tokens"], 6)
                self.assertIn(answer["choices"][0]["finish_reason"], ("stop", "length"))
                process.send_signal(signal.SIGINT)
                self.assertEqual(process.wait(harness.PATIENCE), 0)
            with flashcore.connect(server.target) as client:
                self.assertEqual(client.list_sequences(), [])

    def test_it_says_what_is_missing(self):
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder)
            process = self.start(f"unix:{folder}/gone", folder)
            said, _ = process.communicate(timeout=harness.PATIENCE)
        self.assertEqual(process.returncode, 1, said)
        self.assertRegex(said, "serve.py: UNAVAILABLE: no server answers at .*FLASHCORE_TARGET")


class GenerateTest(unittest.TestCase):
    def test_it_runs(self):
        with harness.Server() as server, tempfile.TemporaryDirectory() as folder:
            save_model(folder)
            done = subprocess.run(
                [sys.executable, "-B", EXAMPLES / "generate.py", folder, "to be or", "be", "--num_beams=2",
                 "--max_new_tokens=4"], text=True, capture_output=True, timeout=harness.PATIENCE,
                env={**os.environ, "FLASHCORE_TARGET": server.target})
            self.assertEqual(done.returncode, 0, done.stderr)
            first, second = done.stdout.splitlines()
            self.assertTrue(first.startswith("to be or") and second.startswith("be"), done.stdout)


if __name__ == "__main__":
    harness.main()

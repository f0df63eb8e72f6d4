#!/usr/bin/env python3
"""Measures a decode step of a Llama of transformers, whose K/V is on a server on this host or here.

    transformers_decode.py local:/path [--sequences 64] [--rows 4096] [--steps 20] [--layers 32]
                           [--dtype float16] [--host] [--no_compile] [--device cuda] [--tiny]

The model has the geometry of Llama 3 8B and random weights. For a model on a GPU, the server runs with
--local_device_tensors --client_kv_bytes=0, with K/V memory for all sequences (--kv_memory_bytes) and, for
prompts in parts of 512 rows, --device_tensor_bytes=4GiB. --host measures tensors through host memory as well.

A line for each way: ms a step, of steps that are submitted one after the other; of that, how long the host
needs to submit one; how often a step waits for the GPU; and the largest error of the logits against
transformers' own, beside the largest logit. --tiny: a small model, to try the script; with --device cpu, too.
"""

import argparse
import gc
import time
import traceback
import unittest.mock
import warnings

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

import flashcore._device_step
import flashcore.transformers

WARM = 3  # steps that are not timed
PART = 512  # rows of a prompt that a pass has
NOTHING = "returns_q"


def returns_q(module, query, key, value, attention_mask, **_):
    return query.transpose(1, 2), None


AttentionInterface.register(NOTHING, returns_q)
AttentionMaskInterface.register(NOTHING, lambda *_, **__: None)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def make_model(options):
    size = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=512) if options.tiny else dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256)
    config = transformers.LlamaConfig(**size, num_hidden_layers=options.layers, tie_word_embeddings=False,
                                      max_position_embeddings=options.rows + WARM + options.steps + 8)
    torch.manual_seed(1)
    with torch.device(options.device):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype), attn_implementation="sdpa").eval()


class Bench:
    def __init__(self, options):
        self.options, self.cuda = options, options.device.startswith("cuda")
        self.model = make_model(options)
        generator = torch.Generator().manual_seed(2)
        shape = options.sequences, options.rows + WARM + options.steps + 1
        self.tokens = torch.randint(0, self.model.config.vocab_size, shape, generator=generator).to(
            options.device)
        self.places = torch.arange(shape[1], device=options.device)[None]
        self.wanted = None  # logits of the last step
        print(f"{torch.cuda.get_device_name() if self.cuda else 'CPU'}, PyTorch {torch.__version__}, "
              f"transformers {transformers.__version__}: {options.layers} layers, {options.sequences} "
              f"sequences of {options.rows} rows, {options.dtype}", flush=True)

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def fill(self, cache):
        """The prompts of all sequences, in parts."""
        for begin in range(0, self.options.rows, PART):
            part = self.tokens[:, begin:min(begin + PART, self.options.rows)]
            self.model(part, cache=cache, use_cache=True, logits_to_keep=1)

    def step(self, number, cache, forward=None):
        place = self.options.rows + number
        token = self.tokens[:, place:place + 1]
        if forward is None:
            return self.model(token, cache=cache, use_cache=cache is not None, logits_to_keep=1).logits
        return forward(token, self.places[:, place:place + 1], cache)

    def waits(self, number, cache):
        """How often a step made the host wait for the GPU, and where."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                logits = self.step(number, cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found = [f"{warning.filename}:{warning.lineno}" for warning in caught
                 if "called a synchronizing" in str(warning.message)]
        return logits, found

    def measure(self, what, attention, cache, forward=None):
        self.model.set_attn_implementation(attention)
        for number in range(WARM):
            self.step(number, cache, forward)
        self.synchronize()
        begin = time.perf_counter()
        for number in range(WARM, WARM + self.options.steps):
            self.step(number, cache, forward)
        submitted = time.perf_counter()
        self.synchronize()
        end = time.perf_counter()
        steps = self.options.steps
        text = (f"{what}: {(end - begin) / steps * 1e3:.3f} ms a step, host "
                f"{(submitted - begin) / steps * 1e3:.3f}")
        last, found = WARM + steps, []
        if self.cuda and forward is None:
            logits, found = self.waits(last, cache)
            text += f", {len(found)} waits"
        else:
            logits = self.step(last, cache, forward)
        if attention != NOTHING:
            text += self.compare(logits.float())
        print(text, flush=True)
        for place in sorted(set(found)):
            print(f"  waits: {found.count(place)} times at {place}", flush=True)

    def compare(self, logits):
        if self.wanted is None:
            self.wanted = logits.clone()
            return ""
        error = (logits - self.wanted).abs().max().item()
        return f", logit error {error:.4f} of {self.wanted.abs().max().item():.2f}"

    def own(self):
        cache = DynamicCache(config=self.model.config)
        self.model.set_attn_implementation("sdpa")
        self.fill(cache)
        self.measure("transformers, sdpa, DynamicCache", "sdpa", cache)
        if self.options.no_compile:
            return
        static = self.static(cache)
        self.free()
        compiled = torch.compile(lambda token, place, cache: self.model(
            token, position_ids=place, cache=cache, use_cache=True, logits_to_keep=1).logits,
            mode="reduce-overhead")
        self.measure("transformers, sdpa, StaticCache, compiled", "sdpa", static, compiled)
        torch.compiler.reset()  # its graphs keep memory

    def static(self, cache):
        """A StaticCache with the prompts of a DynamicCache, which it empties."""
        static, rows = StaticCache(self.model.config, max_cache_len=self.tokens.shape[1]), self.options.rows
        for mine, its in zip(static.layers, cache.layers):
            mine.update(its.keys[:, :, :rows], its.values[:, :, :rows])
            its.keys = its.values = None
        return static

    def service(self, client, what):
        self.model.set_attn_implementation(flashcore.transformers.NAME)
        with flashcore.transformers.FlashCoreCache(self.model.config, client) as cache:
            self.fill(cache)
            client.synchronize()
            self.measure(what, flashcore.transformers.NAME, cache)
            client.synchronize()
        self.free()

    def free(self):
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def through_host_memory():
    """FlashCoreCache takes tensors on a GPU through host memory."""
    return unittest.mock.patch.object(flashcore._device_step, "shared_memory", lambda *_: None)


def main():
    options = arguments()
    with torch.no_grad(), flashcore.connect(options.target, timeout=300) as client:
        flashcore.transformers.register(client)
        bench = Bench(options)
        bench.measure("the model without attention", NOTHING, None)
        where = "device tensors" if bench.cuda else "host memory"
        for part in (bench.own, lambda: bench.service(client, f"FlashCore, {where}")):
            try:
                part()
            except Exception:
                traceback.print_exc()
            bench.free()
        if options.host and bench.cuda:
            with through_host_memory():
                bench.service(client, "FlashCore, host memory")


if __name__ == "__main__":
    main()

"""Models of transformers on a real server: the tokens are those of a twin that computes here."""

import os
import pathlib
import re
import unittest
import unittest.mock

from models import TWIN, causal_model, encoder, flashcore, harness, padded, prompts

import torch
import transformers

NAME = flashcore.transformers.NAME
README = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "README.md"
# A difference of logits that rounding O to the dtype can make in these models, as a share of their spread.
ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 1e-1}


class ModelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        transformers.logging.set_verbosity_error()
        cls.server = cls.enterClassContext(harness.Server())
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))
        flashcore.transformers.register(cls.client)
        cls.addClassCleanup(flashcore.set_default_client, None)

    def setUp(self):
        grad = torch.no_grad()
        grad.__enter__()
        self.addCleanup(grad.__exit__, None, None, None)

    def cache(self, model, **options):
        return self.enterContext(flashcore.transformers.FlashCoreCache(model.config, **options))

    def generate(self, model, where, inputs, seed=None, **options):
        """Tokens and their logits. `where`: NAME on the service, TWIN here."""
        model.set_attn_implementation(where)
        if where == NAME:
            options["cache"] = self.cache(model)
        if seed is not None:
            torch.manual_seed(seed)
        return model.generate(**inputs, min_new_tokens=1, return_dict_in_generate=True, output_logits=True,
                              **options)

    def both(self, model, inputs, **options):
        """Compares the tokens of both. Where they part, the twin's logits must be closer than rounding."""
        twin, ours = (self.generate(model, where, inputs, **options) for where in (TWIN, NAME))
        self.assertEqual(twin.sequences.shape, ours.sequences.shape)
        differ = (twin.sequences != ours.sequences).nonzero().tolist()
        if differ:
            row, column = min(differ, key=lambda place: place[1])
            logits = twin.logits[column - inputs["input_ids"].shape[1]][row].float()
            gap = (logits[twin.sequences[row, column]] - logits[ours.sequences[row, column]]).abs().item()
            bound = ROUNDING[model.dtype] * logits.std().item()
            print(f"{self.id()}: differs at row {row}, column {column}: gap {gap:.4g}, bound {bound:.4g}")
            self.assertLess(gap, bound)
        return ours.sequences


class EncoderTest(ModelTest):
    def test_embeddings_of_a_ragged_batch_are_those_of_sdpa(self):
        model = encoder()
        inputs = padded(prompts(7, 32, 1, 19), side="right")

        def embed(where):
            model.set_attn_implementation(where)
            hidden = model(**inputs).last_hidden_state.float()
            weights = inputs["attention_mask"][..., None].float()
            return (hidden * weights).sum(1) / weights.sum(1)

        cosine = torch.cosine_similarity(embed("sdpa"), embed(NAME))
        print(f"cosine with sdpa: {cosine.min().item():.7f}")
        self.assertGreater(cosine.min().item(), 0.99999)

    def test_float32_is_refused_unless_rounding_is_asked_for(self):
        model = encoder(torch.float32)
        model.set_attn_implementation(NAME)
        inputs = padded(prompts(5), side="right")
        with self.assertRaisesRegex(flashcore.InvalidArgument, r"^INVALID_ARGUMENT: dtype: torch.float32; "
                                    r"allowed: .*register\(dtype=torch.bfloat16\)"):
            model(**inputs)
        flashcore.transformers.register(dtype=torch.float16)
        self.addCleanup(flashcore.transformers.register)
        found = model(**inputs).last_hidden_state
        self.assertEqual(found.dtype, torch.float32)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, model(**inputs).last_hidden_state, atol=5e-3, rtol=0)


class GenerateTest(ModelTest):
    def test_greedy_tokens_of_the_families(self):
        for kind in ("Llama", "Qwen2", "Qwen3", "Mistral"):
            for dtype in (torch.float16, torch.bfloat16):
                with self.subTest(kind, dtype=dtype):
                    changes = {"sliding_window": None} if kind == "Mistral" else {}
                    model = causal_model(kind, dtype=dtype, **changes)
                    self.both(model, padded(prompts(11)), max_new_tokens=16, do_sample=False)

    def test_sampling_with_a_seed(self):
        self.both(causal_model("Llama"), padded(prompts(9, 9)), max_new_tokens=16, do_sample=True, seed=4)

    def test_beam_search(self):
        model = causal_model("Llama")
        self.both(model, padded(prompts(6, 10)), max_new_tokens=10, num_beams=4, do_sample=False)

    def test_assisted_decoding(self):
        model, assistant = causal_model("Llama"), causal_model("Llama", seed=5, num_hidden_layers=1)
        inputs = padded(prompts(8))
        for where in (NAME, "sdpa"):  # of the assistant, whose cache is here
            with self.subTest(where):
                assistant.set_attn_implementation(where)
                assisted = self.both(model, inputs, max_new_tokens=12, do_sample=False,
                                     assistant_model=assistant)
                self.assertEqual(assisted.shape[1], 20)

    def test_prompt_lookup_decoding(self):
        repeated = prompts(6)[0].repeat(3)
        self.both(causal_model("Llama"), padded([repeated]), max_new_tokens=12, do_sample=False,
                  prompt_lookup_num_tokens=3)

    def test_a_left_padded_batch_has_the_tokens_of_single_runs(self):
        model, rows = causal_model("Llama"), prompts(3, 12, 70)
        together = self.both(model, padded(rows), max_new_tokens=8, do_sample=False)
        for row, tokens in enumerate(rows):
            alone = self.generate(model, NAME, padded([tokens]), max_new_tokens=8, do_sample=False)
            self.assertEqual(alone.sequences[0, -8:].tolist(), together[row, -8:].tolist())

    def test_padding_is_not_stored(self):
        model = causal_model("Llama")
        model.set_attn_implementation(NAME)
        cache = self.cache(model)
        model(**padded(prompts(3, 12)), cache=cache)
        self.assertEqual([sequence.info().layer_lengths for sequence in cache.sequences], [[3, 3], [12, 12]])
        self.assertEqual(cache.get_seq_length(), 12)

    def test_sliding_windows_beyond_the_window(self):
        self.both(causal_model("Mistral", sliding_window=8), padded(prompts(20, 5)), max_new_tokens=12,
                  do_sample=False)
        mixed = causal_model("Qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1)
        self.assertEqual(mixed.config.layer_types, ["full_attention", "sliding_attention"])
        self.both(mixed, padded(prompts(20)), max_new_tokens=12, do_sample=False)

    def test_chunked_prefill(self):
        for kind in ("Llama", "Mistral"):  # the first chunks of the short prompt are padding alone
            changes = {"sliding_window": 8} if kind == "Mistral" else {}
            with self.subTest(kind):
                self.both(causal_model(kind, **changes), padded(prompts(23, 4)), max_new_tokens=6,
                          do_sample=False, prefill_chunk_size=7)

    def test_caches_of_transformers(self):
        for kind, implementation in (("Llama", "dynamic"), ("Llama", "static"), ("Mistral", "static")):
            with self.subTest(kind, implementation=implementation):
                model = causal_model(kind, **{"sliding_window": 8} if kind == "Mistral" else {})
                options = dict(max_new_tokens=6, do_sample=False)
                twin = self.generate(model, TWIN, padded(prompts(9, 4)), **options)
                model.set_attn_implementation(NAME)
                ours = model.generate(**padded(prompts(9, 4)), cache_implementation=implementation,
                                      disable_compile=True, **options)
                self.assertEqual(ours.tolist(), twin.sequences.tolist())


class BidirectionalTest(ModelTest):
    def test_a_causal_model_without_causality(self):
        model, inputs = causal_model("Llama"), padded(prompts(5, 9))
        for options in ({"is_causal": False}, {}):
            found = {}
            for where in (NAME, TWIN):
                model.set_attn_implementation(where)
                found[where] = model(**inputs, **options, use_cache=False).logits
            real = inputs["attention_mask"].bool()
            torch.testing.assert_close(found[NAME][real], found[TWIN][real], atol=5e-2, rtol=2e-2)


class RefusalTest(ModelTest):
    def assert_refused(self, pattern, call, error=flashcore.InvalidArgument):
        with self.assertRaisesRegex(error, pattern):
            call()

    def forward(self, model, **inputs):
        model.set_attn_implementation(NAME)
        inputs = inputs or padded(prompts(5))
        return lambda: model(**inputs)

    def test_models_beyond_the_service(self):
        self.assert_refused("head_dim.*24", self.forward(causal_model("Llama", head_dim=24)))
        self.assert_refused("^INVALID_ARGUMENT: softcap: ", self.forward(
            causal_model("Gemma2", query_pre_attn_scalar=32)))
        sinks = causal_model("GptOss", num_local_experts=2, num_experts_per_tok=1)
        self.assert_refused("^INVALID_ARGUMENT: s_aux: .*no attention sinks", self.forward(sinks))

    def test_calls_beyond_the_service(self):
        model, inputs = causal_model("Llama", attention_dropout=0.5), padded(prompts(5))
        cube = torch.ones(1, 1, 5, 5, dtype=torch.bool)
        self.assert_refused(r"attention_mask: is a mask \[1, 1, 5, 5\]", self.forward(
            model, input_ids=inputs["input_ids"], attention_mask=cube))
        packed = torch.tensor([[0, 1, 2, 0, 1]])
        self.assert_refused("attention_mask: the model combines masks", self.forward(
            model, input_ids=inputs["input_ids"], position_ids=packed, use_cache=False))
        with torch.enable_grad():
            self.assert_refused("query: requires a gradient; allowed: inference", self.forward(model))
        self.assert_refused("dropout: 0.5; allowed: 0", self.forward(model.train()))

    def test_a_hole_in_the_mask_of_a_sliding_window(self):
        model, inputs = causal_model("Mistral", sliding_window=3), padded(prompts(5))
        inputs["attention_mask"][0, 2] = 0
        self.assert_refused("attention_mask: has padding between tokens", self.forward(model, **inputs))

    def test_caches_of_other_use(self):
        model, inputs = causal_model("Llama"), padded(prompts(5))
        cache = self.cache(model)
        self.forward(model, **inputs, cache=cache)()
        self.assert_refused("attention_mask: differs for positions that are in the cache", self.forward(
            model, input_ids=padded(prompts(5, 5))["input_ids"], cache=cache))
        changed = {"input_ids": inputs["input_ids"][:, :1],
                   "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}
        self.assert_refused("attention_mask: differs for positions that are in the cache",
                            self.forward(model, **changed, cache=cache))
        self.assertEqual(cache.sequences[0].info().layer_lengths, [5, 5])
        self.assert_refused("config: has chunked_attention; allowed: layers of full_attention", lambda:
                            flashcore.transformers.FlashCoreCache(transformers.Llama4TextConfig(
                                num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"])))

    def test_a_cache_of_a_model_with_another_attention(self):
        model = causal_model("Llama")
        model.set_attn_implementation("sdpa")
        cache = self.cache(model)
        self.assert_refused('cache: the model computes with K and V of its cache .*load the model '
                            f'with attn_implementation="{NAME}"',
                            lambda: model(**padded(prompts(5)), cache=cache))

    def test_continuous_batching_of_transformers(self):
        model = causal_model("Llama")
        model.set_attn_implementation(NAME)
        with self.assertRaisesRegex(ValueError, f"{NAME} is not supported for continuous batching"):
            model.generate_batch([[2, 3, 4]], generation_config=transformers.GenerationConfig(
                max_new_tokens=2, eos_token_id=1))

    def test_a_server_that_is_not_there(self):
        before = flashcore.client.default_client()
        with flashcore.connect("unix:/nonexistent") as client:
            said = "no server answers at unix:/nonexistent: .*flashcore serve.* FLASHCORE_TARGET"
            with self.assertRaisesRegex(flashcore.Unavailable, said):
                flashcore.transformers.register(client)
        self.assertIs(flashcore.client.default_client(), before)

    def test_dtypes_to_register(self):
        self.assert_refused("dtype: torch.float32; allowed: None, torch.float16, torch.bfloat16",
                            lambda: flashcore.transformers.register(dtype=torch.float32))


class ReadmeTest(ModelTest):
    def test_the_readmes_blocks_run(self):
        blocks = re.findall(r"```python torch\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
        self.assertTrue(blocks)
        flashcore.set_default_client(None)
        self.addCleanup(flashcore.set_default_client, self.client)
        with unittest.mock.patch.dict(os.environ, FLASHCORE_TARGET=self.server.target):
            for block in blocks:
                with self.subTest(block=block):
                    exec(compile(block, str(README), "exec"), {"__name__": "readme"})
            flashcore.client.default_client().close()


if __name__ == "__main__":
    harness.main()

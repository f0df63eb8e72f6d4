"""Which models of transformers are served, and that the others are refused by name: by what they do, not by
their names. zoo_test looks at all families."""

import importlib
import sys
import unittest
import unittest.mock

from models import TWIN, causal_model, flashcore, padded, harness, prompts
from transformers_test import NAME, ModelTest
from zoo import VOCABULARY, tiny_model

import torch
import transformers
from transformers import masking_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_causal_mask

models = flashcore.transformers._models
# They take masks of transformers and add to them, or fill by them, themselves.
THEIR_OWN = ("bloom", "mpt", "big_bird", "gpt_neox_japanese", "megatron-bert", "rembert", "roformer")


def tokens(*lengths):
    inputs = padded(prompts(*lengths))
    return {**inputs, "input_ids": inputs["input_ids"] % VOCABULARY}


class FamilyTest(ModelTest):
    """Its models are of float32, rounded to float16 for the service."""

    def setUp(self):
        super().setUp()
        flashcore.transformers.register(dtype=torch.float16)
        self.addCleanup(flashcore.transformers.register)

    def assert_close(self, found, wanted):
        self.assertLess((found - wanted).abs().max().item(), 2e-2 * wanted.std().item())


class OwnAttentionTest(FamilyTest):
    def test_they_are_refused_at_load(self):
        for family in (*THEIR_OWN, "falcon", "gpt_neo", "git", "openai-gpt", "xlnet"):
            with self.subTest(family):
                with self.assertRaisesRegex(flashcore.InvalidArgument, f'attn_implementation: "{NAME}" for '
                                            r"\w+, which does not ask transformers' attention interface"):
                    tiny_model(family, NAME)

    def test_they_are_refused_when_set_and_by_the_cache(self):
        for family in THEIR_OWN:
            with self.subTest(family):
                model = tiny_model(family, "eager")
                for call in (lambda: model.set_attn_implementation(NAME),
                             lambda: flashcore.transformers.FlashCoreCache(model.config)):
                    with self.assertRaisesRegex(flashcore.InvalidArgument, "does not ask transformers"):
                        call()

    def test_a_model_that_reads_the_mask_is_refused_in_its_first_forward(self):
        """As the model of somebody else, of which nothing is known before."""
        with unittest.mock.patch.object(models, "check_model"):
            for family in THEIR_OWN:
                for inputs in (tokens(12), tokens(9, 4), tokens(*[6] * 6)):
                    with self.subTest(family, shape=inputs["input_ids"].shape):
                        with self.assertRaisesRegex(flashcore.InvalidArgument, "attention_mask: the model "
                                                    "computes with its mask itself, by"):
                            tiny_model(family, NAME)(**inputs)

    def test_models_without_attention_have_no_cache(self):
        for kind in ("Mamba", "xLSTM"):
            with self.assertRaisesRegex(flashcore.InvalidArgument, f"config: is of {kind}ForCausalLM, which "
                                        "has no attention"):
                flashcore.transformers.FlashCoreCache(getattr(transformers, f"{kind}Config")())

    def test_other_implementations_load_as_before(self):
        for attention in ("eager", None):
            tiny_model("bloom", attention)(**tokens(4))
        with self.assertRaisesRegex(ValueError, 'attn_implementation="nonesuch"'):
            tiny_model("llama", "nonesuch")


class OpaqueTest(FamilyTest):
    def test_a_mask_has_a_shape_and_no_operations(self):
        mask = create_causal_mask(self.config(),
                                  torch.zeros(2, 5, 8), torch.ones(2, 5), None)
        self.assertEqual((mask.shape, mask.dtype, mask.device.type), ((2, 1, 5, 5), torch.bool, "cpu"))
        scores = torch.zeros(2, 4, 5, 5)
        for operation in (lambda: scores + mask, lambda: mask + scores, lambda: scores.masked_fill(mask, 0),
                          lambda: mask[:, :, :, :3], lambda: mask.expand(2, 4, 5, 5), lambda: mask[:, None],
                          lambda: mask.to(torch.float16), lambda: mask.float(), lambda: mask.numpy(),
                          lambda: mask.tolist(), lambda: bool(mask), lambda: 0 in mask, lambda: mask == 0,
                          lambda: ~mask, lambda: list(mask), lambda: mask.clone(), lambda: mask.data_ptr(),
                          lambda: torch.where(mask, scores, scores), lambda: torch.cat([mask, mask]),
                          lambda: torch.add(scores, scores, out=mask), lambda: scores[mask],
                          lambda: mask.__setitem__(0, True), lambda: mask.fill_(1), lambda: mask.T,
                          lambda: torch.nn.functional.scaled_dot_product_attention(
                              *[torch.zeros(2, 4, 5, 8)] * 3, attn_mask=mask)):
            with self.assertRaisesRegex(flashcore.InvalidArgument, "^INVALID_ARGUMENT: attention_mask: "):
                operation()

    def config(self):
        model = causal_model("Llama")
        model.set_attn_implementation(NAME)
        return model.config

    def test_a_mask_can_be_moved(self):
        mask = create_causal_mask(self.config(), torch.zeros(2, 5, 8), torch.ones(2, 5), None)
        moved = mask.to("meta")
        self.assertEqual(moved.device.type, "meta")
        self.assertIs(moved.pattern, mask.pattern)
        for same in (mask.to("cpu"), mask.contiguous(), mask.bool(), mask.detach(), mask.to(torch.bool)):
            self.assertIs(same, mask)

    def test_rows_of_a_cache_have_no_operations(self):
        model = causal_model("Llama", dtype=torch.float32)
        cache = self.cache(model)
        key, value = cache.update(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32), 0)
        self.assertEqual(key.shape, (1, 2, 3, 32))
        for operation in (lambda: key.transpose(2, 3), lambda: value * 2, lambda: key.repeat_interleave(2, 1),
                          lambda: torch.zeros(1, 2, 3, 32) @ key, lambda: cache.layers[0].keys):
            with self.assertRaisesRegex(flashcore.InvalidArgument, "^INVALID_ARGUMENT: cache: the model "
                                        "computes with K and V of its cache itself, by .* a DynamicCache"):
                operation()


class ArgumentTest(FamilyTest):
    def test_an_argument_that_nobody_knows_is_refused_by_name(self):
        model = tiny_model("llama", NAME)
        model(**tokens(5), anything=None, output_hidden_states=True, token_type_ids=torch.zeros(1, 5))
        for name, value in (("anything", 1), ("block_indices", torch.zeros(1)), ("indices", torch.zeros(1)),
                            ("softcap", 3.0), ("sinks", torch.zeros(1)), ("cu_seq_lens_q", torch.zeros(2))):
            with self.assertRaisesRegex(flashcore.InvalidArgument, f"^INVALID_ARGUMENT: {name}: is set by "
                                        "this model or call; allowed: None: the service has no"):
                model(**tokens(5), **{name: value})

    def test_an_argument_of_mask_functions_that_nobody_knows_is_refused_by_name(self):
        mask = flashcore.transformers._mask(1, 5, 5, sinks=1)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "^INVALID_ARGUMENT: sinks: "):
            print(mask.pattern)

    def test_a_module_that_does_not_say_whether_it_is_causal(self):
        """As the cross-attention of Mllama: without a mask, nothing tells it from a causal one."""
        module, rows = torch.nn.Module(), torch.ones(1, 4, 5, 32)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "attention_mask: None for a Module, which "
                                    "does not say is_causal"):
            flashcore.transformers._attention.attention(module, rows, rows, rows)
        module.is_causal = False
        flashcore.transformers._attention.attention(module, rows, rows, rows)

    def test_sparse_attention_is_refused(self):
        for family, name in (("minimax_m3_vl_text", "block_indices"), ("deepseek_v32", "attention_mask"),
                             ("glm_moe_dsa", "attention_mask"), ("doge", "attention_mask")):
            with self.subTest(family), self.assertRaisesRegex(flashcore.InvalidArgument,
                                                              f"^INVALID_ARGUMENT: {name}: "):
                tiny_model(family, NAME)(**tokens(21))

    def test_latent_attention_has_no_cache_on_the_server(self):
        for family in ("deepseek_v2", "diffllama", "jetmoe", "dory", "mllama"):
            with self.subTest(family):
                model = tiny_model(family, NAME)
                with self.assertRaisesRegex(flashcore.InvalidArgument, "^INVALID_ARGUMENT: cache: the mod"):
                    model.generate(**tokens(5), cache=self.cache(model), max_new_tokens=2)

    def test_masks_that_no_layer_uses(self):
        model, eager = (tiny_model("qwen2_moe", attention) for attention in (NAME, "eager"))
        self.assertEqual(model.config.sliding_window, 0)
        self.assert_close(model(**tokens(12)).logits, eager(**tokens(12)).logits)
        self.assert_close(model(**tokens(12), cache=self.cache(model)).logits, eager(**tokens(12)).logits)


class WindowTest(FamilyTest):
    def test_a_mask_of_one_row_is_looked_at_as_a_whole(self):
        """As in a step with a static cache, where transformers does not say whether it combined masks."""
        window = masking_utils.sliding_window_causal_mask_function(4)
        step = dict(q_offset=20, local_size=4, allow_is_causal_skip=False)
        for first in (0, 17):
            mask = flashcore.transformers._mask(2, 1, 21 - first, kv_offset=first, mask_function=window,
                                                **step)
            self.assertEqual((mask.pattern.causal, mask.pattern.window), (True, (3, 0)))
        blocks = torch.full((2, 21), -1)
        for rows, block in ((2, blocks), (1, blocks.index_fill(1, torch.tensor([0, 20]), 1))):
            combined = masking_utils.or_masks(window, masking_utils.blockwise_overlay(block))
            mask = flashcore.transformers._mask(2, rows, 21, mask_function=combined,
                                                **{**step, "q_offset": 21 - rows})
            with self.assertRaisesRegex(flashcore.InvalidArgument, "attention_mask: the model combines"):
                print(mask.pattern)

    def test_a_window_that_only_the_config_has(self):
        """Moshi's masks are causal; transformers' cache drops rows beyond the window after each step."""
        model, eager = (tiny_model("moshi", attention) for attention in (NAME, "eager"))
        inputs = tokens(13, 5)
        options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
        self.assertEqual(model.generate(**inputs, cache=self.cache(model), **options).tolist(),
                         eager.generate(**inputs, **options).tolist())
        cache = self.cache(model)
        model(**tokens(13), cache=cache)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "cache: a step of 2 rows.* the window of 8"):
            model(input_ids=torch.tensor([[5, 6]]), cache=cache)
        with self.client.create_sequence(2, 4, 32, dtype="float16") as sequence, self.assertRaisesRegex(
                flashcore.InvalidArgument, "cache: with a window that the config has and the mask has not"):
            packed = flashcore.transformers.PackedCache([sequence], [5])
            model(input_ids=tokens(5)["input_ids"], cache=packed)


class EncoderDecoderTest(FamilyTest):
    def test_a_pair_of_caches(self):
        config = transformers.WhisperConfig(
            vocab_size=VOCABULARY, d_model=128, encoder_layers=2, decoder_layers=2, num_mel_bins=8,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
            max_source_positions=30, max_target_positions=60, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=3)
        torch.manual_seed(1)
        model = transformers.WhisperForConditionalGeneration(config).eval()
        features, found = torch.randn(1, 8, 60), {}
        for where in ("eager", NAME):
            model.set_attn_implementation(where)
            own = self.cache(model) if where == NAME else DynamicCache()
            cache = EncoderDecoderCache(own, DynamicCache())
            first = model(input_features=features, decoder_input_ids=torch.tensor([[3, 4, 5]]), cache=cache)
            second = model(encoder_outputs=(first.encoder_last_hidden_state,), cache=cache,
                           decoder_input_ids=torch.tensor([[6]]))
            found[where] = torch.cat([first.logits, second.logits], 1)
        self.assert_close(found[NAME], found["eager"])
        both = EncoderDecoderCache(self.cache(model), self.cache(model))
        with self.assertRaisesRegex(flashcore.InvalidArgument, "cache: with bidirectional attention"):
            model(input_features=features, decoder_input_ids=torch.tensor([[3]]), cache=both)


class CompileTest(FamilyTest):
    def test_a_compiled_model(self):
        """The calls run as they are, between compiled parts."""
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)
        model, inputs = causal_model("Llama"), padded(prompts(6, 3))
        model.set_attn_implementation(TWIN)
        wanted = model(**inputs).logits
        model.set_attn_implementation(NAME)
        compiled = torch.compile(model, backend="aot_eager")
        cache = self.cache(model)
        for logits in (compiled(**inputs, use_cache=False).logits, compiled(**inputs, cache=cache).logits):
            torch.testing.assert_close(logits[inputs["attention_mask"].bool()],
                                       wanted[inputs["attention_mask"].bool()], atol=5e-2, rtol=2e-2)
        again = {"input_ids": torch.tensor([[7], [8]]), "attention_mask": torch.cat(
            [inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)}
        plain = self.enterContext(cache.fork())
        found, wanted = compiled(**again, cache=cache).logits, model(**again, cache=plain).logits
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "anything: is set by this model"):
            compiled(**inputs, anything=1)


class VersionTest(unittest.TestCase):
    def test_versions_that_lack_what_is_needed_are_refused_at_import(self):
        imported = sys.modules["transformers"]  # what a reload gets
        for version in ("4.57.1", "5.22.0", "5.23.0.dev0", "6.0.0"):
            with unittest.mock.patch.object(imported, "__version__", version), self.assertRaisesRegex(
                    ImportError, f"works with transformers 5.24 and later 5.x; this is {version}: pip"):
                importlib.reload(models)
        for version in ("5.24.0", "5.31.2", "5.24.0.dev0", transformers.__version__):
            with unittest.mock.patch.object(imported, "__version__", version):
                importlib.reload(models)


if __name__ == "__main__":
    harness.main()

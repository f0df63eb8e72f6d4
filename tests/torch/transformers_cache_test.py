"""FlashCoreCache and PackedCache on a real server."""

import copy
import functools
import gc
import unittest.mock

from models import TWIN, causal_model, flashcore, harness, padded, prompts
from transformers_test import NAME, ModelTest

import torch
import transformers

USED = 'flashcore_kv_bytes{state="used",segment="cold"}'


def patched(kind, method):
    """Records the calls of a method, which does what it did."""
    return unittest.mock.patch.object(kind, method, autospec=True, side_effect=getattr(kind, method))


class Failing:
    """A client whose requests for one layer fail, before or after they took effect."""

    def __init__(self, client):
        self.client, self.layer, self.appends = client, None, False

    def __getattr__(self, name):
        return getattr(self.client, name)

    def plan(self, *args, **options):
        plan = unittest.mock.Mock()
        plan.run.side_effect = functools.partial(self.run, self.client.plan(*args, **options))
        return plan

    def run(self, plan, layer, *tensors):
        if layer == self.layer and not self.appends:
            raise flashcore.Unavailable("the test says so")
        output = plan.run(layer, *tensors)
        if layer == self.layer:
            raise flashcore.Unavailable("the test says so")
        return output


class CacheTest(ModelTest):
    def setUp(self):
        super().setUp()
        self.model = causal_model("Llama")
        self.model.set_attn_implementation(NAME)

    def test_a_prompt_is_stored_once_for_its_copies(self):
        prompt, ends = prompts(130)[0], prompts(4, 6, seed=8)
        prefix = self.cache(self.model)
        self.model(input_ids=prompt[None], cache=prefix)
        used = self.server.metric(USED)
        copies = [self.enterContext(copy.deepcopy(prefix)) for _ in ends]
        self.assertEqual(self.server.metric(USED), used)
        for its, end in zip(copies, ends):
            inputs = padded([torch.cat([prompt, end])])
            continued = self.model.generate(**inputs, cache=its, max_new_tokens=5, do_sample=False)
            whole = self.model.generate(**inputs, cache=self.cache(self.model), max_new_tokens=5,
                                        do_sample=False)
            self.assertEqual(continued.tolist(), whole.tolist())
        self.assertEqual(prefix.get_seq_length(), 130)

    def test_crop_and_reorder(self):
        cache = self.cache(self.model)
        inputs = padded(prompts(5, 9))
        self.model(**inputs, cache=cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.crop(-2)
        self.assertEqual([sequence.lengths for sequence in cache.sequences], [[7, 7]] * 2)
        last = self.model(input_ids=inputs["input_ids"][[1, 1], 7:], cache=cache,
                          attention_mask=inputs["attention_mask"][[1, 1]]).logits
        whole = self.model(**{name: rows[1:] for name, rows in inputs.items()}).logits[:, 7:]
        torch.testing.assert_close(last, whole.expand(2, -1, -1), atol=2e-2, rtol=2e-2)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "tokens_to_remove: 3; allowed: -9 to 0"):
            cache.crop(3)

    def test_a_cache_that_nobody_has_deletes_its_sequences(self):
        before = len(self.client.list_sequences())
        for close in (True, False):
            cache = flashcore.transformers.FlashCoreCache(self.model.config)
            self.model(**padded(prompts(4, 4)), cache=cache)
            self.assertEqual(len(self.client.list_sequences()), before + 2)
            if close:
                cache.close()
                self.assertEqual(cache.get_seq_length(), 0)
            del cache
            gc.collect()
            self.assertEqual(len(self.client.list_sequences()), before)

    def test_a_failed_step_is_taken_back_by_crop_whichever_layer_failed(self):
        tokens = prompts(6)[0][None]
        wanted = self.model(input_ids=tokens, use_cache=False).logits[:, 4:]
        for layer in (0, 1):
            for appended in (False, True):
                with self.subTest(layer=layer, appended=appended):
                    failing = Failing(self.client)
                    cache = self.cache(self.model, client=failing)
                    self.model(input_ids=tokens[:, :4], cache=cache)
                    failing.layer, failing.appends = layer, appended
                    with self.assertRaisesRegex(flashcore.Unavailable, "the test says so"):
                        self.model(input_ids=tokens[:, 4:], cache=cache)
                    failing.layer = None
                    with self.assertRaisesRegex(flashcore.InvalidArgument, "tokens_to_remove: -1; allowed: "
                                                "-6 to -2, 0, after a step that failed"):
                        cache.crop(-1)
                    cache.crop(-2)
                    self.assertEqual(cache.sequences[0].info().layer_lengths, [4, 4])
                    again = self.model(input_ids=tokens[:, 4:], cache=cache).logits
                    torch.testing.assert_close(again, wanted, atol=5e-2, rtol=2e-2)

    def test_a_step_after_one_that_failed_between_layers_is_refused(self):
        tokens, failing = prompts(6)[0][None], Failing(self.client)
        cache = self.cache(self.model, client=failing)
        self.model(input_ids=tokens[:, :4], cache=cache)
        failing.layer = 1
        with self.assertRaisesRegex(flashcore.Unavailable, "the test says so"):
            self.model(input_ids=tokens[:, 4:], cache=cache)
        failing.layer = None
        with self.assertRaisesRegex(flashcore.FailedPrecondition, "cache: a step before failed between"):
            self.model(input_ids=tokens[:, 4:], cache=cache)

    def test_what_an_interrupted_step_leaves_fails_no_other_forward(self):
        cache, inputs = self.cache(self.model), padded(prompts(5))
        wanted = self.model(**inputs, use_cache=False).logits
        rotate = transformers.models.llama.modeling_llama.LlamaAttention.forward

        def interrupted(*args, **options):
            cache.update(torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 5, 32), 0)
            raise KeyboardInterrupt

        transformers.models.llama.modeling_llama.LlamaAttention.forward = interrupted
        try:
            with self.assertRaises(KeyboardInterrupt):
                self.model(**inputs, cache=cache)
        finally:
            transformers.models.llama.modeling_llama.LlamaAttention.forward = rotate
        self.assertTrue(torch.equal(self.model(**inputs, use_cache=False).logits, wanted))
        self.assertTrue(torch.equal(self.model(**inputs, cache=self.cache(self.model)).logits, wanted))

    def test_a_cache_stays_with_the_client_that_it_was_made_with(self):
        other = self.enterContext(flashcore.connect(self.server.target))
        self.addCleanup(flashcore.transformers.register, self.client)
        for given in ({}, {"client": self.client}):
            flashcore.transformers.register(self.client)
            cache, tokens = self.cache(self.model, **given), prompts(6)[0][None]
            flashcore.transformers.register(other)
            with patched(flashcore.client.Client, "plan") as plans:
                self.model(input_ids=tokens[:, :5], cache=cache)
                self.model(input_ids=tokens[:, 5:], cache=cache.fork())
            self.assertEqual({call.args[0] for call in plans.call_args_list}, {self.client})

    def test_the_same_prompt_on_a_used_cache_hints_at_reset(self):
        inputs, short = padded(prompts(6, 4)), padded(prompts(6))
        options = dict(max_new_tokens=4, do_sample=False)
        for first, second in ((inputs, inputs), (short, short), (short, inputs)):
            with self.subTest(first=first, second=second):
                cache = self.cache(self.model)
                self.model.generate(**first, cache=cache, **options)
                with self.assertRaisesRegex(flashcore.InvalidArgument,
                                            r"for another prompt, reset\(\) the cache first"):
                    self.model.generate(**second, cache=cache, **options)
                cache.reset()
                wanted = self.model.generate(**second, cache=self.cache(self.model), **options)
                found = self.model.generate(**second, cache=cache, **options)
                self.assertEqual(found.tolist(), wanted.tolist())

    def test_members_are_selected_as_torch_indexes(self):
        cache, inputs = self.cache(self.model), padded(prompts(3, 5, 7, 4))
        self.model(**inputs, cache=cache)
        rows = torch.tensor([3, 5, 7, 4])
        for indices in (torch.tensor([-1, 0]), [2, -2], torch.tensor([True, False, False, True]),
                        [False, True, True, False], slice(1, None), torch.tensor([0, 0, -4, 3]),
                        torch.tensor([-1], dtype=torch.int32), torch.tensor([], dtype=torch.long)):
            with self.subTest(indices=indices):
                copy = self.enterContext(cache.fork())
                copy.batch_select_indices(indices)
                self.assertEqual([sequence.info().layer_lengths[0] for sequence in copy.sequences],
                                 rows[indices].tolist())
        for indices in (torch.tensor([4]), [-5], torch.tensor([True]), 1, torch.tensor([[0, 1]]), "all",
                        torch.tensor([0.5]), None):
            with self.subTest(indices=indices):
                with self.assertRaisesRegex(flashcore.InvalidArgument, "^INVALID_ARGUMENT: indices: .*; "
                                            "allowed: of .*4 members of the batch"):
                    cache.batch_select_indices(indices)
        self.assertEqual([sequence.info().layer_lengths[0] for sequence in cache.sequences], [3, 5, 7, 4])

    def test_one_request_a_layer_appends_and_attends_for_the_batch(self):
        cache = self.cache(self.model)
        inputs = padded(prompts(5, 5, 5))
        self.model(**inputs, cache=cache)
        with (patched(flashcore.client.Client, "plan") as plans,
              patched(flashcore.client.Plan, "run") as runs):
            self.model(input_ids=inputs["input_ids"][:, :1], cache=cache)
        self.assertEqual([len(call.args[1]) for call in plans.call_args_list], [3])
        self.assertEqual([call.args[1] for call in runs.call_args_list], [0, 1])
        self.assertEqual([sequence.lengths for sequence in cache.sequences], [[6, 6]] * 3)


class PackedTest(ModelTest):
    def test_prompts_and_tokens_of_many_sequences_in_one_pass(self):
        for kind in ("Llama", "Mistral"):
            changes = {"sliding_window": 8} if kind == "Mistral" else {}
            model, rows = causal_model(kind, **changes), prompts(12, 5, 20)
            model.set_attn_implementation(TWIN)
            wanted = [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in rows]
            model.set_attn_implementation(NAME)
            sequences = [self.client.create_sequence(2, 2, 32) for _ in rows]
            for sequence in sequences:
                self.addCleanup(sequence.delete)
            done, found = [0, 0, 0], [[], [], []]
            for counts in ((11, 2, 7), (1, 3, 7), (0, 0, 6)):
                asking = [row for row, count in enumerate(counts) if count]
                places = [range(done[row], done[row] + counts[row]) for row in asking]
                cache = flashcore.transformers.PackedCache(
                    [sequences[row] for row in asking], [counts[row] for row in asking])
                tokens = torch.cat([rows[row][list(at)] for row, at in zip(asking, places)])
                positions = torch.tensor([[place for at in places for place in at]])
                logits = model(input_ids=tokens[None], position_ids=positions, cache=cache).logits[0]
                for row, part in zip(asking, logits.split([counts[row] for row in asking])):
                    found[row].append(part)
                    done[row] += counts[row]
            for expected, parts in zip(wanted, found):
                torch.testing.assert_close(torch.cat(parts), expected, atol=5e-2, rtol=2e-2)

    def test_what_is_refused(self):
        with self.assertRaisesRegex(flashcore.InvalidArgument, "sequences: none; allowed: at least one"):
            flashcore.transformers.PackedCache([], [])
        model = causal_model("Llama")
        model.set_attn_implementation(NAME)
        with self.client.create_sequence(2, 2, 32) as sequence:
            for rows, pattern in (([4], "rows: are 4 together; allowed: the 5 rows of the call"),
                                  ([2, 3], r"query_rows: \[2, 3\]; allowed: 1 numbers, each at least 1"),
                                  ([5, 0], r"query_rows: \[5, 0\]; allowed: 1 numbers, each at least 1")):
                with self.assertRaisesRegex(flashcore.InvalidArgument, pattern):
                    model(input_ids=prompts(5)[0][None],
                          cache=flashcore.transformers.PackedCache([sequence], rows))
            self.assertEqual(sequence.info().layer_lengths, [0, 0])


if __name__ == "__main__":
    harness.main()

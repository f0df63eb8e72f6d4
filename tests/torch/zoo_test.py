"""Each decoder family of transformers, tiny, on a real server: its logits are those of eager attention, or
the package refuses it by name. Nothing else. Prints a table.

  zoo_test.py --stress             all families; $FLASHCORE_ZOO names some
"""

import collections
import os
import unittest
import unittest.mock

from models import flashcore, harness, padded, prompts

import torch
import transformers
import zoo

NAME = flashcore.transformers.NAME
SERVED, WITHOUT_CACHE, REFUSED, NONE = "served", "without FlashCoreCache", "refused", "no attention"
NOT_BUILT = "not built"  # this version of transformers cannot make the tiny model
BOUND = 2e-2  # of logits, as a share of their spread: Q, K and V are rounded to float16


class Local(Exception):
    """The model computed its attention here, and nobody said so."""


class Wrong(Exception):
    """The logits are others."""


def compare(found, wanted, what):
    error = (found - wanted).abs().max().item() / wanted.std().item()
    if not error < BOUND:
        raise Wrong(f"{what}: off by {error:.3g} deviations")


@harness.stress
class ZooTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        transformers.logging.set_verbosity_error()
        cls.server = cls.enterClassContext(harness.Server())
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))
        flashcore.transformers.register(cls.client, dtype=torch.float16)
        cls.addClassCleanup(flashcore.transformers.register, cls.client)
        cls.addClassCleanup(flashcore.set_default_client, None)

    def setUp(self):
        self.enterContext(torch.no_grad())
        self.calls = collections.Counter()
        for kind, name in ((flashcore.client.Client, "attend"), (flashcore.client.Plan, "run")):
            original = getattr(kind, name)

            def count(called, *args, original=original, **options):
                self.calls["attention"] += 1
                return original(called, *args, **options)
            self.enterContext(unittest.mock.patch.object(kind, name, count))

    def test_every_family(self):
        kinds = collections.Counter()
        for name in os.environ.get("FLASHCORE_ZOO", "").split() or zoo.FAMILIES:
            kind, why = self.family(name)
            kinds[kind] += 1
            print(f"{name:26} {kind:22} {why}", flush=True)
        print(kinds)
        self.assertLessEqual(set(kinds), {SERVED, WITHOUT_CACHE, REFUSED, NONE, NOT_BUILT})

    def family(self, name):
        """How it is served, and why not."""
        try:
            self.eager = zoo.tiny_model(name, "eager")
        except Exception as error:
            return NOT_BUILT, f"{type(error).__name__}: {error}"
        for look in (self.load, self.single, self.batch, self.square, self.generation):
            try:
                look(name)
            except Exception as error:  # the table has all that is wrong
                kind = (type(error).__name__ if not isinstance(error, flashcore.Error) else
                        REFUSED if look != self.generation else NONE if self.local else WITHOUT_CACHE)
                return kind, f"{look.__name__}: {error}"
        return SERVED, ""

    def load(self, name):
        self.model = zoo.tiny_model(name, NAME)

    def forward(self, what, **inputs):
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        wanted, before = self.eager(**inputs, use_cache=False).logits[real], self.calls["attention"]
        found = self.model(**inputs, use_cache=False).logits[real]
        compare(found, wanted, what)
        self.local = self.calls["attention"] == before  # it has no attention

    def single(self, _):
        self.forward("a prompt", input_ids=prompts(21)[0][None] % zoo.VOCABULARY)

    def batch(self, _):
        inputs = padded(prompts(21, 5, 12))
        self.forward("a padded batch", **{**inputs, "input_ids": inputs["input_ids"] % zoo.VOCABULARY})

    def square(self, _):
        rows = torch.stack(prompts(*[10] * 10)) % zoo.VOCABULARY
        self.forward("a batch as long as its prompts", input_ids=rows)

    def generation(self, _):
        """Up to the token where they part, whose logits must be as close."""
        inputs = padded(prompts(13, 5))
        inputs["input_ids"] %= zoo.VOCABULARY
        options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True,
                       output_logits=True)
        wanted, before = self.eager.generate(**inputs, **options), self.calls["attention"]
        with flashcore.transformers.FlashCoreCache(self.model.config) as cache:
            found = self.model.generate(**inputs, cache=cache, **options)
            if self.local or self.calls["attention"] == before or not cache.sequences:
                raise Local("nobody said so")
        for row in range(2):
            for step in range(6):
                compare(found.logits[step][row], wanted.logits[step][row], f"token {step}")
                if found.sequences[row, 13 + step] != wanted.sequences[row, 13 + step]:
                    break


if __name__ == "__main__":
    harness.main()

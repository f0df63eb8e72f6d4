"""The examples of the Python package that need numpy alone, on a real server."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import unittest

import flashcore
import harness
import numpy as np

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ExamplesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server())
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))

    def tearDown(self):
        self.assertEqual(self.client.list_sequences(), [])

    def test_they_run(self):
        for name, said in (("merge", "over 300 rows there and 20 here: error "), ("beam", "log probability "),
                           ("speculative", "the same words: True")):
            with self.subTest(name):
                done = subprocess.run([sys.executable, "-B", EXAMPLES / f"{name}.py"], text=True,
                                      capture_output=True, timeout=harness.PATIENCE,
                                      env={**os.environ, "FLASHCORE_TARGET": self.server.target})
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn(said, done.stdout)

    def test_the_beams_words_have_the_probability_that_it_says(self):
        beam, prompt = load("beam"), [3, 14, 15, 9]
        words, said = beam.search(self.client, prompt)
        self.assertEqual(len(words), beam.STEPS)
        known = prompt + words
        output, _ = harness.reference(beam.Q[known], beam.K[known], beam.V[known], causal=True)
        after = beam.log_probabilities(output)[len(prompt) - 1:-1]
        found = after[np.arange(len(words)), words].sum()
        self.assertAlmostEqual(found, said, delta=0.1)


if __name__ == "__main__":
    harness.main()

"""Tests of figures.py: it finds a figure that differs from the records, and figures in prose."""

import contextlib
import copy
import io
import json
import pathlib
import shutil
import tempfile
import unittest

import figure_tables
import figures


class FiguresTest(unittest.TestCase):
    """On a copy of the documents and the records."""

    def setUp(self):
        self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for document in figures.DOCUMENTS:
            (self.root / document).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(figures.ROOT / document, self.root / document)
        shutil.copytree(figures.RECORDS, self.root / "records")
        for name, value in (("ROOT", self.root), ("RECORDS", self.root / "records")):
            before = getattr(figures, name)
            setattr(figures, name, value)
            self.addCleanup(setattr, figures, name, before)

    def check(self, *flags):
        """Exit status and output."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = figures.main(flags)
        return status, out.getvalue()

    def test_the_documents_are_as_the_records(self):
        self.assertEqual(self.check(), (0, ""))

    def test_a_changed_figure_fails_until_it_is_written_again(self):
        readme = self.root / "README.md"
        good = readme.read_text()
        readme.write_text(good.replace("x FLASH's speed", "1x FLASH's speed", 1))
        status, output = self.check()
        self.assertEqual(status, 1)
        self.assertIn("the records say", output)
        self.assertEqual(self.check("--write")[0], 0)
        self.assertEqual(readme.read_text(), good)

    def test_a_changed_record_fails(self):
        path = self.root / "records" / "gpu.json"
        record = json.loads(path.read_text())
        for result in record["kernels"]["results"]:
            result["us"] *= 1.1
        path.write_text(json.dumps(record))
        status, output = self.check()
        self.assertEqual(status, 1)
        for document in ("README.md", "kernels/README.md"):
            self.assertIn(f"--- {document}", output)

    def test_a_figure_in_prose_fails(self):
        for figure in ("is 1.3x as fast", "takes 8.5 us", "0.71 to 0.87 of a unary call",
                       "14 to 27% faster", "19,000 requests/s",
                       "1.8 times as long", "reaches 4.02 TB/s", "a speed-up of 2x\n"):
            with self.subTest(figure):
                readme = self.root / "client" / "README.md"
                good = readme.read_text()
                readme.write_text(f"{good}\nIt {figure}.\n")
                status, output = self.check()
                readme.write_text(good)
                self.assertEqual(status, 1)
                self.assertIn("quoted outside", output)

    def test_shapes_and_limits_are_no_figures(self):
        text = "1x8x512x64, `1.3x`, 64 MiB, 30 s, 99.9%\n```sh\nrun 8 us\n```\n"
        self.assertEqual(figures.quoted_figures(text), [])

    def test_a_block_without_a_place_fails(self):
        document = self.root / "README.md"
        document.write_text(document.read_text().replace("figures: how-fast", "figures gone"))
        status, output = self.check()
        self.assertEqual(status, 1)
        self.assertIn("no document has the figures 'how-fast'", output)


class OneRunTest(unittest.TestCase):
    RUN = {"commit": "abc", "cpu": {"model": "x", "cores": 2},
           "gpus": [{"name": "H200", "driver_version": "580", "clocks.sm": "1980"}]}

    def why_not(self, change):
        record = {"kernels": {"run": self.RUN}, "server": {"run": copy.deepcopy(self.RUN)}}
        change(record["server"]["run"])
        return figure_tables.why_not_one_run(record)

    def test_parts_are_of_one_commit_and_machine(self):
        self.assertIsNone(self.why_not(lambda run: None))
        self.assertIsNone(self.why_not(lambda run: run["gpus"][0].update({"clocks.sm": "900"})))
        self.assertIn("commit", self.why_not(lambda run: run.update(commit="def")))
        self.assertIn("CPU", self.why_not(lambda run: run["cpu"].update(cores=4)))
        self.assertIn("driver", self.why_not(
            lambda run: run["gpus"][0].update(driver_version="535")))

    def test_a_changed_checkout_is_no_commit(self):
        record = {"kernels": {"run": {**self.RUN, "commit": "abc-dirty"}}}
        self.assertIn("no commit has", figure_tables.why_not_one_run(record))


if __name__ == "__main__":
    unittest.main()

"""check_links finds what is broken, and nothing else."""

import pathlib
import subprocess
import tempfile
import unittest

import check_links


class LinksTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve() / "repository"
        (self.root / "docs").mkdir(parents=True)
        subprocess.run(["git", "init", "-q", self.root], check=True)
        (self.root / "docs" / "a.md").write_text(
            "# A `b`, c-d_e!\n## Twice\n## Twice\n```sh\n# no heading\n[no](link)\n```\n`[no](link)`\n")

    def problem(self, target, path="README.md"):
        return check_links.problem(self.root, self.root / path, target)

    def test_what_exists_is_no_problem(self):
        for target in ("docs", "docs/a.md", "docs/a.md#a-b-c-d_e", "docs/a.md#twice",
                       "docs/a.md#twice-1", "https://example.com/x#y", "mailto:a@example.com"):
            self.assertIsNone(self.problem(target), target)
        self.assertIsNone(self.problem("#twice", "docs/a.md"))
        self.assertIsNone(self.problem("../docs/a.md", "docs/a.md"))

    def test_problems_are_named(self):
        for target, want in {"b.md": "no such file", "docs/a.md#no-heading": "no heading",
                             "docs/a.md#twice-2": "no heading", "../x": "outside",
                             "/docs/a.md": "absolute"}.items():
            self.assertIn(want, self.problem(target), target)

    def test_links_are_found_with_their_lines(self):
        text = "[a](b.md)\n\n![c](d.png \"title\") [`e`](<f.md>)\n`[g](h)`\n```\n[i](j)\n```\n[k]: l.md\n"
        self.assertEqual(check_links.links(text),
                         [(1, "b.md"), (3, "d.png"), (3, "f.md"), (8, "l.md")])

    def test_source_paths_are_found_with_their_lines(self):
        text = ("`a.cc` `../b/c.py --flag` `x`\n\n`../b/c.py`, `build/d.h`, `*.md`\n"
                "```\n`e.sh`\n```\n`./f.proto`\n")
        self.assertEqual(list(check_links.source_paths(text)),
                         [(1, "a.cc"), (3, "b/c.py"), (7, "f.proto")])
        self.assertEqual(check_links.endings(["a/b/c.h", "d.md"]),
                         {"a/b/c.h", "b/c.h", "c.h", "d.md"})

    def test_a_path_that_leads_nowhere_fails_the_run(self):
        (self.root / "notes").mkdir()
        (self.root / "README.md").write_text("`docs/a.md` `a.md`\n")
        self.assertEqual(check_links.main(self.root), 0)
        for name, status in (("notes/old.md", 0), ("CHANGELOG.md", 0), ("README.md", 1)):
            with (self.root / name).open("a") as file:
                file.write("`docs/b.md`\n")
            self.assertEqual(check_links.main(self.root), status, name)

    def test_a_broken_link_fails_the_run(self):
        self.assertEqual(check_links.main(self.root), 1)  # no link at all
        readme = self.root / "README.md"
        readme.write_text("[a](docs/a.md)\n")
        self.assertEqual(check_links.main(self.root), 0)
        readme.write_text("[a](docs/b.md)\n")
        self.assertEqual(check_links.main(self.root), 1)


if __name__ == "__main__":
    unittest.main()

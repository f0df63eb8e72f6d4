"""sentences.py finds sentences that begin backwards, in every kind of file, and leaves the others alone."""

import unittest

import sentences


def found(text, name="a.md"):
    return list(sentences.findings(name, text))


class SentencesTest(unittest.TestCase):
    def test_finds_each_opening(self):
        for text in ("Of two pages, one is free.", "It ends. What is left stays.", "It is known (Of both.)",
                     "Who calls is known.", "- **What is lost** comes back.", "| page | Whose a page is. |",
                     "a\n\nOf b."):
            self.assertEqual(len(found(text)), 1, text)

    def test_leaves_the_rest_alone(self):
        for text in ("## Who calls", "What is a lane?", "It says what is left, of both. Offers 2.", "`Of`",
                     "```\nOf two\n```", "<!-- Of two -->", "Nobody knows \"Of\"."):
            self.assertEqual(found(text), [], text)

    def test_reads_comments_and_docstrings_only(self):
        for name, text, line in (
                ("a.h", "f(\"// Of x\");\nint a;  // Of b.\n", 2),
                ("a.cc", "// It is\n// long. Of two, one.\nOf();\n", 2),
                ("a.h", "int a;  // the first\n// Of two lines.\n", 2),
                ("a.proto", "// A b.\n//\n// Of c.\n", 3),
                ("a.py", "'''A b.\n\nOf c.'''\nx = 'Of y'\n", 3),
                ("a.py", "x = 1\n# Of y.\n", 2),
                ("a.sh", "#!Of\necho Of ${#a}  # Of b.\n", 2)):
            self.assertEqual([number for number, _ in found(text, name)], [line], text)

    def test_notes_are_checked_for_of_only(self):
        self.assertEqual(found("What is left: Of b, c.", "bench/notes/a.md"), [(1, "Of b, c.")])

    def test_gives_the_whole_sentence(self):
        self.assertEqual(found("A. Of two\nfiles, one. B."), [(1, "Of two files, one.")])


if __name__ == "__main__":
    unittest.main()

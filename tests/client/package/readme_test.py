"""The C++ of the READMEs is, to the letter, the code that readme.cc compiles."""

import pathlib
import re
import textwrap
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]


class ReadmeTest(unittest.TestCase):
    def test_the_readmes_code_is_compiled(self):
        compiled = (HERE / "readme.cc").read_text(encoding="utf-8")
        for name in ("README.md", "client/README.md"):
            blocks = re.findall(r"```cpp\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
            self.assertTrue(blocks, name)
            for block in blocks:
                with self.subTest(name, block=block):
                    self.assertIn(textwrap.indent(block, "  "), compiled)


if __name__ == "__main__":
    unittest.main()

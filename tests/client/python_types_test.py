"""The types of the Python package: what a type checker says of a user's code.

The checker is `python -m mypy --strict`; FLASHCORE_TYPE_CHECKER=pyright takes pyright.
"""

import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import typing
import unittest

import flashcore
from flashcore import _messages, aio, messages

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
PACKAGE = pathlib.Path(flashcore.__file__).resolve().parent
CHECKER = os.environ.get("FLASHCORE_TYPE_CHECKER", "mypy")
DOCUMENTS = ("README.md", "client/python/README.md")


def check(folder):
    """The checker's findings in the Python files of a folder; empty if there are none."""
    installed = "site-packages" in str(PACKAGE)
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if CHECKER == "mypy":
        command = ["--strict", "--no-error-summary", "--follow-imports=silent",
                   f"--cache-dir={os.environ.get('FLASHCORE_MYPY_CACHE', folder / 'cache')}"]
        if not installed:
            environment["MYPYPATH"] = str(PACKAGE.parent)
    else:
        settings = dict(extraPaths=[] if installed else [str(PACKAGE.parent)],
                        reportUnnecessaryTypeIgnoreComment="error", reportUnusedExpression="none")
        (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
        command = ["--pythonpath", sys.executable, "--project", str(folder)]
    files = [] if CHECKER == "pyright" else sorted(path.name for path in folder.glob("*.py"))
    done = subprocess.run([sys.executable, "-m", CHECKER, *command, *files], cwd=folder, env=environment,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout if done.returncode else ""


def parameters(function):
    """Their defaults by their names."""
    listed = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in listed if parameter.name != "self"}


def overloads_of(module, name):
    def function():
        pass

    function.__module__, function.__qualname__ = module, name
    return typing.get_overloads(function)


class CheckerTest(unittest.TestCase):
    maxDiff = None

    def test_the_readmes_code_and_the_cases(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for document in DOCUMENTS:
                text = (ROOT / document).read_text(encoding="utf-8")
                blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
                self.assertTrue(blocks, document)
                for i, block in enumerate(blocks):
                    name = re.sub(r"\W", "_", f"{document}_{i}")
                    (folder / f"{name}.py").write_text(block, encoding="utf-8")
            cases = (TESTS / "python_types_cases.py").read_text(encoding="utf-8")
            (folder / "cases.py").write_text(cases, encoding="utf-8")
            self.assertEqual(check(folder), "")


class SourceTest(unittest.TestCase):
    @unittest.skipIf(sys.version_info < (3, 11), "Python 3.11 knows the overloads of a function")
    def test_overloads_have_the_parameters_of_the_code(self):
        signatures = "flashcore._signatures"
        for code, module, name in (
                (flashcore.Client.attend, signatures, "InlineAttend.__call__"),
                (aio.Client.attend, signatures, "AsyncInlineAttend.__call__"),
                (flashcore.Client.attend_batch, signatures, "BatchAttend.__call__"),
                (aio.Client.attend_batch, signatures, "AsyncBatchAttend.__call__"),
                (flashcore.Sequence.attend, signatures, "SequenceAttend.__call__"),
                (aio.Sequence.attend, signatures, "AsyncSequenceAttend.__call__"),
                (flashcore.SequenceBatch.attend, signatures, "SequencesAttend.__call__"),
                (aio.SequenceBatch.attend, signatures, "AsyncSequencesAttend.__call__"),
                (flashcore.flash_attn_varlen_func, signatures, "VarlenFunc.__call__"),
                (flashcore.flash_attn_with_kvcache, signatures, "KvcacheFunc.__call__"),
                (flashcore.merge, "flashcore._requests", "merge"),
                (flashcore.Client.plan, signatures, "MakesPlan.__call__"),
                (aio.Client.plan, signatures, "MakesPlan.__call__"),
                (aio.Plan.run, "flashcore._plan", "Plan.run"),
                (aio.Plan.run, "flashcore.client", "Plan.run")):
            with self.subTest(module, name=name):
                overloads = overloads_of(module, name)
                self.assertTrue(overloads)
                wanted = parameters(code)
                for overload in overloads:
                    found = parameters(overload)
                    self.assertEqual(list(found), list(wanted))
                    for parameter, default in found.items():
                        # An overload of return_lse=True has no default for it.
                        self.assertIn(default, (wanted[parameter], inspect.Parameter.empty), parameter)

    def test_messages_have_the_fields_of_the_contract(self):
        for name in ("DeviceInfo", "KernelInfo", "Limits", "GetServerInfoResponse", "SequenceInfo"):
            wanted, empty = {}, _messages.message(name)()
            for field in empty.DESCRIPTOR.fields:
                names = {field.TYPE_STRING: str, field.TYPE_BYTES: bytes, field.TYPE_BOOL: bool,
                         field.TYPE_DOUBLE: float}
                kind = (getattr(messages, field.message_type.name) if field.message_type else
                        names.get(field.type, int))
                repeated = hasattr(getattr(empty, field.name), "extend")
                wanted[field.name] = typing.Sequence[kind] if repeated else kind
            self.assertEqual(typing.get_type_hints(getattr(messages, name)), wanted, name)


if __name__ == "__main__":
    unittest.main()

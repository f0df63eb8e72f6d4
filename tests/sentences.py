#!/usr/bin/env python3
"""Rejects sentences that begin backwards: with "Of", or with "What" or "Who" that asks nothing.

Reads the comments of C++, CUDA, proto, Python and shell, docstrings, and Markdown. Leaves out headings,
questions, code and CHANGELOG.md; folders called notes are only checked for "Of". Fails on any finding.

  sentences.py [ROOT]           prints file:line and each sentence
  sentences.py --count [ROOT]   prints the number of sentences of each folder
"""

import ast
import collections
import io
import pathlib
import re
import subprocess
import sys
import tokenize

C_LIKE = (".c", ".cc", ".h", ".cu", ".cuh", ".proto")
OPENING = re.compile(r"(?:^|(?<=\n\n)|(?<=[.:;!?]\s)|(?<=[.!?]\)\s)|(?<=\())(?:\*\*)?"
                     r"(Of|What|Who|Whose|Whom)\b")
SENTENCE = re.compile(r".*?(?:[.!?](?=\s|\)|$)|$)", re.DOTALL)


def blocks_of(lines):
    """[(line, text)] from [(line, column, text, begins)]: a line in the column of the line above continues
    its block, unless it begins one."""
    blocks = []
    for number, column, text, begins in lines:
        if blocks and not begins and (number, column) == (blocks[-1][0] + len(blocks[-1][2]), blocks[-1][1]):
            blocks[-1][2].append(text)
        else:
            blocks.append((number, column, [text]))
    return [(number, "\n".join(texts)) for number, _, texts in blocks]


def line_comments(text, mark):
    """Comments from `mark` to the end of a line, outside of strings."""
    comment = re.compile(rf"((?:[^\"]|\"(?:\\.|[^\"\\])*\")*?)(?<!\S){mark}(?!!) ?(.*)")
    found = [(number, match.group(1), match.group(2)) for number, line in enumerate(text.splitlines(), 1)
             if (match := comment.match(line))]
    return blocks_of([(number, len(code), words, bool(code.strip())) for number, code, words in found])


def python_comments(text):
    """Comments and docstrings."""
    found = [(token.start, token.string.lstrip("#").strip(), token.line[:token.start[1]].strip())
             for token in tokenize.generate_tokens(io.StringIO(text).readline)
             if token.type == tokenize.COMMENT]
    blocks = blocks_of([(*start, words, bool(code)) for start, words, code in found])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                docstring = node.body[0].value
                blocks.append((docstring.lineno, re.sub(r"\n +", "\n", docstring.value)))
    return blocks


def markdown(text):
    """Paragraphs, list items and cells of tables."""
    text = re.sub(r"^(```|~~~).*?^\1|<!--.*?-->", lambda match: re.sub(r"[^\n]", "", match.group()), text,
                  flags=re.DOTALL | re.MULTILINE)
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("|"):
            lines += [(number, 0, cell.strip(), True) for cell in line.split("|")]
        elif line.strip() and not line.startswith("#"):
            item = re.match(r"\s*(?:[-*>]|\d+\.)\s+", line)
            lines.append((number, 0, line[item.end():] if item else line.strip(), bool(item)))
    return blocks_of(lines)


def comments(name, text):
    """[(line, text)] of the prose in a file; empty for other kinds of files."""
    suffix = pathlib.PurePath(name).suffix
    if suffix in C_LIKE:
        return line_comments(text, "//")
    readers = {".md": markdown, ".py": python_comments, ".sh": lambda source: line_comments(source, "#")}
    return readers.get(suffix, lambda _: [])(text)


def findings(name, text):
    """Yields (line, sentence) of a file."""
    for number, block in comments(name, text):
        for match in OPENING.finditer(block):
            sentence = " ".join(SENTENCE.match(block, match.start()).group().split())
            old = "/notes/" in name and match.group(1) != "Of"
            if not old and not sentence.endswith("?"):
                yield number + block.count("\n", 0, match.start()), sentence


def main(arguments):
    count = arguments[:1] == ["--count"]
    root = pathlib.Path((arguments[count:] or [pathlib.Path(__file__).resolve().parents[1]])[0])
    names = subprocess.run(["git", "ls-files"], check=True, cwd=root, stdout=subprocess.PIPE, text=True)
    found = [(name, line, sentence) for name in names.stdout.splitlines()
             if name != "CHANGELOG.md" and (root / name).is_file()
             for line, sentence in findings(name, (root / name).read_text(errors="replace"))]
    if count:
        folders = collections.Counter("/".join(name.split("/")[:-1][:2]) or "." for name, _, _ in found)
        print("\n".join(f"{number:4} {folder}" for folder, number in sorted(folders.items())))
    else:
        print("\n".join(f"{name}:{line}: {sentence}" for name, line, sentence in found))
    if found:
        sys.exit(f"sentences: {len(found)} begin backwards; see CONTRIBUTING.md")
    print("sentences: ok")


if __name__ == "__main__":
    main(sys.argv[1:])

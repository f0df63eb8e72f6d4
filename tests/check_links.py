#!/usr/bin/env python3
"""Fails if a relative link, an anchor or a path in a Markdown file of this repository leads nowhere.

    tests/check_links.py [FOLDER]   checks the repository in FOLDER (default: this one)

Checks inline links and images, [text](target), reference definitions, [name]: target, and code spans
that are the path of a source or document, or its last parts: `transport/convert.cc`, `convert.cc`.
Leaves out other code, links to other hosts, what a build makes (`build/...`), and paths in what tells
of the past: CHANGELOG.md and folders called notes.
"""

import functools
import pathlib
import re
import subprocess
import sys
import urllib.parse

FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[`~]*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^\s()<>]+(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+[\"'][^)]*)?\s*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)", re.MULTILINE)
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
HTML_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
SOURCE = re.compile(r"(?:\.{1,2}/)*(?!build/)([\w-][\w./-]*\.(?:cc?|cuh?|h|md|proto|py|sh))")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.replace("`", ""), flags=re.UNICODE)
    return text.strip().lower().replace(" ", "-")


@functools.lru_cache(maxsize=None)
def anchors(path):
    """All anchors of a Markdown file. Among equal headings, the second gets -1, and so on."""
    text = FENCE.sub("", path.read_text())
    found, seen = set(HTML_ANCHOR.findall(text)), {}
    for heading in HEADING.findall(text):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return found


def blank(match):
    """As many spaces: keeps the line numbers."""
    return re.sub(r"[^\n]", " ", match.group())


def source_paths(text):
    """(line, path) of every code span in a Markdown text that is the path of a source."""
    text = FENCE.sub(blank, text)
    for span in CODE.finditer(text):
        if path := SOURCE.fullmatch(span.group().strip("` ")):
            yield text.count("\n", 0, span.start()) + 1, path.group(1)


def endings(files):
    """The last parts of every path: a/b.c and b.c."""
    return {"/".join(file.split("/")[n:]) for file in files for n in range(file.count("/") + 1)}


def links(text):
    """(line, target) of every link in a Markdown text."""
    text = CODE.sub(blank, FENCE.sub(blank, text))
    return sorted((text.count("\n", 0, match.start()) + 1, match.group(1))
                  for pattern in (LINK, DEFINITION) for match in pattern.finditer(text))


def problem(root, path, target):
    """The error in a link in the file `path`; None if there is none."""
    if ELSEWHERE.match(target):
        return None
    name, _, anchor = target.partition("#")
    name, anchor = urllib.parse.unquote(name), urllib.parse.unquote(anchor)
    if name.startswith("/"):
        return "an absolute path"
    file = (path.parent / name).resolve() if name else path
    if root != file and root not in file.parents:
        return "outside of the repository"
    if not file.exists():
        return "no such file"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return f"no heading with the anchor #{anchor}"
    return None


def main(root):
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True).stdout.splitlines()
    listed = [name for name in listed if (root / name).exists()]
    sources = endings(listed)
    paths = [root / name for name in listed if name.endswith(".md")]
    count, problems = 0, []
    for path in paths:
        name = path.relative_to(root)
        text = path.read_text()
        for line, target in links(text):
            count += 1
            if what := problem(root, path, target):
                problems.append(f"{name}:{line}: {target}: {what}")
        if name.name == "CHANGELOG.md" or name.parent.name == "notes":
            continue
        for line, source in source_paths(text):
            count += 1
            if source not in sources:
                problems.append(f"{name}:{line}: `{source}`: no such file")
    print("\n".join([*problems, f"{count} links in {len(paths)} files, {len(problems)} broken"]))
    return 1 if problems or not count else 0


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve().parents[1]
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve() if sys.argv[1:] else here))

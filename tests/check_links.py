#!/usr/bin/env python3
"""Fails if a relative link or an anchor in a Markdown file of this repository leads nowhere.

    tests/check_links.py [FOLDER]   checks the repository in FOLDER (default: this one)

Checks inline links and images, [text](target), and reference definitions, [name]: target. Leaves
out code, and links to other hosts.
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
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.replace("`", ""), flags=re.UNICODE)
    return text.strip().lower().replace(" ", "-")


@functools.lru_cache(maxsize=None)
def anchors(path):
    """All anchors of a Markdown file. Of equal headings, the second gets -1, and so on."""
    text = FENCE.sub("", path.read_text())
    found, seen = set(HTML_ANCHOR.findall(text)), {}
    for heading in HEADING.findall(text):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return found


def links(text):
    """(line, target) of every link in a Markdown text."""
    def blank(match):  # keeps the line numbers
        return re.sub(r"[^\n]", " ", match.group())
    text = CODE.sub(blank, FENCE.sub(blank, text))
    return sorted((text.count("\n", 0, match.start()) + 1, match.group(1))
                  for pattern in (LINK, DEFINITION) for match in pattern.finditer(text))


def problem(root, path, target):
    """What is wrong with a link in the file `path`; None if nothing is."""
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
        ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        check=True, capture_output=True, text=True).stdout.split()
    paths = [path for path in (root / name for name in listed) if path.exists()]
    count, problems = 0, []
    for path in paths:
        for line, target in links(path.read_text()):
            count += 1
            if what := problem(root, path, target):
                problems.append(f"{path.relative_to(root)}:{line}: {target}: {what}")
    print("\n".join([*problems, f"{count} links in {len(paths)} files, {len(problems)} broken"]))
    return 1 if problems or not count else 0


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve().parents[1]
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve() if sys.argv[1:] else here))

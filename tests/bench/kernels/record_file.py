"""The files of records: JSON with a line for each key, and for each row of a list of rows."""

import json
import pathlib


def text(value, indent="\n"):
    """The JSON of a value. Keys of objects and objects in lists each begin with `indent` and a space."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {text(entry, inner)}" for key, entry in value.items()]
        return "{" + inner + f",{inner}".join(entries) + indent + "}"
    if isinstance(value, list) and any(isinstance(row, dict) for row in value):
        return "[" + inner + f",{inner}".join(map(json.dumps, value)) + indent + "]"
    return json.dumps(value)


def write(path, value):
    pathlib.Path(path).write_text(text(value) + "\n", encoding="utf-8")

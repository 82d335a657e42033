"""Values in Python syntax, as JSON text."""

from __future__ import annotations

import json
import re

from silva.types import read_json

_TOKEN = re.compile(
    r"""(?P<string>'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<name>[A-Za-z_]\w*)|(?P<number>-?\d[\d.]*(?:[eE][+-]?\d+)?)|(?P<mark>[()\[\]{},:])|(?P<blank>\s+)""",
    re.S | re.X,
)
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.S)
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CONSTANTS = {
    **{"True": "true", "False": "false", "None": "null"},
    **{"true": "true", "false": "false", "null": "null"},
}
_OPENERS = {"(": "[", "[": "[", "{": "{"}
_CLOSERS = {")": "]", "]": "]", "}": "}"}


def quoted(text: str) -> str:
    """A JSON string; half a surrogate pair in it is written as an escape, which every client can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def checked_json(text: str) -> tuple[object, str] | None:
    """The value of a JSON text and the text without outer blanks; None where it is no JSON that all clients read."""
    text = text.strip()
    try:
        value = read_json(text, unique_keys=True)
        text.encode()
    except ValueError:
        return None
    return value, text


def python_value(text: str) -> tuple[object, str] | None:
    """The value of a Python literal and its JSON text; None where it is none."""
    end, inside = keyword_arguments(f"(_={text})", 0)
    if end != len(text) + 4 or inside is None:
        return None
    return checked_json(inside.removeprefix('{"_": ').removesuffix("}"))


def keyword_arguments(text: str, at: int) -> tuple[int, str | None]:
    """Where the parentheses at `at` close (-1: nowhere), and the keyword arguments in them as a JSON object.

    None where an argument is not a literal, comes twice or has no keyword.
    """
    out: list[str] = []
    depth, readable = 0, True
    while at < len(text):
        keyword = _KEYWORD.match(text, at) if depth == 1 else None
        if keyword:
            out.append(f'"{keyword.group(1)}": ')
            at = keyword.end()
            continue
        token = _TOKEN.match(text, at)
        if token is None:
            if text[at] in "'\"":
                return -1, None
            readable, at = False, at + 1
            continue
        at, part = token.end(), token.group()
        if part in _OPENERS:
            out.append(_OPENERS[part] if depth else "{")
            depth += 1
        elif part in _CLOSERS:
            depth -= 1
            if out[-1] == ", ":
                out.pop()
            out.append(_CLOSERS[part] if depth else "}")
            if not depth:
                whole = "".join(out)
                return at, whole if readable and checked_json(whole) else None
        elif token.lastgroup != "blank":
            word = _as_json(part, token.lastgroup)
            readable = readable and word is not None
            out.append(word or "")
    return -1, None


def _as_json(part: str, kind: str | None) -> str | None:
    if kind == "string":
        num = 3 if part[:3] in ("'''", '"""') and len(part) >= 6 else 1
        return quoted(_ESCAPE.sub(_unescaped, part[num:-num]))
    if kind == "name":
        return _CONSTANTS.get(part)
    return {",": ", ", ":": ": "}.get(part, part)


def _unescaped(found: re.Match[str]) -> str:
    code = found.group(1) or found.group(2) or found.group(3)
    if code:
        number = int(code, 16)
        return chr(number) if number < 0x110000 else found.group()
    char = found.group(4)
    return _PLAIN_ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)

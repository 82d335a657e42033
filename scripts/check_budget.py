"""The size budget: fails where a file, function, nesting, class or set of options grew past what a reader can hold.

Usage: python scripts/check_budget.py [FOLDER ...]   (default: src tests bench examples scripts)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4
MAX_PUBLIC_METHODS = 15
MAX_CLASS_LINES = 300
MAX_OPTIONS = 20

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def faults(path: Path) -> Iterator[str]:
    """One sentence for each budget that a file breaks."""
    text = path.read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines, {MAX_FILE_LINES} allowed"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _FUNCTIONS):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, {MAX_FUNCTION_LINES} allowed"
            deepest = nesting(node.body)
            if deepest > MAX_NESTING:
                yield f"{path}:{node.lineno}: {node.name} nests {deepest} deep, {MAX_NESTING} allowed"
        if isinstance(node, ast.ClassDef) and path.parts[0] != "tests":  # a state machine's rules are methods
            yield from class_faults(path, node)


def class_faults(path: Path, node: ast.ClassDef) -> Iterator[str]:
    """The same for one class."""
    place = f"{path}:{node.lineno}: {node.name}"
    public = [item.name for item in node.body if isinstance(item, _FUNCTIONS) and item.name[0] != "_"]
    if len(public) > MAX_PUBLIC_METHODS:
        yield f"{place} has {len(public)} public methods, {MAX_PUBLIC_METHODS} allowed"
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > MAX_CLASS_LINES:
        yield f"{place} has {length} lines, {MAX_CLASS_LINES} allowed"
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    if node.name.endswith(("Options", "Settings", "Config")) and len(fields) > MAX_OPTIONS:
        yield f"{place} has {len(fields)} fields, {MAX_OPTIONS} allowed"


def nesting(body: list[ast.stmt]) -> int:
    """How many blocks stand inside each other; `elif` does not count anew."""
    deepest = 0
    for statement in body:
        if not isinstance(statement, _BLOCKS):
            continue
        parts = [getattr(statement, name, []) for name in ("body", "finalbody")]
        parts += [handler.body for handler in getattr(statement, "handlers", [])]
        parts += [case.body for case in getattr(statement, "cases", [])]
        other = getattr(statement, "orelse", [])
        chained = isinstance(statement, ast.If) and len(other) == 1 and isinstance(other[0], ast.If)
        inside = max([nesting(part) for part in parts] + ([] if chained else [nesting(other)]))
        deepest = max(deepest, 1 + inside, nesting(other) if chained else 0)
    return deepest


def main(folders: list[str]) -> int:
    roots = [Path(folder) for folder in folders or ["src", "tests", "bench", "examples", "scripts"]]
    paths = [path for root in roots if root.exists() for path in sorted(root.rglob("*.py"))]
    found = [fault for path in paths for fault in faults(path)]
    print("\n".join(found) if found else f"size budget kept by {len(paths)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

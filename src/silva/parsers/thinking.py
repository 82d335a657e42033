"""Reasoning between two marks at the start of a turn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkBlock:
    """`open` and `close`, and how many newlines the family's template writes inside each and behind the block."""

    open: str = "<think>"
    close: str = "</think>"
    inside: int = 0
    behind: int = 0

    @property
    def end_mark(self) -> str:
        return self.close

    def split(self, text: str, opening: str) -> tuple[str, str]:
        """Reasoning and the rest. The generation prompt may have opened the block, or opened and closed it."""
        if opening.rfind(self.open) > opening.rfind(self.close):
            rest = _after_newlines(text, self.inside) if opening.endswith(self.open) else text
        else:
            stripped = text.lstrip("\n")
            if not stripped.startswith(self.open):
                return "", _after_newlines(text, self.behind) if opening.endswith(self.close) else text
            rest = _after_newlines(stripped[len(self.open) :], self.inside)
        thought, close, content = rest.partition(self.close)
        if not close:
            return rest, ""
        for _ in range(self.inside):
            thought = thought.removesuffix("\n")
        return thought, _after_newlines(content, self.behind)


def _after_newlines(text: str, num: int) -> str:
    """`text` without up to `num` newlines at its start."""
    for _ in range(num):
        text = text.removeprefix("\n")
    return text

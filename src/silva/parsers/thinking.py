"""Reasoning between two marks at the start of a turn."""

from __future__ import annotations

from dataclasses import dataclass

from silva.parsers.parts import without_newlines


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkBlock:
    """Reasoning between two marks, and the newlines that the family's template writes around it."""

    open: str = "<think>"
    """The mark before the reasoning."""
    close: str = "</think>"
    """The mark behind the reasoning."""
    inside: int = 0
    """How many newlines are inside each mark."""
    behind: int = 0
    """How many newlines are behind the block."""

    @property
    def end_mark(self) -> str:
        return self.close

    def split(self, text: str, opening: str) -> tuple[str, str]:
        """Reasoning and the rest. The generation prompt may have opened the block, or opened and closed it."""
        if opening.rfind(self.open) > opening.rfind(self.close):
            rest = without_newlines(text, before=self.inside) if opening.endswith(self.open) else text
        else:
            stripped = text.lstrip("\n")
            if not stripped.startswith(self.open):
                return "", without_newlines(text, before=self.behind) if opening.endswith(self.close) else text
            rest = without_newlines(stripped[len(self.open) :], before=self.inside)
        thought, close, content = rest.partition(self.close)
        if not close:
            return rest, ""
        return without_newlines(thought, behind=self.inside), without_newlines(content, before=self.behind)

"""Options of matching: when a request continues a conversation that is known."""

from __future__ import annotations

from dataclasses import dataclass

from silva.forest.echo import EchoMatch
from silva.forest.profiles import Profile, parse_profiles
from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class MatchOptions:
    """How the history of a request is compared with committed turns."""

    agentic_echo_match: EchoMatch = opt("matching", "lenient")
    """How an echoed assistant message is compared with the one sent; lenient forgives trimmed blanks, dropped reasoning
    and renamed call ids."""
    agentic_profiles: list[str] = opt("matching", ["auto"], metavar="NAME")
    """Noise of system prompts that makes no new state: auto (what is found; default), none, claude-code-billing@1,
    env-date@1."""

    @property
    def lenient(self) -> bool:
        """An assistant message that lost something on its way back is still the turn that was sampled."""
        return self.agentic_echo_match == "lenient"

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles in force. Raises ConfigError for names that are none."""
        return parse_profiles(self.agentic_profiles)

"""Canonicalisation profiles: known noise of system prompts that is ignored when histories are compared.

Some clients write a nonce or the day into their system prompt anew in each request, so that no two histories are the
same. A profile names one such place, exactly; what it matches is left out of the message's identity and of nothing
else: the model goes on reading the text that was seen first. Only the first message of a history is examined, and only
where it is a system message. A profile that has to change gets a new version, since records name it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from silva.forest.echo import MessageAt
from silva.forest.identity import message_digest
from silva.types import ConfigError, Message

AUTO, NONE = "auto", "none"
REPAIR_PREFIX = "profile:"
"""What the record of a repair by a profile begins with; its name follows."""
_MAX_KNOWN = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One kind of noise. `noise` is searched in the text of the first system message; its first match goes, or the
    group `noise` of it where the pattern has one. `marker` must stand in a text that has the noise: most have not.

    `setting` is what a user may set in the client so that it sends no such noise, in words.
    """

    name: str
    """Name and version, for options and rows."""
    about: str
    """What it is, in words."""
    marker: str
    """A text with the noise contains this; most texts do not."""
    noise: re.Pattern[str]
    """Its first match is removed, or the group `noise` of it where the pattern has one."""
    setting: str | None = None
    """What to set in the client so that it sends no such noise; None where nothing helps."""

    def cleaned(self, text: str) -> str:
        """The text without the noise; the text itself where it has none."""
        found = self.noise.search(text) if self.marker in text else None
        if found is None:
            return text
        start, end = found.span("noise" if "noise" in self.noise.groupindex else 0)
        return text[:start] + text[end:]


BILLING = Profile(
    name="claude-code-billing@1",
    about="Claude Code's `x-anthropic-billing-header: cc_version=...; ... cch=...;` at the start of the system text",
    marker="x-anthropic-billing-header:",
    # The line is a block of its own, and blocks are joined without anything between: only its form shows where it ends.
    noise=re.compile(r"\Ax-anthropic-billing-header:(?: (?:cc_[a-z_]{1,32}|cch)=[A-Za-z0-9._+-]{1,128};){1,16}\n?"),
    setting="CLAUDE_CODE_ATTRIBUTION_HEADER=0 in the environment of Claude Code",
)
ENV_DATE = Profile(
    name="env-date@1",
    about="the day in a line `Today's date: ...` of the `<env>` block that Claude Code and opencode write",
    marker="Today's date: ",
    noise=re.compile(
        r"^<env>\n(?:(?!</?env>)[^\n]*\n){0,64}? {0,8}Today's date: "
        r"(?P<noise>\d{4}-\d{2}-\d{2}|[A-Z][a-z]{2} [A-Z][a-z]{2} \d{2} \d{4})\n",
        re.M,
    ),
)
PROFILES = {profile.name: profile for profile in (BILLING, ENV_DATE)}


def parse_profiles(names: Sequence[str]) -> tuple[Profile, ...]:
    """The profiles that option values name: `auto` all, `none` none. Raises ConfigError that names what is wrong."""
    if not names:
        raise ConfigError(f"--agentic-profiles names nothing; use {AUTO}, {NONE} or names of profiles")
    for word in (AUTO, NONE):
        if word in names and len(names) > 1:
            raise ConfigError(
                f"--agentic-profiles: {word!r} stands alone, but it has {len(names)} values: {' '.join(names)}"
            )
    if names[0] in (AUTO, NONE):
        return tuple(PROFILES.values()) if names[0] == AUTO else ()
    for name in names:
        if name not in PROFILES:
            close = difflib.get_close_matches(name, PROFILES, n=1, cutoff=0.4)
            hint = f" (did you mean {close[0]}?)" if close else ""
            known = f"{', '.join(PROFILES)}, {AUTO} and {NONE}"
            raise ConfigError(f"--agentic-profiles: {name!r} is no known profile{hint}; known are {known}")
    return tuple(PROFILES[name] for name in dict.fromkeys(names))


class Canonicaliser:
    """Takes the noise of some profiles out of the identity of a history. It remembers digests only."""

    def __init__(self, profiles: Sequence[Profile]):
        self._profiles = tuple(profiles)
        self._known: dict[bytes, tuple[bytes, tuple[str, ...]]] = {}

    def identify(self, digests: Sequence[bytes], message_at: MessageAt) -> tuple[Sequence[bytes], tuple[str, ...]]:
        """The digests that count, and the names of the profiles that took something out.

        The first message is formed (by `message_at`) only where its digest was never seen.
        """
        if not self._profiles or not digests:
            return digests, ()
        known = self._known.get(digests[0])
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            message = message_at(0)
            clean, names = self.clean(message)
            known = self._known[digests[0]] = (message_digest(clean) if names else digests[0], names)
        digest, names = known
        return ([digest, *digests[1:]] if names else digests), names

    def clean(self, first: Message) -> tuple[Message, tuple[str, ...]]:
        """The first message of a history without the noise, and the names of the profiles that found some."""
        names: list[str] = []
        if first.role == "system":
            for profile in self._profiles:
                text = profile.cleaned(first.content)
                if text != first.content:
                    names.append(profile.name)
                    first = replace(first, content=text)
        return first, tuple(names)


def linear_under(old: str, new: str) -> Profile | None:
    """The profile that makes two system texts the same, where one does."""
    return next((profile for profile in PROFILES.values() if profile.cleaned(old) == profile.cleaned(new)), None)

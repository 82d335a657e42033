"""Canonicalisation profiles: what counts as noise, exactly, and what only looks like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.forest.identity import message_digest
from silva.forest.profiles import PROFILES, Canonicaliser, linear_under, parse_profiles
from silva.types.errors import ConfigError
from silva.types.messages import Message, Role

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
ENV = "You help.\n\n<env>\nWorking directory: /w\nToday's date: 2025-09-29\n</env>\nMore."
ALL = Canonicaliser(tuple(PROFILES.values()))


def cleaned(text: str, role: Role = "system") -> tuple[str, tuple[str, ...]]:
    message, names = ALL.clean(Message(role=role, content=text))
    return message.content, names


@pytest.mark.parametrize(
    ("text", "left", "name"),
    [
        (HEADER + "You are", "You are", "claude-code-billing@1"),
        (HEADER + "\nYou are", "You are", "claude-code-billing@1"),
        (HEADER, "", "claude-code-billing@1"),
        (HEADER.replace("cch=", "secret="), " secret=fa690;", "claude-code-billing@1"),
        ("x-anthropic-billing-header: cc_version=3;a=b; cch=1;", "a=b; cch=1;", "claude-code-billing@1"),
        (ENV, ENV.replace("2025-09-29", ""), "env-date@1"),
        (
            "<env>\n  Platform: linux\n  Today's date: Mon Sep 29 2025\n</env>",
            "<env>\n  Platform: linux\n  Today's date: \n</env>",
            "env-date@1",
        ),
    ],
)
def test_noise_in_its_exact_place_goes(text: str, left: str, name: str):
    assert cleaned(text) == (left, (name,))


@pytest.mark.parametrize(
    "text",
    [
        " " + HEADER,
        "You are\n" + HEADER,
        HEADER.replace("x-anthropic-", "x-"),
        "x-anthropic-billing-header: ",
        "x-anthropic-billing-header: cch=fa690",
        "x-anthropic-billing-header: cch=fa 690;",
        "x-anthropic-billing-header: cch=" + "a" * 129 + ";",
        "Today's date: 2025-09-29\n",
        "<env>\nPlatform: linux\n</env>\nToday's date: 2025-09-29\n",
        "<env>\nToday's date: 2025-09-29 or so\n</env>\n",
        "the word <env>\nToday's date: 2025-09-29\n",
    ],
)
def test_what_only_looks_like_noise_stays(text: str):
    assert cleaned(text) == (text, ())


def test_other_roles_keep_everything():
    for role in ("user", "tool", "assistant"):
        assert cleaned(HEADER + ENV, role) == (HEADER + ENV, ())


def test_only_the_first_message_is_looked_at():
    first, second = (Message(role="system", content=HEADER + text) for text in "ab")
    digests = [message_digest(first), message_digest(second)]
    clean, names = ALL.identify(digests, lambda index: (first, second)[index])
    assert clean == [message_digest(Message(role="system", content="a")), digests[1]] and len(names) == 1
    assert ALL.identify(digests, lambda index: pytest.fail("a known message is formed again")) == (clean, names)


@given(st.text(max_size=20), st.text(max_size=20))
def test_texts_differ_behind_the_noise_as_they_did(left: str, right: str):
    one, other = (
        cleaned(HEADER.replace("fa690", nonce) + "You " + text) for nonce, text in (("1", left), ("2", right))
    )
    assert (one == other) == (left == right)
    assert (linear_under(HEADER + left, HEADER + "\n" + left) is not None) or left.startswith("\n")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([], "nothing"),
        (["auto", "none"], "alone"),
        (["claude-code-billing"], "claude-code-billing@1"),
        (["x"], "known"),
    ],
)
def test_wrong_names_are_told(values: list[str], word: str):
    with pytest.raises(ConfigError, match=word):
        parse_profiles(values)

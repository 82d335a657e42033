"""The text view: what people read, and that nothing in it can drive a terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_records import begin, exported, failed, forest, joined, node

from silva.store.documents import show_run, show_session
from silva.store.files import LedgerError
from silva.store.ledger import RunLedger
from silva.types.rollout import TrainingSample
from silva.view.show import printable, render_run, render_session

EVIL = "\x1b]0;owned\x07 \x1b[2J\r\x9b31m \u202eabc\u2028 \ud800"


def test_a_session_reads_turn_by_turn(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        ledger.end_session(exported(f"{group}-s0", group)).result(5)
        text = render_session(show_session(tmp_path, f"{group}-s0"), lambda ids: f"<{ids[0]}>\n")
    assert text.startswith("session train-g0-s0  group train-g0  train  exported  reward 1\n")
    assert (
        "node 2 after 1  response  4 tokens, 7 from the start  finish stop  2 aborts  [key02]\n  user:\n    m2\n"
        in text
    )
    assert re.search(r"^ +1 +8 +1 +-0\.1000 +3 +'<8>\\n'$", text, re.MULTILINE)
    assert re.search(r"^ +0 +1 +0 +- +- +'<1>\\n'$", text, re.MULTILINE)
    assert re.search(r"^ +r0 +chat +root +2 +200 +stop +4 \+ 3 +0\.50s +0\.25s$", text, re.MULTILINE)
    assert 'r1 left the known history at /messages/2/content:\n    was "a"\n    now "b"' in text
    assert re.search(r"^ +- +4 +2 +4 +12 +5 +1 +-$", text, re.MULTILINE)


def test_every_context_is_shown_with_the_credit_of_each_turn(tmp_path: Path) -> None:
    nodes = forest()
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        place: dict[str, Any] = {"session_id": f"{group}-s0", "group_id": group}
        main = joined(nodes, 4, name="main", reward=0.5, helpers={"format": 1.0, EVIL: 0.25}, **place)
        none = joined(nodes, 2, name=f"all {EVIL}", reward=None, metadata={"role": "side"}, **place)
        rest = joined(nodes, 6, name="rest", reward=None, **place)
        samples = [
            replace(main, credit=1.0, response_credits=(-0.125, 1.0)),
            replace(_untrained(none, len(none.token_ids)), credit=-1.25, response_credits=(-0.125,)),
            replace(_untrained(rest, 7), credit=-0.125),
        ]
        ledger.end_session(exported(f"{group}-s0", group, nodes=nodes, samples=samples)).result(5)
        doc = show_session(tmp_path, f"{group}-s0")
    text = render_session(doc)
    assert [context["num_trainable"] for context in doc["contexts"]] == [5, 0, 2]
    assert [sample["name"] for sample in doc["samples"]] == ["main", "rest"]
    assert doc["contexts"][0]["responses"] == [[2, 4, 3], [4, 10, 2]]
    assert re.search(r"^ +main +4 +2 +4 +12 +5 +0\.5 +1$", text, re.MULTILINE)
    assert re.search(r"^ +all .* +2 +1 +4 +7 +0 +- +-1\.25$", text, re.MULTILINE)
    assert "\n  (trained 0: each of its turns is trained by a context that stands before it)\n" in text
    assert "\n  main, with its reward: format 1, \\x1b]0;owned" in text
    assert "\n  main, credit by turn: node 2 -0.125, node 4 1\n" in text
    assert ', metadata: {"role": "side"}\n' in text and "rest, credit" not in text
    assert all(char == "\n" or char.isprintable() for char in text)


def _untrained(sample: TrainingSample, num: int) -> TrainingSample:
    """The sample without its first `num` tokens in training."""
    return replace(
        sample,
        loss_mask=[0] * num + sample.loss_mask[num:],
        logprobs=[0.0] * num + sample.logprobs[num:],
        kept_mass=[1.0] * num + sample.kept_mass[num:],
    )


def test_long_token_runs_are_shortened_unless_full(tmp_path: Path) -> None:
    nodes = [
        node(0, None, "root", [], 0, messages=[]),
        node(1, 0, "observation", list(range(100, 160)), 60, messages=[{"role": "user", "content": "x" * 5000}]),
        node(2, 1, "response", list(range(200, 240)), 1),
    ]
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        sample = joined(nodes, 2, session_id=f"{group}-s0", group_id=group)
        ledger.end_session(exported(f"{group}-s0", group, nodes=nodes, samples=[sample], requests=[])).result(5)
        doc = show_session(tmp_path, f"{group}-s0")
    short, full = render_session(doc), render_session(doc, full=True)
    assert "107  0" in short and " 120 " not in short and "159  0" in short
    assert "3800 characters more; --full shows them" in short
    assert all(f" {token} " in full for token in (120, 130, 220))
    assert "x" * 5000 in full


def test_what_agents_wrote_cannot_reach_the_terminal(tmp_path: Path) -> None:
    messages = [
        {"role": "assistant", "content": f"one\n\ttwo {EVIL}", "reasoning_content": EVIL},
        {"role": "tool", "tool_call_id": EVIL, "content": EVIL},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": EVIL, "function": {"name": EVIL, "arguments": EVIL}}],
        },
    ]
    nodes = [
        node(0, None, "root", [], 0, messages=[]),
        node(1, 0, "observation", [5], 1, messages=messages),
        node(2, 1, "response", [6, 7], 1, messages=messages),
    ]
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        record = failed(f"{group}-s0", group, EVIL, error=EVIL, metadata={EVIL: EVIL}, nodes=nodes)
        ledger.end_session(record).result(5)
        session = render_session(show_session(tmp_path, f"{group}-s0"), lambda _: EVIL)
        run = render_run(show_run(tmp_path))
    for text in (session, run):
        assert "\\x1b[2J" in text
        assert all(char == "\n" or char.isprintable() for char in text)
        text.encode("utf-8")
    assert "    one\n        two \\x1b]0;owned" in session


@given(st.text(st.characters(codec=None)))
def test_printable_text_is_printable(text: str) -> None:
    shown = printable(text)
    shown.encode("utf-8")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", shown)


def test_a_run_reads_as_counts_and_a_line_a_session(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        ledger.flush()
        assert "no sessions yet" in render_run(show_run(tmp_path))
        for number in range(210):
            group = begin(ledger, number)
            ledger.end_session(failed(f"{group}-s0", group))
        other = begin(ledger, 0, mode="eval")
        ledger.end_session(exported(f"{other}-s0", other, mode="eval"))
    doc = show_run(tmp_path)
    text = render_run(doc)
    assert "prompts: pending 210\nsessions: failed 210 (agent_exit 210)\neval prompts: pending 1\n" in text
    assert re.search(r"^ +eval-g0-s0 +eval-g0 +eval +exported +1$", text, re.MULTILINE)
    assert "\n  train-g0-s0" not in text and "11 earlier sessions are not listed" in text
    assert "\nthe first agent_exit: session train-g0-s0\n    exit 3\n" in text
    assert "train-g0-s0" in render_run(doc, full=True)


def test_unknown_runs_and_sessions_are_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is not a directory"):
        show_run(tmp_path / "missing")
    with pytest.raises(LedgerError, match="holds no run"):
        show_run(tmp_path)
    with RunLedger(tmp_path) as ledger:
        ledger.flush()
        with pytest.raises(LedgerError, match="no sessions yet"):
            show_session(tmp_path, "anything")
        group = begin(ledger, 0)
        ledger.flush()
        with pytest.raises(LedgerError, match="did you mean train-g0-s0"):
            show_session(tmp_path, "train-g0-so")
        with pytest.raises(LedgerError, match="did you mean train-g0-s0"):
            show_session(tmp_path, "train")
        with pytest.raises(LedgerError, match="lists its sessions"):
            show_session(tmp_path, "\ud800 zzz")
        ledger.end_session(failed(f"{group}-s0", group))

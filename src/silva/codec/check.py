"""The start check: proof of the tokenizer, and a table of the steps that a chat template allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from silva.codec.delta import AnsweredTurn, DeltaLearner, ImpureTransition, Step, small_beginnings
from silva.codec.encoder import ControlToken, TokenText
from silva.codec.ends import TurnEnds
from silva.codec.frame import Frame
from silva.codec.late_system import as_user_turns
from silva.codec.slots import CONTEXT, Slots
from silva.codec.whole import history_of, learn_whole
from silva.types import JsonObject, Message, ToolCall, TransitionRefused

Status = Literal["pure", "rewritten", "whole", "impure", "refused"]

_TEXTS = (
    "plain words",
    " leading and trailing ",
    "\n\nlines\r\nmore\n",
    "é e\u0301 ａ ǆ \u200d",
    "漢字かな 한글",
    "👩\u200d👩\u200d👧 🙂",
    "שלום عربي",
    "\u00a0\u2003x\u3000",
    "x = {'a': [1, 2.5e-3]}; // 100%",
    "\t\tdef f():\n    return 12345",
    "don't I'll 1234567",
    "a",
    "\u0301",
    " ",
    "\n",
    "\n\n\n\n",
    "          ",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofLine:
    """One proof of the tokenizer."""

    name: str
    """The property that was tried."""
    num_ok: int
    """How many tries succeeded."""
    num_tried: int
    """How many texts were tried."""
    example: str = ""
    """The last text that failed; empty where none did."""

    @property
    def ok(self) -> bool:
        return self.num_ok == self.num_tried


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCell:
    """What may follow one kind of assistant turn.

    pure: the same tokens in any history, and the template leaves the history alone. rewritten: the same tokens in any
    history, but the template would rewrite earlier turns (we keep what the model read and wrote). whole: the tokens
    depend on the history and come from a render of the whole one each time. impure: the same, but earlier turns do
    not stay as they were. refused: the template raises, or drops or moves a text.
    """

    assistant: str
    """The kind of assistant turn, such as `text + call`."""
    tail: str
    """The roles of the messages behind it, such as `tool, user`."""
    status: Status
    """One of the words above."""
    reason: str = ""
    """Why the status is not pure; empty where it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecReport:
    """The outcome of a start check. `str()` gives a table for people, `to_json()` the same for programs."""

    proofs: tuple[ProofLine, ...]
    """What was proven about the tokenizer."""
    cells: tuple[StepCell, ...]
    """One for each kind of assistant turn and of messages behind it."""
    features: JsonObject
    """What was found about the template, by name."""

    @property
    def ok(self) -> bool:
        """The tokenizer is proven, and a user message may follow an answer."""
        return all(proof.ok for proof in self.proofs) and self.status("text", "user") in ("pure", "rewritten", "whole")

    def status(self, assistant: str, tail: str) -> Status:
        return next(cell.status for cell in self.cells if (cell.assistant, cell.tail) == (assistant, tail))

    def to_json(self) -> JsonObject:
        return {
            "ok": self.ok,
            "proofs": [
                {"name": p.name, "ok": p.num_ok, "tried": p.num_tried, "example": p.example} for p in self.proofs
            ],
            "cells": [asdict(cell) for cell in self.cells],
            "features": self.features,
        }

    def __str__(self) -> str:
        lines = [f"tokenizer: {p.name} {p.num_ok} of {p.num_tried}{_example(p)}" for p in self.proofs]
        lines += [f"template: {name} = {value}" for name, value in self.features.items()]
        kinds = list(dict.fromkeys(cell.assistant for cell in self.cells))
        tails = list(dict.fromkeys(cell.tail for cell in self.cells))
        widths = [max(len(tail), 9) for tail in tails]
        lines.append("after \\ comes".ljust(16) + "  ".join(t.ljust(w) for t, w in zip(tails, widths, strict=True)))
        for kind in kinds:
            row = [self.status(kind, tail).ljust(w) for tail, w in zip(tails, widths, strict=True)]
            lines.append(kind.ljust(16) + "  ".join(row))
        reasons: dict[str, list[str]] = {}
        for cell in self.cells:
            if cell.reason:
                reasons.setdefault(cell.reason, []).append(f"{cell.assistant} -> {cell.tail}")
        lines += [f"- {', '.join(steps)}: {reason}" for reason, steps in reasons.items()]
        return "\n".join(line.rstrip() for line in lines)


def _example(proof: ProofLine) -> str:
    return "" if proof.ok else f" (FAILED, for example on {proof.example!r})"


def check_codec(text: TokenText, plain: Frame, called: Frame, ends: TurnEnds) -> CodecReport:
    """`plain` renders without tools, `called` with one."""
    return CodecReport(
        proofs=(prove_sandwiches(text), prove_round_trip(text)),
        cells=tuple(
            _cell(plain, called, ends, (kind, message), (tail, messages))
            for kind, message in _assistants(called).items()
            for tail, messages in _tails().items()
        ),
        features=_features(text, called, ends),
    )


def prove_sandwiches(text: TokenText, num: int = 300, seed: int = 0) -> ProofLine:
    """Random strings of control tokens and texts: joined encoding equals the full tokenizer's."""
    rng = random.Random(seed)
    tokens = [token for token in text.control.values() if not token.unclear]
    failed: list[str] = []
    for _ in range(num):
        items: list[str | ControlToken] = []
        for _ in range(rng.randint(1, 3)):
            if tokens:
                items.append(rng.choice(tokens))
            items += rng.choices(_TEXTS, k=rng.randint(0, 3))
        whole = "".join(item if isinstance(item, str) else item.text for item in items)
        expected = text.full.encode(whole, add_special_tokens=False).ids
        if text.run(text.compile(items, first=True), lambda hole: "") != expected:
            failed.append(whole)
    return _proof("text between control tokens encodes as in the whole", num, failed)


def prove_round_trip(text: TokenText) -> ProofLine:
    """The spelling of each control token survives as plain text."""
    failed: list[str] = []
    for token in text.control.values():
        ids = text.encode_plain(f"a{token.text}b")
        shown = text.full.decode(ids, skip_special_tokens=False)
        if shown != f"a{token.text}b" or any(i in text.by_id for i in ids):
            failed.append(token.text)
    return _proof("control tokens in user text stay plain text", len(text.control), failed)


def _proof(name: str, num: int, failed: list[str]) -> ProofLine:
    return ProofLine(name=name, num_ok=num - len(failed), num_tried=num, example=failed[-1] if failed else "")


def _assistants(called: Frame) -> dict[str, Message]:
    one = ToolCall(id="a1b2c3d4e", name=called.tool_name, arguments='{"a": "b"}')
    two = ToolCall(id="f5g6h7i8j", name=called.tool_name, arguments='{"a": "b"}')
    return {
        "text": Message(role="assistant", content="t"),
        "reasoning": Message(role="assistant", content="t", reasoning="r"),
        "call": Message(role="assistant", tool_calls=(one,)),
        "text + call": Message(role="assistant", content="t", tool_calls=(one,)),
        "2 calls": Message(role="assistant", tool_calls=(one, two)),
    }


def _tails() -> dict[str, tuple[Message, ...]]:
    user, system = Message(role="user", content="u"), Message(role="system", content="s")
    one = Message(role="tool", content="r", tool_call_id="a1b2c3d4e")
    two = Message(role="tool", content="r", tool_call_id="f5g6h7i8j")
    return {
        "(none)": (),
        "user": (user,),
        "user, user": (user, user),
        "tool": (one,),
        "tool, tool": (one, two),
        "tool, user": (one, user),
        "system, user": (system, user),
    }


def _cell(
    plain: Frame,
    called: Frame,
    ends: TurnEnds,
    assistant: tuple[str, Message],
    tail: tuple[str, tuple[Message, ...]],
) -> StepCell:
    (kind, message), (name, messages) = assistant, tail
    frame = called if message.tool_calls or any(m.role == "tool" for m in messages) else plain
    status, reason = _learn_cell(frame, ends, message, messages)
    marked = as_user_turns(messages, 0)
    if status == "refused" and marked != messages:
        instead, _ = _learn_cell(frame, ends, message, marked)
        if instead in ("pure", "rewritten"):
            reason += " Where it raises, a user turn with a mark is written instead."
    return StepCell(assistant=kind, tail=name, status=status, reason=reason)


def _learn_cell(frame: Frame, ends: TurnEnds, message: Message, messages: tuple[Message, ...]) -> tuple[Status, str]:
    """The status of a step and the reason for it."""
    step = Step.of(frame, ends, AnsweredTurn(frame, message), messages)
    try:
        found = DeltaLearner(step, None, survey=True).learn()
    except ImpureTransition as error:
        fault = _whole_fault(frame, ends, message, messages)
        if fault is not None:
            return "impure", fault
        return "whole", f"{error.what}: the whole history is rendered each time"
    except TransitionRefused as error:
        return "refused", str(error)
    rewritten = [name for name, kept in found.prefixes if not kept]
    if rewritten:
        return "rewritten", f"the template rewrites earlier text (behind {', '.join(rewritten)})"
    return "pure", ""


def _whole_fault(frame: Frame, ends: TurnEnds, message: Message, messages: Sequence[Message]) -> str | None:
    """Why a step cannot be formed from a render of the whole history, None where it can behind every beginning."""
    served = False
    for name in small_beginnings(frame, Slots(CONTEXT), None):
        context = AnsweredTurn(frame, message)
        history = history_of(small_beginnings(frame, context.slots, None)[name])
        try:
            learn_whole(Step.of(frame, ends, context, messages), history)
        except ImpureTransition as error:
            return f"{error} (behind {name!r})"
        except TransitionRefused:
            continue  # this beginning is none that the template allows
        served = True
    return None if served else "the chat template refuses this step behind every beginning"


def _features(text: TokenText, called: Frame, ends: TurnEnds) -> JsonObject:
    def spelled(ids: Sequence[int]) -> list[str]:
        return [text.by_id[i].text if i in text.by_id else str(i) for i in sorted(ids)]

    style = called.style
    return {
        "stop tokens": spelled(list(ends.stop_ids)),
        "closes old turns with": spelled(list(ends.closers - ends.stop_ids)),
        "the next role's marker ends a turn": ends.opener,
        "tool arguments": "JSON text" if style.arguments_as_text else "mapping",
        "nine-character call ids only": style.nine_ids,
        "whole-sequence first word differs": text.inner_differs,
        "shows images of": [role for role in ("user", "tool", "system") if called.image_part(role) is not None],
    }

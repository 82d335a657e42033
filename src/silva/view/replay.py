"""The text of `silva check --replay`: each recorded request, where it met the history, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from silva.types import JsonObject
from silva.view.show import printable, value_text


def render_replay(doc: JsonObject) -> str:
    """A block a session, then the verdict."""
    lines: list[str] = []
    for session in doc["sessions"]:
        lines += [*_session(session), ""]
    if doc["num_other_requests"]:
        lines.append(f"{doc['num_other_requests']} other requests (no model turns) were left out")
    bad = sum(not session["linear"] for session in doc["sessions"])
    verdict = f"PASS {printable(str(doc['file']))}: every session is linear"
    lines.append(verdict if not bad else f"FAIL {printable(str(doc['file']))}: {bad} session(s) would not be linear")
    return "\n".join(lines) + "\n"


def _session(session: JsonObject) -> Iterator[str]:
    yield f"session {printable(session['session'])}"
    for number, turn in enumerate(session["requests"]):
        yield from _turn(turn, number)
    shape = f"{session['num_roots']} root(s), {session['num_leaves']} leaf/leaves"
    yield f"  linear: {shape}" if session["linear"] else f"  NOT linear: {shape}"
    for flags in session["linear_with"]:
        yield f"  linear with: {flags}"
    if not session["linear"] and not session["linear_with"]:
        yield "  no option makes it linear; --agentic-export last or leaves exports what there is"
    for words in session["client_settings"]:
        yield f"  in the client: {words}"


def _turn(turn: JsonObject, number: int) -> Iterator[str]:
    repairs = "".join(f" +{printable(kind)}" for kind in turn["repairs"])
    yield f"  line {turn['line']}  {turn['path']}  {turn['match'] or '-'}{repairs}"
    if turn["http_status"] != 200:
        yield f"    refused with {turn['http_status']}: {printable(str(turn['error']))}"
    difference = turn["difference"]
    if difference:
        yield f"    leaves the known history at {printable(str(difference['pointer']))}"
        yield f"      known  {value_text(difference['old'])}"
        yield f"      sent   {value_text(difference['new'])}"
    elif turn["match"] in ("branch", "root") and number:
        yield "    asks again from a known state" if turn["match"] == "branch" else "    begins a history of its own"
    if turn["answer"] == "not as recorded":
        yield "    the recorded answer cannot be said so that the parsers in force read it back"

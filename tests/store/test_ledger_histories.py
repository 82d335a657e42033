"""Whatever happens in whatever order, the two ledgers add up, also across stops and resumes."""

from __future__ import annotations

import tempfile
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from store_records import exported, failed

from silva.store.ledger import RunLedger
from silva.store.queries import check_ledgers, counts, open_run

STEPS = st.lists(
    st.tuples(st.sampled_from(["issue", "group", "session", "end", "retry", "finish", "stop"]), st.integers(0, 11)),
    max_size=40,
)


class History:
    """Drives a ledger as a run would, keeping its own books."""

    def __init__(self, run_dir: str):
        self.run_dir = run_dir
        self.ledger = RunLedger(run_dir)
        self.states: dict[str, tuple[str, int | None]] = {}
        self.groups: dict[str, tuple[str, int]] = {}
        self.sessions: dict[str, tuple[str, int, int, str]] = {}
        self.step = 0

    def play(self, action: str, pick: int) -> None:
        getattr(self, action)(pick)

    def issue(self, _: int) -> None:
        number = len(self.states)
        prompt_id = f"d:0:{number}"
        self.ledger.issue_prompt(prompt_id, dataset="d", epoch=0, row=number, position=number)
        self.states[prompt_id] = ("pending", None)

    def pending(self) -> list[str]:
        return [key for key, (state, _) in self.states.items() if state == "pending"]

    def group(self, pick: int) -> None:
        pending = self.pending()
        if pending:
            group_id, prompt_id, n = f"g{len(self.groups)}", pending[pick % len(pending)], 1 + pick % 3
            self.ledger.start_group(group_id, prompt_id=prompt_id, n=n, start_step=self.step, attempt=len(self.groups))
            self.groups[group_id] = (prompt_id, n)

    def open_groups(self) -> list[str]:
        alive = set(self.pending())
        return [key for key, (prompt_id, _) in self.groups.items() if prompt_id in alive and key in self.usable()]

    def usable(self) -> set[str]:
        return set(self.ledger._groups)

    def session(self, pick: int) -> None:
        groups = self.open_groups()
        if groups:
            group_id = groups[pick % len(groups)]
            used = {slot for group, slot, _, _ in self.sessions.values() if group == group_id}
            free = [slot for slot in range(self.groups[group_id][1]) if slot not in used]
            if free:
                self._start(group_id, free[0], 0)

    def _start(self, group_id: str, slot: int, try_index: int) -> None:
        session_id = f"s{len(self.sessions)}"
        self.ledger.start_session(session_id, group_id=group_id, slot=slot, try_index=try_index)
        self.sessions[session_id] = (group_id, slot, try_index, "running")

    def end(self, pick: int) -> None:
        running = [key for key, session in self.sessions.items() if session[3] == "running"]
        if not running:
            return
        session_id = running[pick % len(running)]
        group_id, slot, try_index, _ = self.sessions[session_id]
        status = ("exported", "failed", "cancelled")[pick % 3]
        if status == "exported":
            self.ledger.end_session(exported(session_id, group_id))
        else:
            self.ledger.end_session(failed(session_id, group_id, f"why{pick % 2}", status=status))
        self.sessions[session_id] = (group_id, slot, try_index, status)

    def retry(self, pick: int) -> None:
        usable = self.usable()
        latest = {(group, slot): (index, status) for group, slot, index, status in self.sessions.values()}
        lost = [
            (group, slot, index)
            for (group, slot), (index, status) in latest.items()
            if status in ("failed", "cancelled") and group in usable
        ]
        if lost:
            group_id, slot, try_index = lost[pick % len(lost)]
            self._start(group_id, slot, try_index + 1)

    def finish(self, pick: int) -> None:
        pending = self.pending()[: 1 + pick % 3]
        has_export = {self.groups[group][0] for group, _, _, status in self.sessions.values() if status == "exported"}
        for state in ("trained", "dropped"):
            chosen = [prompt_id for prompt_id in pending if (prompt_id in has_export) == (state == "trained")]
            if chosen:
                reason = None if state == "trained" else "no_session"
                self.ledger.end_prompts(chosen, state, reason=reason, train_step=self.step)
                self.states.update({prompt_id: (state, self.step) for prompt_id in chosen})
        self.step += 1

    def stop(self, pick: int) -> None:
        self.ledger.close()
        kept = max(-1, self.step - 1 - pick % 3)
        self.ledger = RunLedger.open_existing(self.run_dir)
        recovered = self.ledger.recover(train_step=kept)
        for key, (state, step) in self.states.items():
            if step is not None and step > kept:
                state, step = "pending", None
            self.states[key] = (state, step)
        self.sessions = {
            key: (*session[:3], "cancelled" if session[3] == "running" else session[3])
            for key, session in self.sessions.items()
        }
        self.step = kept + 1
        assert [prompt.prompt_id for prompt in recovered.pending] == self.pending()
        assert recovered.next_position == len(self.states)

    def check(self) -> None:
        self.ledger.flush()
        with open_run(self.run_dir) as conn:
            check_ledgers(conn)
            found = counts(conn)
        sums = {key: {state: sum(n.values()) for state, n in found[key].items()} for key in ("prompts", "sessions")}
        assert sums["prompts"] == dict(Counter(state for state, _ in self.states.values()))
        assert sums["sessions"] == dict(Counter(session[3] for session in self.sessions.values()))


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_random_histories_add_up(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        history = History(run_dir)
        try:
            for action, pick in steps:
                history.play(action, pick)
            history.check()
        finally:
            history.ledger.close()

"""Write speed of the run ledger: `python bench/ledger.py [NUM_SESSIONS]` (5000 by default).

Each session has 5 turns of 512 given and 128 sampled tokens and belongs to a group of 8. Reports what the calls cost
the caller, what the writer thread needs in all, and what reading one session costs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from silva.store.documents import show_session
from silva.store.ledger import RunLedger
from silva.store.queries import check_ledgers, counts, open_run
from silva.types.generation import VersionSpan
from silva.types.rollout import (
    AttemptRow,
    NodeRow,
    RequestRow,
    ResponseSpan,
    SessionRow,
    TokenUsage,
    TrainingSample,
)

NUM_TURNS, NUM_GIVEN, NUM_SAMPLED, GROUP = 5, 512, 128, 8


def session(session_id: str, group_id: str) -> SessionRow:
    """A linear session whose log-probs differ between its ids."""
    nodes = [_node(0, "root", 0, 0)]
    for turn in range(NUM_TURNS):
        nodes += [_node(2 * turn + 1, "observation", NUM_GIVEN, 0), _node(2 * turn + 2, "response", 3, NUM_SAMPLED)]
    spans: list[VersionSpan] = []
    responses: list[ResponseSpan] = []
    at = 0
    for turn in range(NUM_TURNS):
        for length, version in ((NUM_GIVEN + 3, -1), (NUM_SAMPLED, turn)):
            spans.append(VersionSpan(start=at, length=length, version=version))
            if version >= 0:
                responses.append(ResponseSpan(node_id=2 * turn + 2, start=at, length=length))
            at += length
    sample = TrainingSample(
        session_id=session_id,
        group_id=group_id,
        name=None,
        node_id=nodes[-1].node_id,
        prompt_len=NUM_GIVEN + 3,
        token_ids=[i for node in nodes for i in node.token_ids],
        loss_mask=[i for node in nodes for i in node.loss_mask],
        logprobs=[i for node in nodes for i in node.logprobs],
        kept_mass=[i for node in nodes for i in node.kept_mass],
        version_spans=tuple(spans),
        responses=tuple(responses),
        reward=0.5,
    )
    return SessionRow(
        session_id=session_id,
        group_id=group_id,
        mode="train",
        status="exported",
        reason=None,
        error=None,
        reward=0.5,
        metadata={"task": session_id},
        nodes=nodes,
        requests=[_request(turn) for turn in range(NUM_TURNS)],
        attempts=[_attempt(turn) for turn in range(NUM_TURNS)],
        samples=[sample],
    )


def _node(node_id: int, kind: str, num_given: int, num_sampled: int) -> NodeRow:
    spans = [VersionSpan(start=0, length=num_given, version=-1)] if num_given else []
    if num_sampled:
        spans.append(VersionSpan(start=num_given, length=num_sampled, version=node_id // 2 - 1))
    return NodeRow(
        node_id=node_id,
        parent_id=node_id - 1 if node_id else None,
        state_key=f"{node_id:032x}",
        kind=kind,  # type: ignore[arg-type]
        messages=[{"role": "user", "content": "some words of a message " * 40}] if node_id else [],
        token_ids=[(node_id * 7919 + at * 31) % 150_000 for at in range(num_given + num_sampled)],
        loss_mask=[0] * num_given + [1] * num_sampled,
        logprobs=[0.0] * num_given + [-0.001 * (at + node_id) for at in range(num_sampled)],
        kept_mass=[1.0] * (num_given + num_sampled),
        version_spans=tuple(spans),
        finish_reason="stop" if kind == "response" else None,
    )


def _request(turn: int) -> RequestRow:
    return RequestRow(
        request_id=f"r{turn}",
        protocol="chat",
        stream=False,
        arrived_s=float(turn),
        match="append",
        node_id=2 * turn + 2,
        http_status=200,
        finish_reason="stop",
        usage=TokenUsage(prompt_tokens=NUM_GIVEN, completion_tokens=NUM_SAMPLED),
        latency_s=0.5,
    )


def _attempt(turn: int) -> AttemptRow:
    return AttemptRow(
        request_id=f"r{turn}",
        attempt=0,
        num_input=NUM_GIVEN,
        num_output=NUM_SAMPLED,
        finish_reason="stop",
        weight_version=turn,
        cached_tokens=0,
        started_s=float(turn),
        ended_s=turn + 0.5,
    )


def main() -> None:
    num_sessions = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    num_groups = -(-num_sessions // GROUP)
    with tempfile.TemporaryDirectory() as run_dir:
        ledger = RunLedger(run_dir)
        build_s = build_cpu_s = calls_s = 0.0
        started, started_cpu = time.perf_counter(), time.process_time()
        for number in range(num_groups):
            group_id = f"g{number}"
            t0, cpu0 = time.perf_counter(), time.process_time()
            records = [session(f"{group_id}-{slot}", group_id) for slot in range(GROUP)]
            t1, cpu1 = time.perf_counter(), time.process_time()
            ledger.issue_prompt(f"d:0:{number}", dataset="d", epoch=0, row=number, position=number)
            ledger.start_group(group_id, prompt_id=f"d:0:{number}", n=GROUP, start_step=number // 64)
            for slot, record in enumerate(records):
                ledger.start_session(record.session_id, group_id=group_id, slot=slot)
            ended = [ledger.end_session(record) for record in records]
            ledger.end_prompts([f"d:0:{number}"], "trained", train_step=number // 64)
            t2 = time.perf_counter()
            ended[-1].result()
            build_s, build_cpu_s = build_s + t1 - t0, build_cpu_s + cpu1 - cpu0
            calls_s += t2 - t1
        ledger.flush()
        total_s = time.perf_counter() - started - build_s
        cpu_s = time.process_time() - started_cpu - build_cpu_s
        ledger.close()
        size = (Path(run_dir) / "run.db").stat().st_size
        num = num_groups * GROUP
        tokens = NUM_TURNS * (NUM_GIVEN + 3 + NUM_SAMPLED)
        print(f"{num} sessions of {NUM_TURNS} turns and {tokens} tokens")
        print(f"written in {total_s:.2f} s: {num / total_s:.0f} sessions/s")
        print(f"CPU {cpu_s / num * 1e3:.3f} ms a session, of both threads")
        print(f"calls on the caller's thread: {calls_s / num * 1e3:.3f} ms a session (the writer shares its time)")
        print(
            f"file: {size / 1e6:.0f} MB, {size / num / 1e3:.1f} kB a session, {size / num / tokens:.1f} bytes a token"
        )
        started = time.perf_counter()
        for number in range(50):
            show_session(run_dir, f"g{number * num_groups // 50}-0")
        print(f"show_session: {(time.perf_counter() - started) / 50 * 1e3:.2f} ms")
        started = time.perf_counter()
        with open_run(run_dir) as conn:
            counts(conn)
            t1 = time.perf_counter()
            check_ledgers(conn, finished=True)
        print(f"counts: {(t1 - started) * 1e3:.1f} ms, check_ledgers: {(time.perf_counter() - t1) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()

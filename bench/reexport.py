"""Speed of `silva reexport`: `python bench/reexport.py [NUM_SESSIONS]` (5000 by default).

The sessions are those of `bench/ledger.py`: 5 turns of 512 given and 128 sampled tokens, in groups of 8, 64 groups a
step. Reports the time of one core, the peak memory of the process, and what one file holds.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ledger import GROUP, session

from silva.cli.main import main as silva
from silva.config.options import RunConfig
from silva.config.parse import write_config_file
from silva.forest.identity import chain_key, message_digest, root_key
from silva.forest.restore import message_from_chat
from silva.store.ledger import RunLedger
from silva.types.messages import Conversation
from silva.types.rollout import NodeRow, SessionRow


def chained(record: SessionRow) -> SessionRow:
    """The session with the keys that a forest gives its nodes, and an output."""
    nodes: list[NodeRow] = []
    key = root_key(Conversation(template_kwargs={}))
    for node in record.nodes:
        messages = [{**message, "role": "assistant"} for message in node.messages]
        messages = messages if node.kind == "response" else node.messages
        for message in messages:
            key = chain_key(key, message_digest(message_from_chat(message)))
        nodes.append(replace(node, messages=messages, state_key=key.hex()))
    return replace(record, nodes=nodes, output=json.dumps({"reward": 0.5, "metadata": record.metadata}).encode())


def main() -> None:
    num_groups = -(-(int(sys.argv[1]) if len(sys.argv) > 1 else 5000) // GROUP)
    with tempfile.TemporaryDirectory() as run_dir:
        with RunLedger(run_dir) as ledger:
            for number in range(num_groups):
                prompt_id, group_id = f"d:0:{number}", f"g{number}"
                ledger.issue_prompt(prompt_id, dataset="d", epoch=0, row=number, position=number)
                ledger.start_group(group_id, prompt_id=prompt_id, n=GROUP, start_step=number // 64)
                for slot in range(GROUP):
                    ledger.start_session(f"{group_id}-{slot}", group_id=group_id, slot=slot)
                    ledger.end_session(chained(session(f"{group_id}-{slot}", group_id)))
                ledger.end_prompts([prompt_id], "trained", train_step=number // 64)
                ledger.flush()
        write_config_file(RunConfig(), Path(run_dir) / "config.toml")
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started, cpu = time.perf_counter(), time.process_time()
        assert silva(["reexport", run_dir]) == 0
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        num, after_kb = num_groups * GROUP, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = sum(path.stat().st_size for path in Path(run_dir, "reexport").iterdir())
        print(f"{num} sessions in {wall_s:.1f} s ({cpu_s:.1f} s CPU): {cpu_s / num * 1e3:.2f} ms CPU a session")
        print(f"files: {size / 1e6:.0f} MB; peak memory {after_kb / 1e3:.0f} MB, {before_kb / 1e3:.0f} MB before")


if __name__ == "__main__":
    main()

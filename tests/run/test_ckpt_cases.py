"""Field cases of checkpoints: a process that really dies while it saves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from silva.train.checkpoint import latest_checkpoint, prune_checkpoints, read_state

SAVE_FOR_EVER = """
import json, sys
from pathlib import Path
from silva.train.checkpoint import checkpoint_dir, latest_checkpoint, prune_checkpoints, read_state, write_checkpoint

root = Path(sys.argv[1])
latest = latest_checkpoint(root)
step = read_state(latest).step if latest else 0
while True:
    step += 1

    def write_files(folder):
        for name in ("weights", "optimizer", "buffer"):
            (folder / name).write_bytes(json.dumps([step] * 20_000).encode())

    # every other step is saved twice, as a resumed run does that repeats it
    for _ in range(1 + step % 2):
        write_checkpoint(checkpoint_dir(root, step), write_files, step=step, extra={"rows": [step, {"nested": step}]})
    prune_checkpoints(root, keep=2)
    print("saved", flush=True)
"""


@pytest.mark.slow
def test_ckpt_02_a_kill_during_the_save_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(7)
    newest_step = 0
    for _ in range(20):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"saved\n"
        time.sleep(rng.uniform(0, 0.06))
        process.kill()
        process.wait()
        process.stdout.close()
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        state = read_state(latest)
        step = state.step
        assert step > newest_step, "a checkpoint that was there is gone"
        newest_step = step
        assert state.extra == {"rows": [step, {"nested": step}]}
        for name in ("weights", "optimizer", "buffer"):
            assert json.loads((latest / name).read_bytes()) == [step] * 20_000
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step_{newest_step:06d}"]

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from silva.train.checkpoint import (
    STATE_FILE,
    checkpoint_dir,
    copy_side_files,
    is_complete,
    latest_checkpoint,
    prune_checkpoints,
    read_state,
    write_checkpoint,
    write_model_folder,
)
from silva.types.errors import SilvaError


def save(root: Path, step: int, text: str = "weights") -> Path:
    target = checkpoint_dir(root, step)

    def write_files(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "more.json").write_text("{}")

    write_checkpoint(target, write_files, step=step, extra={"position": step * 8})
    return target


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    target = save(tmp_path / "new" / "folders", 3)
    state = read_state(target)
    assert (state.step, state.extra) == (3, {"position": 24})
    assert names(target.parent) == ["step_000003"]


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None and latest_checkpoint(tmp_path) is None
    for step in (2, 10, 9, 1_000_000):
        save(tmp_path, step)
    (tmp_path / "step_2000000").mkdir()
    (tmp_path / "step_notes.txt").write_text("")
    (tmp_path / ".tmp-step_3000000-1").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1000000"
    (tmp_path / "step_1000000" / STATE_FILE).write_text("{")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000010"


@pytest.mark.parametrize(
    "damage", ["shorter", "gone", "state gone", "state broken", "state of another format", "no extra"]
)
def test_a_checkpoint_that_is_not_whole_is_refused_with_the_reason(tmp_path: Path, damage: str) -> None:
    target = save(tmp_path, 1)
    state, file = target / STATE_FILE, target / "sub" / "more.json"
    if damage == "shorter":
        file.write_text("{")
    elif damage == "gone":
        file.unlink()
    elif damage == "state gone":
        state.unlink()
    elif damage == "state broken":
        state.write_text(state.read_text()[:20])
    elif damage == "no extra":
        state.write_text(json.dumps(json.loads(state.read_text()) | {"extra": None}))
    else:
        state.write_text(json.dumps({"format": 2}))
    assert not is_complete(target)
    with pytest.raises(SilvaError, match="step_000001"):
        read_state(target)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, "old")
    target = save(tmp_path, 1, "new")
    assert (target / "model.safetensors").read_text() == "new" and names(tmp_path) == ["step_000001"]


def test_a_save_that_fails_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, "old")

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "step_000001", fail, step=1, extra={})
    assert names(tmp_path) == ["step_000001"]
    assert (tmp_path / "step_000001" / "model.safetensors").read_text() == "old"


def test_pruning_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "step_000005" / "model.safetensors").unlink()
    (tmp_path / ".tmp-step_000006-1").mkdir()
    (tmp_path / ".old-step_000004").mkdir()
    (tmp_path / "notes").mkdir()
    removed = prune_checkpoints(tmp_path, keep=2)
    assert names(tmp_path) == ["notes", "step_000003", "step_000004", "step_000005"]
    assert {path.name for path in removed} == {
        "step_000001",
        "step_000002",
        ".tmp-step_000006-1",
        ".old-step_000004",
    }
    with pytest.raises(ValueError, match="keep is 0"):
        prune_checkpoints(tmp_path, keep=0)


def test_pruning_that_is_interrupted_leaves_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 4):
        save(tmp_path, step)

    def die_half_way(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("silva.train.checkpoint.shutil.rmtree", die_half_way)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoints(tmp_path, keep=2)
    assert all(is_complete(folder) for folder in tmp_path.glob("step_*"))
    prune_checkpoints(tmp_path, keep=2)
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_ckpt_02_a_checkpoint_that_was_set_aside_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a save leaves that dies between its two renames; for step 2 a damaged folder came into the place since."""
    for step in range(1, 4):
        save(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"step_{step:06d}").rename(tmp_path / f".old-step_{step:06d}")
    (tmp_path / "step_000002").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / ".old-step_000003"
    assert prune_checkpoints(tmp_path, keep=2) == [tmp_path / "step_000001"]
    assert names(tmp_path) == [".old-step_000002", "step_000002", "step_000003"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000003"

    def die(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, "new")
    assert is_complete(tmp_path / ".old-step_000002")
    save(tmp_path, 2, "new")
    assert prune_checkpoints(tmp_path, keep=2) == []
    assert names(tmp_path) == ["step_000002", "step_000003"]


CRASH = """
import os, sys
from pathlib import Path
from silva.train import checkpoint

call, at = sys.argv[2], int(sys.argv[3])
seen = 0
for owner, name in ((os, "fsync"), (Path, "rename"), (checkpoint.shutil, "rmtree"), (Path, "write_text")):
    def wrapped(*args, _real=getattr(owner, name), _name=name, **kwargs):
        global seen
        seen += _name == call
        if _name == call and seen == at:
            os.kill(os.getpid(), 9)
        return _real(*args, **kwargs)
    setattr(owner, name, wrapped)

def write_files(folder):
    (folder / "model.safetensors").write_text("new")

checkpoint.write_checkpoint(Path(sys.argv[1]), write_files, step=2, extra={})
"""


@pytest.mark.parametrize(
    ("call", "at"),
    [
        *[("write_text", 1), ("write_text", 2), ("fsync", 1), ("fsync", 3), ("fsync", 4)],
        *[("rename", 1), ("rename", 2), ("rmtree", 3)],
    ],
)
def test_a_crash_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path, call: str, at: int) -> None:
    save(tmp_path, 1, "first")
    target = save(tmp_path, 2, "old")
    done = subprocess.run([sys.executable, "-c", CRASH, str(target), call, str(at)], timeout=60)
    assert done.returncode == -9, "the crash was meant to happen at a call that is made"
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and is_complete(newest) and read_state(newest).step == 2
    assert (newest / "model.safetensors").read_text() == (
        "new" if (call, at) in {("fsync", 4), ("rmtree", 3)} else "old"
    )
    # the next save of the same step, and the next pruning, clean up whatever stood around
    save(tmp_path, 2, "newer")
    prune_checkpoints(tmp_path)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert (target / "model.safetensors").read_text() == "newer"


def test_a_model_folder_keeps_what_is_not_the_model(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"

    def write_files(folder: Path) -> None:
        (folder / "model.safetensors").write_text("new")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("new")

    write_model_folder(target, write_files)
    (target / "notes.txt").write_text("mine")
    (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    (target / "model.safetensors.index.json").write_text("{}")
    (target / "additional_chat_templates" / "rag.jinja").write_text("old")
    write_model_folder(target, write_files)
    assert names(target) == ["additional_chat_templates", "model.safetensors", "notes.txt"]
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "new"
    assert names(target.parent) == ["model"]
    with pytest.raises(SilvaError, match="is a file"):
        write_model_folder(target / "notes.txt", write_files)
    assert (target / "notes.txt").read_text() == "mine"


def test_only_side_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "spiece.model", "config.json"):
        (source / name).write_text("theirs")
    for name in ("model.safetensors", "model.safetensors.index.json", "optimizer.pt", STATE_FILE):
        (source / name).write_text("theirs")
    (source / "additional_chat_templates" / "rag.jinja").write_text("theirs")
    (target / "config.json").write_text("ours")
    copy_side_files(source, target)
    assert (target / "config.json").read_text() == "ours"
    wanted = ["additional_chat_templates", "chat_template.jinja", "config.json", "merges.txt", "spiece.model"]
    assert names(target) == [*wanted, "tokenizer.json"]
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "theirs"


def test_reading_checkpoints_needs_no_torch() -> None:
    code = "import sys, silva.train.checkpoint, silva.credit.assign; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

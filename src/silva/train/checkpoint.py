"""Checkpoints on disk: whole or not there.

    ROOT/step_000012/            one checkpoint: the files of a Hugging Face model, the optimizer, `trainer_state.json`
    ROOT/.tmp-step_000012-4711/  one that is being written
    ROOT/.old-step_000012/       one that is being replaced

A checkpoint is written beside its place, forced to disk and renamed. `trainer_state.json` is its last file and lists
all others with their sizes, so a folder that was copied or written only in part is not taken for a whole one. No torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from silva.types import SilvaError

STATE_FILE = "trainer_state.json"
FORMAT = 1
_NAME = re.compile(r"(\.old-)?step_(\d+)")
_COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}
_COPIED_FOLDERS = ("additional_chat_templates",)


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `trainer_state.json`.

    Example: `CheckpointState(format=1, step=11, extra={"next_rollout": 12, "weight_version": 12},
    files={"model.safetensors": 4096})`
    """

    format: int
    """Layout of the checkpoint; other numbers than `FORMAT` are refused."""
    step: int
    """The last rollout step that the checkpoint contains, from 0."""
    extra: dict[str, object]
    """What the caller of the save wants back, JSON values."""
    files: dict[str, int]
    """Bytes of each other file, by its path inside the folder."""


def checkpoint_dir(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step` under `root`."""
    return root / f"step_{step:06d}"


def write_checkpoint(target: Path, write_files: Callable[[Path], None], *, step: int, extra: dict[str, object]) -> None:
    """Make `target` a whole checkpoint of what `write_files(folder)` puts into an empty folder.

    `extra` (JSON values) comes back from `read_state`. An older checkpoint at `target` is replaced. When this is
    interrupted at any point, `latest_checkpoint` still finds the newest whole checkpoint.
    Raises what `write_files` raises, and OSError; what was written so far is then removed.
    """
    with _temporary_beside(target) as temporary:
        write_files(temporary)
        sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()}
        state = CheckpointState(format=FORMAT, step=step, extra=extra, files=sizes)
        (temporary / STATE_FILE).write_text(json.dumps(msgspec.to_builtins(state), indent=1), encoding="utf-8")
        _force_to_disk(temporary)
        _put_in_place(temporary, target)


def write_model_folder(target: Path, write_files: Callable[[Path], None]) -> None:
    """Make `target` hold the Hugging Face model that `write_files(folder)` puts into an empty folder.

    A new or empty `target` appears in one step. In a folder that is not empty, the files of the same names
    and older safetensors weights are replaced one by one and all else stays. Raises SilvaError if `target` is a file.
    """
    if target.exists() and not target.is_dir():
        raise SilvaError(f"{target} is a file; name a folder for the model")
    with _temporary_beside(target) as temporary:
        write_files(temporary)
        _force_to_disk(temporary)
        if not target.is_dir() or not any(target.iterdir()):
            temporary.rename(target)
        else:
            _merge_model(temporary, target)
        _sync(target.parent)


def read_state(folder: Path) -> CheckpointState:
    """The content of a checkpoint's `trainer_state.json`, after proof that all its files are there in full.

    Raises SilvaError, naming the folder and what is missing.
    """
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=CheckpointState)
    except FileNotFoundError:
        raise SilvaError(f"{folder} is not a whole checkpoint: {STATE_FILE} is missing") from None
    except msgspec.ValidationError:
        state = None
    except (OSError, ValueError) as error:
        raise SilvaError(f"{folder} is not a whole checkpoint: {STATE_FILE} cannot be read: {error}") from error
    if state is None or state.format != FORMAT:
        raise SilvaError(f"{folder}: {STATE_FILE} is not of format {FORMAT}; this version cannot load it")
    for name, size in state.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes"
            raise SilvaError(f"{folder} is not a whole checkpoint: {name} {has}, {size} bytes were written")
    return state


def is_complete(folder: Path) -> bool:
    """True if `read_state` succeeds."""
    try:
        read_state(folder)
    except SilvaError:
        return False
    return True


def latest_checkpoint(root: Path) -> Path | None:
    """The whole checkpoint with the highest step under `root`; None if there is none. Changes nothing on disk."""
    return next((folder for _, folder in _candidates(root) if is_complete(folder)), None)


def prune_checkpoints(root: Path, keep: int = 2) -> list[Path]:
    """Remove all but the `keep` newest whole checkpoints under `root`; returns what was removed.

    What interrupted saves left behind goes too, so call it only when nothing is being saved under `root`. A kept one
    that such a save had set aside gets its own name back. A damaged `step_` folder
    does not count and is not removed: we did not make it.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
    kept: set[int] = set()
    removed: list[Path] = []
    for step, folder in _candidates(root):
        if not is_complete(folder):
            continue
        if step not in kept and len(kept) < keep:
            kept.add(step)
            _give_name_back(folder)
        else:
            removed.append(folder)
    damaged_old = [path for path in root.glob(".old-step_*") if path not in removed and not is_complete(path)]
    removed += sorted(damaged_old) + sorted(root.glob(".tmp-step_*"))
    for folder in removed:
        if _NAME.match(folder.name) is None or folder.name.startswith(".old-"):
            shutil.rmtree(folder)
        else:
            _remove_whole(folder)
    return removed


def copy_side_files(source: Path, folder: Path) -> None:
    """Copy what a model directory contains beside weights and config (tokenizer, templates, processor) into `folder`.

    Files already in `folder` stay. The copies are equal byte for byte.
    """
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if path.name in _COPIED_FOLDERS:
                shutil.copytree(path, folder / path.name)
            continue
        wanted = path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json") and path.name != STATE_FILE
        if wanted and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """Folders with the name of a checkpoint, newest first; before a replaced one comes its replacement."""
    if not root.is_dir():
        return []
    found: list[tuple[int, bool, Path]] = []
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match[2]), match[1] is None, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


@contextmanager
def _temporary_beside(target: Path) -> Iterator[Path]:
    """An empty folder on the same file system as `target`, gone at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _merge_model(source: Path, target: Path) -> None:
    new = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    # weights of an earlier model would be loaded in place of, or together with, the new ones
    for path in [*target.glob("model*.safetensors"), *target.glob("model*.safetensors.index.json")]:
        if path.relative_to(target) not in new:
            path.unlink()
    for name in new:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(target / name)
    _sync(target)


def _put_in_place(temporary: Path, target: Path) -> None:
    old = target.parent / f".old-{target.name}"
    if target.exists() and is_complete(old) and not is_complete(target):
        shutil.rmtree(target)  # damaged: until the new one is in place, the one set aside is all there is
    elif target.exists():
        # a folder cannot be renamed over a full one: between these two renames the old one counts
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    temporary.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _give_name_back(folder: Path) -> None:
    """A save that died between its two renames left the one it was replacing as `.old-`, with nothing in its place."""
    place = folder.parent / folder.name.removeprefix(".old-")
    if not place.exists():
        folder.rename(place)
        _sync(folder.parent)


def _remove_whole(folder: Path) -> None:
    """Remove a checkpoint so that, when this is interrupted, no part of it stays under its name."""
    old = folder.parent / f".old-{folder.name}"
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def _force_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

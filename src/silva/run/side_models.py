"""The models beside the policy: the reference of the KL and the teacher of distillation."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from silva.config import RunConfig, is_address, needs_reference
from silva.inference.sglang_scorer import SglangScorer
from silva.model import check_same_ids, model_fingerprint, num_positions, plain_words
from silva.run.parts import context_limit, load_codec
from silva.types import ConfigError, SystemClock

if TYPE_CHECKING:  # they import torch
    from silva.train.learner import LocalScorer, Scorer, TorchThread
    from silva.train.packed_model import ComputeConfig


def reference_folder(config: RunConfig) -> Path | None:
    """The folder of the reference model, if the options need one: the start model by default, in a resumed run too."""
    return Path(config.ref_load or str(config.hf_checkpoint)) if needs_reference(config) else None


def teacher_folder(config: RunConfig) -> Path | None:
    """The folder of the teacher; None where there is no teacher, or it is a server."""
    teacher = config.opd_teacher
    return None if teacher is None or is_address(teacher) else Path(teacher)


async def open_side_models(
    config: RunConfig, thread: TorchThread, compute: ComputeConfig, stack: AsyncExitStack
) -> tuple[Scorer | None, Scorer | None]:
    """The reference and the teacher, None where the options need none; what cannot work fails before a model is loaded.

    One model serves as both where both are the same folder. Raises ConfigError.
    """
    from silva.train.learner import LocalScorer
    from silva.train.packed_model import PackedModel

    check_folders(config)
    server = await _open_server(config, stack)
    folder, from_folder = reference_folder(config), teacher_folder(config)
    reference: LocalScorer | None = None
    teacher: Scorer | None = server
    if folder is not None:
        model = await thread.run(PackedModel, folder, compute, role="reference model", frozen=True)
        reference = LocalScorer(model, thread)
    if from_folder is not None:
        if reference is not None and folder is not None and _same(folder, from_folder):
            return reference, reference
        model = await thread.run(PackedModel, from_folder, compute, role="teacher", frozen=True)
        teacher = LocalScorer(model, thread, max_len=num_positions(from_folder), name=f"the teacher {from_folder}")
    return reference, teacher


async def look_at_side_models(config: RunConfig) -> list[str]:
    """The models that would be used, one line each, after all checks but loading weights. Raises ConfigError."""
    lines: list[str] = []
    check_folders(config)
    for role, folder in (("reference", reference_folder(config)), ("teacher", teacher_folder(config))):
        if folder is not None:
            start = " (the start model)" if _same(folder, Path(str(config.hf_checkpoint))) else ""
            lines.append(f"{role} {folder}{start}, loaded beside the policy")
    async with AsyncExitStack() as stack:
        server = await _open_server(config, stack)
        if server is not None:
            lines.append(f"teacher {config.opd_teacher}: {server.model}, context {server.max_context_len} tokens")
    return lines


def check_folders(config: RunConfig) -> None:
    """Raise ConfigError where a folder's model cannot score what the start model samples."""
    start = Path(str(config.hf_checkpoint))
    reference = reference_folder(config)
    for flag, folder in (("--ref-load", reference), ("--opd-teacher", teacher_folder(config))):
        if folder is not None and not _same(folder, start):
            check_same_ids(folder, start, flag=flag)
    if reference is None or _same(reference, start):
        return
    room, needed = num_positions(reference), context_limit(config, start)
    if room is not None and room < needed:
        raise ConfigError(
            f"--ref-load {reference}: its model has {room} positions, and a context may have {needed} tokens. Set "
            f"--rollout-max-context-len {room} or less, or take another reference"
        )


def side_fingerprints(config: RunConfig) -> dict[str, str]:
    """The fingerprint of each model beside the policy, by folder."""
    folders = {folder.resolve() for folder in (reference_folder(config), teacher_folder(config)) if folder is not None}
    return {str(folder): model_fingerprint(folder) for folder in sorted(folders)}


async def _open_server(config: RunConfig, stack: AsyncExitStack) -> SglangScorer | None:
    if config.opd_teacher is None or not is_address(config.opd_teacher):
        return None
    codec = load_codec(config)
    scorer = SglangScorer(
        config.opd_teacher,
        clock=SystemClock(),
        timeout_s=config.engine_timeout_s,
        probe=plain_words(codec.decode, codec.vocab_size),
        fallback_context_len=context_limit(config, Path(str(config.hf_checkpoint))),
    )
    await scorer.start()
    stack.push_async_callback(scorer.close)
    return scorer


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()

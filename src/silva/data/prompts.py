"""Which prompt comes next: one order over all epochs, with the prompts first that were unfinished before a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from silva.data.rows import Dataset
from silva.types import DatasetError, SessionInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One use of one dataset row.

    Example: row 7 in epoch 2 of the training data has `prompt_id` "train:2:7".
    """

    prompt_id: str
    """Unique in the run."""
    dataset: str
    """"train", or the name of the eval that uses the row."""
    epoch: int
    """Pass over the data, from 0."""
    row: int
    """Index among the usable rows of the file, from 0."""
    position: int
    """How many prompts the run issued before this one."""
    input: SessionInput
    """What the agents of its sessions get."""
    label: object = None
    """What only the judges of a session see, any JSON value; None without --label-key."""


class PromptSource:
    """Hands out each (epoch, row) exactly once.

    Consumes a Dataset; produces Prompts until `num_epoch` passes are over (None: no end). After a resume, the prompts
    at the `pending` positions come first, then new ones from `next_position` on.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        name: str = "train",
        num_epoch: int | None,
        shuffle: bool,
        seed: int,
        next_position: int = 0,
        pending: Iterable[int] = (),
    ):
        self._dataset = dataset
        self._name = name
        self._num_epoch = num_epoch
        self._shuffle = shuffle
        self._seed = seed
        self._next = next_position
        self._pending = deque(sorted(pending))
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self) -> Prompt | None:
        """The next prompt, or None when the epochs are over."""
        if self._pending:
            return self._at(self._pending.popleft())
        epoch = self._next // len(self._dataset.rows)
        if self._num_epoch is not None and epoch >= self._num_epoch:
            return None
        self._next += 1
        return self._at(self._next - 1)

    def check_place(self, *, position: int, epoch: int, row: int) -> None:
        """Raise DatasetError unless a prompt issued before a resume is still at its place."""
        prompt = self._at(position)
        if (prompt.epoch, prompt.row) != (epoch, row):
            raise DatasetError(
                f"dataset {self._dataset.path}: prompt {position} of the run was row {row} of epoch {epoch}; now it is "
                f"row {prompt.row} of epoch {prompt.epoch}. The file, --rollout-shuffle or --rollout-seed changed "
                "since the run started. Resume with the same"
            )

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._dataset.rows))
        if self._order[0] != epoch:
            self._order = (epoch, self._dataset.order(epoch, shuffle=self._shuffle, seed=self._seed))
        row = self._order[1][place]
        return Prompt(
            prompt_id=f"{self._name}:{epoch}:{row}",
            dataset=self._name,
            epoch=epoch,
            row=row,
            position=position,
            input=self._dataset.rows[row].input,
            label=self._dataset.rows[row].label,
        )

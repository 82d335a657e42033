"""Which prompt comes next: one order over all epochs, with the prompts first that were unfinished before a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

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


@dataclass(eq=False)
class PromptSource:
    """Hands out each (epoch, row) exactly once.

    Consumes a Dataset; produces Prompts until `num_epoch` passes are over (None: no end). After a resume, the prompts
    at the `pending` positions come first, then new ones from `next_position` on.
    """

    dataset: Dataset
    _: KW_ONLY
    name: str = "train"
    """Begins the ids of the prompts."""
    num_epoch: int | None
    """Passes over the rows; None for no end."""
    shuffle: bool
    """Each epoch has an order of its own."""
    seed: int
    """Seed of these orders."""
    next_position: int = 0
    """Place of the next new prompt in the order of issue."""
    pending: Iterable[int] = ()
    """Places of prompts that a resumed run issues again, first."""

    def __post_init__(self) -> None:
        self._pending = deque(sorted(self.pending))
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self) -> Prompt | None:
        """The next prompt, or None when the epochs are over."""
        if self._pending:
            return self._at(self._pending.popleft())
        epoch = self.next_position // len(self.dataset.rows)
        if self.num_epoch is not None and epoch >= self.num_epoch:
            return None
        self.next_position += 1
        return self._at(self.next_position - 1)

    def check_place(self, *, position: int, epoch: int, row: int) -> None:
        """Raise DatasetError unless a prompt issued before a resume is still at its place."""
        prompt = self._at(position)
        if (prompt.epoch, prompt.row) != (epoch, row):
            raise DatasetError(
                f"dataset {self.dataset.path}: prompt {position} of the run was row {row} of epoch {epoch}; now it is "
                f"row {prompt.row} of epoch {prompt.epoch}. The file, --rollout-shuffle or --rollout-seed changed "
                "since the run started. Resume with the same"
            )

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.dataset.rows))
        if self._order[0] != epoch:
            self._order = (epoch, self.dataset.order(epoch, shuffle=self.shuffle, seed=self.seed))
        row = self._order[1][place]
        return Prompt(
            prompt_id=f"{self.name}:{epoch}:{row}",
            dataset=self.name,
            epoch=epoch,
            row=row,
            position=position,
            input=self.dataset.rows[row].input,
            label=self.dataset.rows[row].label,
        )

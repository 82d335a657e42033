"""Which prompt comes next: a persistent order over epochs, with unfinished prompts of an earlier life first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from silva.data.rows import Dataset
from silva.types.errors import DatasetError
from silva.types.rollout import SessionInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One use of one dataset row. `position` counts the prompts of a run in their order of issue.

    `label` is for those who judge a session; its agent does not get it.
    """

    prompt_id: str
    dataset: str
    epoch: int
    row: int
    position: int
    input: SessionInput
    label: object = None


class PromptSource:
    """Hands out each (epoch, row) exactly once.

    Consumes a Dataset; produces Prompts until `num_epoch` passes are over (None: for ever). After a resume the
    prompts in `pending` positions are handed out again before new ones from `next_position` on.
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
        """Raise DatasetError unless a prompt of an earlier life of the run is still found at its place."""
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

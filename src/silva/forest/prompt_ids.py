"""The ids of a prompt without a copy of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from silva.forest.node import Node


class PromptIds(Sequence[int]):
    """All ids from the root to a node (None: no node), then those of `behind`.

    They are joined anew each time they are read, so a request that waits for its engine keeps no copy. To
    read more than one, make a list of them. What lies above a node never changes.
    """

    __slots__ = ("_behind", "_node", "_num")

    def __init__(self, node: Node | None, *behind: Sequence[int]):
        self._node = node
        self._behind = behind
        self._num = (node.num_tokens if node is not None else 0) + sum(map(len, behind))

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        return iter(self._joined())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self._joined()[index]
        return found if isinstance(found, int) else found.tolist()

    def _joined(self) -> array[int]:
        joined = array("i") if self._node is None else self._node.path_ids()
        for ids in self._behind:
            joined.extend(ids)
        return joined

"""Finds stop strings in the text of sampled ids without decoding the whole response again for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

DecodeText = Callable[[list[int]], str]

_SLACK = 8  # Characters to the left of a possible match: the edge of a window may decode differently.


def find_stop(ids: Sequence[int], stops: Sequence[str], decode: DecodeText) -> str | None:
    """The stop string that the newest of `ids` completes, or None.

    Call it after every id: only the end of the text is decoded, as far back as the longest stop string reaches. Of
    several matches the one that starts first wins, then the longest.
    """
    need = max(len(stop) for stop in stops) + _SLACK
    window = need
    while True:
        text = decode(list(ids[-window:]))
        if len(text) >= need or window >= len(ids):
            break
        window *= 2
    matches = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return min(matches)[2] if matches else None

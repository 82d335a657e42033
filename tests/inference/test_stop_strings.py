"""The windowed search finds exactly the stop that a full decode of each prefix would find."""

from __future__ import annotations

from engine_support import decode_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.inference.stop_strings import find_stop

alphabet = st.sampled_from("ab é€🙂\n")


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet, max_size=60), st.lists(st.text(alphabet, min_size=1, max_size=6), min_size=1, max_size=3))
def test_first_match_is_found_at_the_id_that_completes_it(text: str, stops: list[str]) -> None:
    ids: list[int] = []
    for byte in text.encode():
        ids.append(byte)
        found = find_stop(ids, stops, decode_bytes)
        present = [stop for stop in stops if stop in decode_bytes(ids)]
        assert (found in present) if present else (found is None), (ids, stops)
        if found:
            break


def test_only_the_end_of_a_long_text_is_decoded() -> None:
    widths: list[int] = []

    def decode(ids: list[int]) -> str:
        widths.append(len(ids))
        return decode_bytes(ids)

    ids = list(b"x" * 5000 + b"STOP")
    assert find_stop(ids[:-1], ["STOP"], decode) is None
    assert find_stop(ids, ["STOP"], decode) == "STOP"
    assert max(widths) < 50


def test_ids_without_text_widen_the_window() -> None:
    ids = list(b"STO") + [258] * 200 + list(b"P")
    assert find_stop(ids, ["STOP"], decode_bytes) == "STOP"


def test_the_earliest_and_then_the_longest_match_wins() -> None:
    assert find_stop(list(b"one two"), ["two", "e two", "wo"], decode_bytes) == "e two"
    assert find_stop(list(b"ab"), ["a", "ab"], decode_bytes) == "ab"

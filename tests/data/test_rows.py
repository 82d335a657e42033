"""Dataset rows and the order of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.config.options import RunConfig
from silva.data.options import DataOptions
from silva.data.prompts import PromptSource
from silva.data.rows import Dataset, Row, load_dataset
from silva.run.parts import load_prompts
from silva.types.errors import DatasetError
from silva.types.rollout import SessionInput


def load(path: Path, **more: bool) -> Dataset:
    return load_dataset(path, DataOptions(**more))


def test_text_messages_and_metadata_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"input": "hi", "other": 1},
        {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}], "metadata": {"a": 1}},
        {"metadata": {"id": "x"}},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    inputs = [row.input for row in load(path).rows]
    assert inputs[0] == SessionInput(messages=[{"role": "user", "content": "hi"}])
    assert inputs[1].messages == rows[1]["input"] and inputs[1].metadata == {"a": 1}
    assert inputs[2] == SessionInput(metadata={"id": "x"})
    assert inputs[2].to_json() == {"metadata": {"id": "x"}}


BROKEN = [
    b'{"input": ',
    b"[1]",
    b'{"other": 1}',
    b'{"input": "  "}',
    b'{"input": []}',
    b'{"input": [{"role": "wizard", "content": "x"}]}',
    b'{"input": [{"role": "user"}]}',
    b'{"input": 5}',
    b'{"metadata": [1]}',
    b'{"input": "x", "metadata": {"v": NaN}}',
    b'{"input": "\xff"}',
    b'{"input": "x", "label": 1e999}',
    b'{"input": "x", "metadata": {"v": ' + b"[" * 64 + b"]" * 64 + b"}}",
    b"[" * 100_000,
]


def test_a_label_is_any_value_and_no_part_of_what_the_agent_gets(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "q", "answer": [1, {"x": null}]}\n{"input": "q", "answer": false}\n{"input": "q"}\n')
    dataset = load_dataset(path, DataOptions(label_key="answer"))
    assert [row.label for row in dataset.rows] == [[1, {"x": None}], False, None]
    assert {str(row.input.to_json()) for row in dataset.rows} == {"{'messages': [{'role': 'user', 'content': 'q'}]}"}
    assert [row.label for row in load(path).rows] == [None] * 3
    asked = {key: load_dataset(path, DataOptions(label_key=key)) for key in ("answer", "x")}
    assert [found.keys_without_label for found in asked.values()] == [(), ("input", "answer")]


def test_a_label_key_that_no_row_has_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a", "answer": 0}\n{"input": "b"}\n')
    for key in ("answer", "anwser"):
        load_prompts(RunConfig(label_key=key), path)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "no row has the key 'anwser' (--label-key), so every label is None; "
        "keys at the top of its rows: 'input', 'answer'"
    ]


def test_broken_rows_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"input": "good"}\n' + b"\n".join(BROKEN) + b'\n{"input": "last"}')
    with pytest.raises(DatasetError) as caught:
        load(path)
    text = str(caught.value)
    assert f"{len(BROKEN)} of {len(BROKEN) + 2} rows" in text and "line 2: not valid JSON" in text
    assert text.count("\n  line ") == 10
    dataset = load(path, skip_bad_rows=True)
    assert (len(dataset.rows), dataset.num_skipped) == (2, len(BROKEN))
    assert [row.line for row in dataset.rows] == [1, len(BROKEN) + 2]


def test_a_file_without_rows_or_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(DatasetError, match="no usable row"):
        load(tmp_path / "empty")
    with pytest.raises(DatasetError, match="cannot be read"):
        load(tmp_path / "missing")
    with pytest.raises(DatasetError, match="cannot be read"):
        load(tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(data)
    try:
        load(path)
    except DatasetError:
        pass


def dataset(num: int) -> Dataset:
    rows = tuple(Row(line=i, input=SessionInput(metadata={"i": i})) for i in range(num))
    return Dataset(path=Path("x"), rows=rows)


@given(num=st.integers(1, 9), epochs=st.integers(1, 3), shuffle=st.booleans(), cut=st.integers(0, 30), data=st.data())
def test_every_row_once_an_epoch_also_over_a_resume(
    num: int, epochs: int, shuffle: bool, cut: int, data: st.DataObject
) -> None:
    def source(**more: object) -> PromptSource:
        return PromptSource(dataset(num), num_epoch=epochs, shuffle=shuffle, seed=7, **more)  # type: ignore[arg-type]

    whole = list(iter(source().take, None))
    assert sorted((p.epoch, p.row) for p in whole) == [(e, r) for e in range(epochs) for r in range(num)]
    assert [p.position for p in whole] == list(range(num * epochs))
    first = whole[:cut]
    pending = data.draw(st.sets(st.sampled_from([p.position for p in first]))) if first else set()
    told = data.draw(st.permutations(sorted(pending)))
    rest = list(iter(source(next_position=len(first), pending=told).take, None))
    done = [p for p in first if p.position not in pending]
    assert sorted(p.prompt_id for p in done + rest) == sorted(p.prompt_id for p in whole)
    assert [p.position for p in rest[: len(pending)]] == sorted(pending)

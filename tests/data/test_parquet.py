"""Rows of Parquet files: the same as those of JSON Lines, or a sentence."""

from __future__ import annotations

import datetime
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from silva.data.options import DataOptions
from silva.data.parquet import json_value, parquet_rows
from silva.data.rows import load_dataset
from silva.types.errors import DatasetError


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def load(path: Path, **more: bool):
    return load_dataset(path, DataOptions(**more))


def test_rows_are_those_of_the_same_json_lines(tmp_path: Path) -> None:
    rows = [
        {"input": "hi", "metadata": {"n": 1, "tags": ["a", "b"]}},
        {"input": "ü", "metadata": {"n": 2, "tags": []}},
        {"input": "last", "metadata": {"n": 3}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write(tmp_path / "rows.parquet", **{key: [row[key] for row in rows] for key in ("input", "metadata")})
    assert load(path).rows == load(tmp_path / "rows.jsonl").rows
    talk = [[{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": None, "name": "x"}]]
    only = load(write(tmp_path / "talk.parquet", input=talk, blob=[b"\xff"])).rows[0]
    assert only.input.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "name": "x"}]


def test_values_become_json_values(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    metadata = pa.array(
        [
            {
                "whole": Decimal("3.00"),
                "part": Decimal("0.25"),
                "text": b"bytes",
                "day": day,
                "left": datetime.timedelta(seconds=90),
                "null": None,
                "map": [("k", 1)],
                "single": np.float32(0.5),
            }
        ],
        type=pa.struct(
            {
                "whole": pa.decimal128(5, 2),
                "part": pa.decimal128(5, 2),
                "text": pa.binary(),
                "day": pa.timestamp("us", tz="UTC"),
                "left": pa.duration("s"),
                "null": pa.string(),
                "map": pa.map_(pa.string(), pa.int32()),
                "single": pa.float32(),
            }
        ),
    )
    found = load(write(tmp_path / "rows.parquet", metadata=metadata)).rows[0].input.metadata
    assert found == {
        "whole": 3,
        "part": 0.25,
        "text": "bytes",
        "day": "2024-05-06T07:08:09+00:00",
        "left": 90.0,
        "map": {"k": 1},
        "single": 0.5,
    }
    assert json.loads(json.dumps(found)) == found
    assert json_value({"a": np.array([1, 2]), "b": np.int64(3)}, "x") == {"a": [1, 2], "b": 3}


def test_broken_rows_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    inputs = [b"good", b"\xff", b" ", b"last"]
    scores = [{"s": 1.0}, {"s": 1.0}, {"s": 1.0}, {"s": float("nan")}]
    path = write(tmp_path / "rows.parquet", input=inputs, metadata=scores)
    with pytest.raises(DatasetError) as caught:
        load(path)
    text = str(caught.value)
    assert "3 of 4 rows" in text and "row 2: 'input' is 1 bytes that are not UTF-8 text" in text
    assert "row 3: 'input' is blank" in text and "row 4: 'metadata.s' is nan, which is not a JSON value" in text
    dataset = load(path, skip_bad_rows=True)
    assert ([row.line for row in dataset.rows], dataset.num_skipped) == ([1], 3)
    late = pa.array([{"at": 1}], type=pa.struct({"at": pa.timestamp("ns")}))
    with pytest.raises(DatasetError, match=r"row 1: 'metadata' is a .* that has no JSON value"):
        load(write(tmp_path / "late.parquet", metadata=late))
    far = pa.array([{"at": 1 << 60}], type=pa.struct({"at": pa.timestamp("us")}))
    with pytest.raises(DatasetError, match=r"row 1: 'metadata' is a .* that has no JSON value"):
        load(write(tmp_path / "far.parquet", metadata=far))
    twins = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["input", "input"])
    pq.write_table(twins, tmp_path / "twins.parquet")
    with pytest.raises(DatasetError, match="has two columns named 'input'"):
        load(tmp_path / "twins.parquet")
    with pytest.raises(DatasetError, match=r"row 1: it has neither 'input' nor 'metadata'; its keys are \['other'\]"):
        load(write(tmp_path / "other.parquet", other=[1]))


def test_what_is_no_parquet_file_and_what_pyarrow_is_missing_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(DatasetError, match="cannot be read as a Parquet file"):
        load(path)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DatasetError, match="cannot be read as a Parquet file"):
        load(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DatasetError, match=r"pip install 'silva\[parquet\]'"):
        list(parquet_rows(path))

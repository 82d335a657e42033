"""Session folders, inputs, outputs and logs, also those of hostile agents."""

import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from silva.agent import files
from silva.agent.files import create_session, log_tail, read_output_bytes, session_files
from silva.credit.reward import read_reward
from silva.types.errors import SessionFailure
from silva.types.rollout import SessionInput
from silva.wire.output_document import OutputDocument, parse_output

REASONS = {"output_invalid", "reward_invalid", "metadata_invalid", "record_invalid"}


def read_output(path: Path) -> OutputDocument:
    return parse_output(read_output_bytes(path))


def failure(tmp_path: Path, content: str | bytes) -> SessionFailure:
    path = tmp_path / "output.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SessionFailure) as caught:
        read_reward(read_output(path).reward, "session s1")
    return caught.value


def test_a_session_gets_a_private_folder_with_its_input(tmp_path):
    messages = [{"role": "user", "content": "q ü"}]
    made = create_session(tmp_path / "run", "s-1", SessionInput(messages=messages, metadata={"n": 1}))
    assert made.root == tmp_path / "run" / "sessions" / "s-1"
    assert json.loads(made.input_json.read_text(encoding="utf-8")) == {"messages": messages, "metadata": {"n": 1}}
    assert not made.output_json.exists()
    assert list(made.io_dir.iterdir()) == []
    assert [path.stat().st_mode & 0o077 for path in (made.root.parent, made.root, made.io_dir)] == [0, 0, 0]


def test_paths_are_absolute_whatever_the_run_folder_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert session_files(Path("run"), "s").output_json == tmp_path / "run" / "sessions" / "s" / "output.json"


@pytest.mark.parametrize("bad", ["", "..", ".x", "a/b", "a\0b", "x" * 200, "a b", "é", "a\n"])
def test_an_id_that_cannot_name_a_folder_is_refused(tmp_path, bad):
    with pytest.raises(SessionFailure) as caught:
        session_files(tmp_path, bad)
    assert caught.value.reason == "session_id_invalid"


def test_a_folder_that_cannot_be_made_fails_the_session_only(tmp_path):
    create_session(tmp_path, "s", SessionInput(metadata={}))
    with pytest.raises(SessionFailure, match="cannot be made") as caught:
        create_session(tmp_path, "s", SessionInput(metadata={}))
    assert caught.value.reason == "session_files"


def test_inputs_that_json_cannot_hold(tmp_path):
    made = create_session(tmp_path, "half", SessionInput(metadata={"x": "\ud800"}))
    assert json.loads(made.input_json.read_bytes()) == {"metadata": {"x": "\ud800"}}
    with pytest.raises(SessionFailure) as caught:
        create_session(tmp_path, "nan", SessionInput(metadata={"x": math.nan}))
    assert caught.value.reason == "input_invalid"


@pytest.mark.parametrize("content", [None, "", " \n\t\r\n"])
def test_no_output_is_an_export_without_reward(tmp_path, content):
    if content is not None:
        (tmp_path / "output.json").write_text(content)
    assert read_output(tmp_path / "output.json") == OutputDocument()


@pytest.mark.parametrize(
    ("content", "reward", "metadata", "ignored"),
    [
        ("{}", None, {}, ()),
        ('{"reward": 1}', 1.0, {}, ()),
        ('{"reward": null, "metadata": null}', None, {}, ()),
        ('\n {"metadata": {"a": [1, 2.5, {"b": null}]}, "reward": -0.5}\n\n', -0.5, {"a": [1, 2.5, {"b": None}]}, ()),
        ('{"rewards": 1, "name": "x"}', None, {}, ("rewards", "name")),
        ('{"reward": 0,\n "metadata": {"x": 18446744073709551615}}', 0.0, {"x": 2**64 - 1}, ()),
    ],
)
def test_documents_for_an_implicit_export(tmp_path, content, reward, metadata, ignored):
    path = tmp_path / "output.json"
    path.write_text(content)
    assert read_output(path) == OutputDocument(reward=reward, metadata=metadata, ignored=ignored)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"reward": \n', "line 2 column 1: Expecting value; the value starts with '{\"reward\": \\\\n'"),
        ('{"reward": 1,\n "metadata": {x: 1}}', "line 2 column 15"),
        ("reward=1", "line 1 column 1: Expecting value; the value starts with 'reward=1'"),
        ('{"reward": 1} trailing', r"line 1 column 15 follows a complete JSON value; it goes on with 'trailing'"),
        ('{\n"reward": 1\n}\noops', "line 4 column 1 follows a complete JSON value"),
        ('{"reward": 1}\n{"reward": ', "line 2 column 12"),
        ('{"reward": 1}\n{"reward": 2}\n', "it holds 2 JSON values"),
        ("[1]", r"it holds \[1\]; write one JSON object"),
        ("null", "it holds null"),
        ('"text"', "it holds 'text'"),
        ('{"reward": 1, "reward": 2}', "the key 'reward' occurs twice"),
        ('{"metadata": {"a": {"b": 1, "b": 1}}}', "the key 'b' occurs twice"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"metadata": {\n"a": "\xff"}}', r"byte 21 \(line 2\) is not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ('{"metadata": ' + '{"a":' * 100_000, "nested too deeply"),
        ('{"reward": ' + "9" * 5000 + "}", "too many digits"),
        ('{"a": "' + "x" * 1_000_000, "column 7: Unterminated string"),
    ],
)
def test_output_that_is_no_document_names_the_place(tmp_path, content, text):
    error = failure(tmp_path, content)
    assert error.reason == "output_invalid"
    assert len(str(error)) < 400
    with pytest.raises(SessionFailure, match=text):
        raise error


@pytest.mark.parametrize(
    "value",
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "1e31", "-1e300", "9" * 400),
        *('"1"', "true", "[1]", '{"score": 1}', "[" * 50 + "]" * 50),
    ],
)
def test_rewards_that_are_no_finite_number(tmp_path, value):
    error = failure(tmp_path, f'{{"reward": {value}}}')
    assert error.reason == "reward_invalid"
    assert ("--reward-key" in str(error)) == value.startswith("{")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[1]", "it must be an object"),
        ('"x"', "it must be an object"),
        ("0", "it must be an object"),
        ('{"a": [0, {"b": NaN}]}', "'metadata.a[1].b' in the output file is nan"),
        ('{"a": 1e999}', "is inf"),
        ('{"a": ' + "9" * 50 + "}", "more than 64 bits"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"\\ud800": 1}', "half of a surrogate pair"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "levels deep"),
    ],
)
def test_metadata_that_no_ledger_can_keep(tmp_path, value, text):
    error = failure(tmp_path, f'{{"reward": 1, "metadata": {value}}}')
    assert error.reason == "metadata_invalid"
    assert text in str(error)


def test_many_values_under_a_long_key_take_no_more_memory_than_they_are():
    """Written out, the path of each value would take 1 GB here."""
    text = f'{{"metadata": {{"{"k" * 50_000}": [{"0, " * 20_000} NaN]}}}}'
    tracemalloc.start()
    with pytest.raises(SessionFailure, match="in the output file is nan") as caught:
        parse_output(text.encode())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.reason == "metadata_invalid" and len(str(caught.value)) < 300
    assert peak < 100 * len(text)


def test_more_records_than_a_session_may_have(tmp_path):
    error = failure(tmp_path, '{"messages": [1]}\n' * 10_001)
    assert error.reason == "output_invalid" and "more than 10000 JSON values" in str(error)


def test_records_stand_one_a_line(tmp_path):
    path = tmp_path / "output.json"
    path.write_text(
        '{"name": "main", "messages": [{"role": "user"}], "reward": {"a": 1}, "color": 1}\n'
        '\n  \n{"metadata": {"n": 1}, "tools": [], "name": "\\ud800", "messages": [1, 2]}\n'
    )
    main, other = read_output(path).records
    assert (main.name, main.line, main.reward, main.metadata, main.ignored) == ("main", 1, {"a": 1}, {}, ("color",))
    assert (other.name, other.line, other.reward, other.metadata, other.ignored) == ("\\ud800", 4, None, {"n": 1}, ())
    assert {key: bytes(raw) for key, raw in other.fields.items()} == {"tools": b"[]", "messages": b"[1,2]"}
    path.write_text(json.dumps({"name": "main", "messages": [1]}, indent=1))
    assert [record.line for record in read_output(path).records] == [1]


RECORD = '{"name": "a", "messages": [1]}'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"messages": [1]}', "the record in line 1 of the output file cannot be used: name is missing"),
        ('{"messages": [1], "name": 5}', "name is 5; it must be a text"),
        ('{"messages": [1], "name": " "}', "name is ' '; it must not be empty"),
        ('{"messages": [1], "name": "' + "x" * 257 + '"}', "name has 257 characters; at most 256"),
        (
            f"{RECORD}\n\n{RECORD}",
            "record 'a' (line 3 of the output file) cannot be used: its name is that of the record",
        ),
        (
            '{"name": "\\ud800", "messages": [1]}\n{"name": "\\\\ud800", "messages": [1]}',
            "its name is that of the record in line 1",
        ),
        ('{"name": "a", "messages": null}', "record 'a' (line 1 of the output file) cannot be used: messages is null"),
        ('{"name": "a", "messages": []}', "messages is empty"),
        (
            f'{RECORD}\n{{"name": "b", "reward": 1}}',
            "record 'b' (line 2 of the output file) cannot be used: messages is",
        ),
        (f'{{"reward": 1}}\n{RECORD}', "the record in line 1 of the output file cannot be used: messages is missing"),
        ('{"name": "a", "messages": [NaN]}', "it holds what no request can contain"),
    ],
)
def test_records_that_cannot_be_read_are_named_by_line_and_name(tmp_path, content, text):
    error = failure(tmp_path, content)
    assert error.reason == "record_invalid"
    assert text in str(error)


def test_faults_of_records_that_other_output_has_too(tmp_path):
    for content, reason, text in (
        (f"{RECORD}\n[1]", "output_invalid", "line 2 holds [1]; each line must be a record"),
        (f"{RECORD} {RECORD}", "output_invalid", "line 1 column 32 follows a complete JSON value"),
        (f"[{RECORD}]", "output_invalid", "write each record on a line of its own, without a list around them"),
        (
            '{"name": "a", "messages": [1], "metadata": {"x": NaN}}',
            "metadata_invalid",
            "'metadata.x' in record 'a' (line 1 of the output file) is nan",
        ),
    ):
        error = failure(tmp_path, content)
        assert error.reason == reason and text in str(error)
    path = tmp_path / "output.json"
    path.write_text('{"name": "a", "messages": [1], "reward": NaN}')
    (record,) = read_output(path).records
    with pytest.raises(SessionFailure, match="must be finite"):
        read_reward(record.reward, record.where)


def test_things_that_are_no_file_never_make_the_reader_wait(tmp_path):
    path = tmp_path / "output.json"
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        make()
        with pytest.raises(SessionFailure, match="not a regular file"):
            read_output(path)
        path.rmdir() if path.is_dir() else path.unlink()
    path.symlink_to(path)
    with pytest.raises(SessionFailure, match="cannot be opened"):
        read_output(path)


def test_a_link_to_a_file_and_a_dangling_link(tmp_path):
    (tmp_path / "real.json").write_text('{"reward": 2}')
    (tmp_path / "output.json").symlink_to("real.json")
    assert read_output(tmp_path / "output.json").reward == 2.0
    (tmp_path / "real.json").unlink()
    assert read_output(tmp_path / "output.json") == OutputDocument()


def test_a_file_beyond_the_limit_is_not_parsed(tmp_path, monkeypatch):
    path = tmp_path / "output.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SessionFailure, match="larger than 64 MB"):
        read_output(path)
    monkeypatch.setattr(files, "MAX_OUTPUT_BYTES", 4)
    path.write_text("    ")
    assert read_output(path) == OutputDocument()
    path.write_text("     ")
    with pytest.raises(SessionFailure):
        read_output(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.fixed_dictionaries({}, optional={"reward": JSON, "metadata": JSON, "x": JSON}).map(
    lambda value: json.dumps(value).encode()
)


@settings(deadline=None)
@given(st.binary(max_size=200) | DOCUMENTS | st.lists(DOCUMENTS, max_size=3).map(b"\n".join))
@example(b'{"reward":1}\x00')
@example(b'{"reward":1}\n\xc2\xa0')
def test_any_bytes_give_a_document_or_a_session_failure(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any-output.json"
    path.write_bytes(content)
    try:
        document = read_output(path)
        reward = read_reward(document.reward, "session s1", "key").value
    except SessionFailure as error:
        assert error.reason in REASONS
        assert len(str(error)) < 500
        str(error).encode()
        return
    assert reward is None or math.isfinite(reward)
    json.dumps(document.metadata, allow_nan=False, ensure_ascii=False).encode()


def test_the_tail_of_a_log(tmp_path):
    log = tmp_path / "command.log"
    assert log_tail(log) == ""
    log.write_bytes(b"ok \xff\n")
    assert log_tail(log) == "ok \ufffd\n"
    log.write_bytes("ü".encode() * 3000)
    assert log_tail(log, 5) == "üü"
    log.unlink()
    os.mkfifo(log)
    assert log_tail(log) == ""
    log.unlink()
    (tmp_path / "other").write_text("secret")
    log.symlink_to("other")
    assert log_tail(log) == ""

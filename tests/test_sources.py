"""What reading promises: a row is the same document from every format, a bad one is named by file and place, and
nothing that is no text, message or token id becomes one.

The tables and compressed files are made here by pyarrow, gzip and zstandard themselves.
"""

import datetime
import gzip
import json
import os
import pickle
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxllm.data.formats as formats
from jaxllm.data import DataConfig, EvaluationConfig
from jaxllm.data.pipeline import Rendering
from jaxllm.data.sources import Documents, open_documents
from jaxllm.data.workers import Workers
from jaxllm.section import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

few = settings(max_examples=25, deadline=None)
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "stream.arrow", "feather")


def write(folder, name, rows, schema=None, group=3):
    """Rows (dicts) as folder/name, in the format of the name; small row groups and record batches."""
    path = folder / name
    if ".jsonl" in name:
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
        packed = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rsplit(".")[-1], bytes)
        path.write_bytes(packed(raw))
        return str(path)
    table = pa.Table.from_pylist(rows, schema=schema)
    if name.endswith("parquet"):
        pq.write_table(table, path, row_group_size=group)
    elif name.endswith("feather"):
        __import__("pyarrow.feather").feather.write_feather(table, str(path), chunksize=group)
    else:
        new = pa.ipc.new_stream if "stream" in name else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    return str(path)


def read(path, **options):
    documents = Documents(path, **options)
    return [documents[number] for number in range(len(documents))]


def refusal(path, **options):
    with pytest.raises(UserError) as refused:
        Documents(path, **options)
    return str(refused.value)


# ------------------------------------------------------------------------------------------- the same from every format

strings = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "odd"]), "content": strings})
ROWS = {
    "text": st.fixed_dictionaries({"text": strings, "n": st.integers(0, 9)}),
    "chat": st.fixed_dictionaries({"messages": st.lists(message, max_size=3)}),
    "prompt": st.fixed_dictionaries({"prompt": strings, "completion": strings}),
    "tokens": st.fixed_dictionaries({"input_ids": st.lists(st.integers(0, 2**31 - 1), max_size=5)}),
}
STRUCT = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
SCHEMAS = {
    "text": pa.schema([("n", pa.int64()), ("text", pa.string())]),
    "chat": pa.schema([("messages", pa.list_(STRUCT))]),
    "prompt": pa.schema([("prompt", pa.string()), ("completion", pa.large_string())]),
    "tokens": pa.schema([("input_ids", pa.list_(pa.int64()))]),
}
EXPECTED = {
    "text": lambda row: row["text"] or None,
    "chat": lambda row: {"messages": row["messages"]} if row["messages"] else None,
    "prompt": lambda row: row if row["completion"] else None,
    "tokens": lambda row: row["input_ids"] or None,
}


@few
@given(st.data(), st.sampled_from(list(ROWS)))
def test_rows_are_the_same_documents_from_every_format(tmp_path_factory, data, kind):
    rows = data.draw(st.lists(ROWS[kind], min_size=1, max_size=9))
    want = [record for row in rows if (record := EXPECTED[kind](row)) is not None]
    folder = tmp_path_factory.mktemp("formats")
    for name in FORMATS:
        path = write(folder, f"d.{name}", rows, SCHEMAS[kind])
        if not want:
            assert "no document" in refusal(path, kind=kind)
            continue
        documents = Documents(path, kind=kind)
        got = [documents[number] for number in range(len(documents))]
        assert [list(ids) for ids in got] == want if kind == "tokens" else got == want
        if len(want) < len(rows):
            assert f"{len(rows) - len(want)} empty" in documents.summary()
        places = [number for number, row in enumerate(rows, 1) if EXPECTED[kind](row) is not None]
        mark = ":" if "jsonl" in name else ", row "
        assert [documents.where(i) for i in range(len(documents))] == [f"{path}{mark}{place}" for place in places]
        again = Documents(path, kind=kind)
        assert again.fingerprint == documents.fingerprint


def test_lines_read_from_compressed_files_are_those_of_the_plain_one(tmp_path):
    raw = b'\xef\xbb\xbf{"text":"one"}\r\n\r\n   \r\n{"text":"a\xe2\x80\xa8b"}\n{"text":"x \\ud83d y"}\n{"text":"c\xc2\x85"}'
    half = len(raw) // 2
    (tmp_path / "d.jsonl").write_bytes(raw)
    (tmp_path / "members.jsonl.gz").write_bytes(gzip.compress(raw[:half]) + gzip.compress(raw[half:]))
    (tmp_path / "frames.ndjson.zst").write_bytes(zstandard.compress(raw[:half]) + zstandard.compress(raw[half:]))
    for name in ("d.jsonl", "members.jsonl.gz", "frames.ndjson.zst"):
        documents = Documents(str(tmp_path / name))
        assert [documents[n] for n in range(len(documents))] == ["one", "a\u2028b", "x \ufffd y", "c\x85"]
        assert (
            "2 blank lines" in documents.summary() and "surrogate pairs replaced by U+FFFD in 1" in documents.summary()
        )
    blocks = gzip.compress(raw[:half]) + bytes(500) + gzip.compress(raw[half:]) + bytes(40_000)  # as tapes are padded
    (tmp_path / "padded.jsonl.gz").write_bytes(blocks)
    assert gzip.decompress(blocks) == raw and read(str(tmp_path / "padded.jsonl.gz")) == read(str(tmp_path / "d.jsonl"))
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfone\r\n"))
    assert read(str(tmp_path / "t.txt.gz")) == ["one\r\n"]


def test_a_dictionary_column_and_a_byte_string_of_another_chunk_read_as_text(tmp_path):
    table = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})
    with pa.OSFile(str(tmp_path / "d.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert read(str(tmp_path / "d.arrow")) == ["a", "b", "a"]


def test_only_the_used_columns_of_a_table_are_read(tmp_path):
    rows = [{"text": f"r{n}", "meta": [n], "picture": os.urandom(1 << 16)} for n in range(32)]
    for name in ("d.parquet", "d.arrow", "d.stream.arrow"):
        path = write(tmp_path, name, rows)
        assert all(list(row) == ["text"] for _, row in formats.table_rows(path, lambda names: names[:1]))
        assert read(path) == [row["text"] for row in rows]


def test_an_unused_column_may_change_its_type_or_be_missing(tmp_path):
    write(tmp_path, "a.parquet", [{"text": "r", "meta": None}])
    write(tmp_path, "b.parquet", [{"text": "s", "meta": [1]}])
    write(tmp_path, "c.parquet", [{"text": "t"}])
    write(tmp_path, "d.jsonl", [{"meta": "x", "text": "u"}])
    assert read(str(tmp_path)) == ["r", "s", "t", "u"]


# -------------------------------------------------------------------------------------------------- what is not a record

NOT_TEXT = [
    5,
    1.5,
    float("nan"),
    True,
    None,
    ["a"],
    {"a": "b"},
    b"bytes",
    datetime.date(2024, 5, 1),
    datetime.datetime(2024, 5, 1),
]


@pytest.mark.parametrize("value", NOT_TEXT, ids=repr)
@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.stream.arrow", "t.jsonl.gz"])
def test_what_is_no_string_is_never_spelled_out_as_one(tmp_path, name, value):
    if ".jsonl" in name and not isinstance(value, int | float | list | dict | None):
        return
    rows = [{"text": value}, {"text": value}]
    path = write(tmp_path, name, rows)
    place = f"{path}:1: " if ".jsonl" in name else f"{path}, row 1: "
    message = refusal(path)
    assert message.startswith(f"data.path: {place}field 'text' is ") and "a string is wanted" in message
    with pytest.raises(UserError, match="no document in 1 files .*2 skipped"):
        Documents(path, on_bad="skip")


@pytest.mark.parametrize("name", FORMATS)
def test_a_null_among_texts_and_a_missing_field_name_the_place_and_the_setting(tmp_path, name):
    mark = ":2: " if "jsonl" in name else ", row 2: "
    path = write(tmp_path, f"null.{name}", [{"text": "good"}, {"text": None}, {"text": "fine"}])
    assert f"{path}{mark}field 'text' is null, a string is wanted; data.text_field" in refusal(path)
    documents = Documents(path, on_bad="skip")
    assert [documents[0], documents[1]] == ["good", "fine"] and "1 skipped" in documents.summary()
    assert documents.where(1) == path + mark.replace("2", "3")[:-2]
    path = write(tmp_path, f"key.{name}", [{"TEXT": "x", "n": 1}])
    for part in (path, "no field 'text'", "fields here: TEXT, n", "data.text_field chooses it"):
        assert part in refusal(path)
    assert read(path, text_field="TEXT") == ["x"]


def test_a_field_that_changes_its_type_names_place_expected_and_found(tmp_path):
    write(tmp_path, "a.parquet", [{"text": "x"}])
    write(tmp_path, "b.parquet", [{"text": 7}])
    assert "b.parquet, row 1: field 'text' is a number, a string is wanted" in refusal(str(tmp_path / "*.parquet"))


@pytest.mark.parametrize("name", ["u.parquet", "u.arrow"])
def test_bytes_in_a_string_column_that_are_no_utf8_follow_on_bad(tmp_path, name):
    buffers = [None, pa.py_buffer(np.array([0, 2, 6], np.int32)), pa.py_buffer(b"okcaf\xe9")]
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 2, buffers)})
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    path = str(tmp_path / name)
    assert f"{path}, row 2: field 'text' is not UTF-8 at its byte 3 (0xe9); data.on_bad" in refusal(path)
    assert read(path, on_bad="skip") == ["ok"] and read(path, on_bad="replace") == ["ok", "caf\ufffd"]
    assert "replaced by U+FFFD in 1 record" in Documents(path, on_bad="replace").summary()


GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
ODD = {
    "chat": {
        '{"messages": "hello"}': "field 'messages' is a string, a list of messages is wanted; data.messages_field",
        '{"conversations": []}': "no field 'messages' (fields here: conversations); data.messages_field chooses it",
        '{"messages": ["hello"]}': "message 1 of 'messages' is a string, an object with 'role' and 'content' is wanted",
        '{"messages": [{"from": "human", "value": "x"}]}': "message 1 of 'messages': 'role' is null, a string is wanted (fields here: from, value)",
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null}]}': "message 2 of 'messages': 'content' is null",
        '{"messages": [{"role": "user", "content": 5}]}': "message 1 of 'messages': 'content' is a number, a string is wanted",
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}': "message 1 of 'messages': 'content' is a list, a string is wanted",
        '{"messages": [{"role": 1, "content": "q"}]}': "message 1 of 'messages': 'role' is a number, a string is wanted",
        '{"messages": [{"role": "user", "content": "q"}], "tools": "search"}': "field 'tools' is a string, but no JSON",
        '{"messages": [{"role": "user", "content": "q"}], "tools": ["search"]}': "field 'tools' is a list, a list of objects is wanted",
        '{"messages": [{"role": "user", "content": "q", "content": "z"}]}': "the key 'content' stands twice in one object",
        '{"messages": [{"role": "user", "content": "q"}], "tools": [{"a": {"b": 1, "b": 1}}]}': "the key 'b' stands twice in one object",
        '{"messages": [{"role": "user", "content": "q"}], "tools": "[{\\"a\\": 1, \\"a\\": 2}]"}': "the key 'a' stands twice in one object",
    },
    "prompt": {
        '{"prompt": "p"}': "no field 'completion' (fields here: prompt); data.completion_field chooses it",
        '{"prompt": null, "completion": "c"}': "field 'prompt' is null, a string is wanted; data.prompt_field",
        '{"prompt": "p", "completion": 3}': "field 'completion' is a number, a string is wanted; data.completion_field",
    },
    "tokens": {
        '{"tokens": [1, 2.0]}': "place 1 of field 'tokens' is a number (2.0), a token id is wanted",
        '{"tokens": [1, true]}': "place 1 of field 'tokens' is a boolean (True)",
        '{"tokens": [null]}': "place 0 of field 'tokens' is null",
        '{"tokens": [0, -100]}': "place 1 of field 'tokens' is -100, no token id",
        '{"tokens": [2147483648]}': "place 0 of field 'tokens' is 2147483648, no token id",
        '{"tokens": [9999999999999999999999]}': "place 0 of field 'tokens' is 9999999999999999999999, no token id",
        '{"tokens": "1 2"}': "field 'tokens' is a string, a list of token ids is wanted",
        '{"ids": [1]}': "one field of token ids is wanted, 'tokens' or 'input_ids'; neither is there (fields here: ids)",
        '{"tokens": [1], "input_ids": [2]}': "one field of token ids is wanted, 'tokens' or 'input_ids'; both are there",
        '{"tokens": [1, 2], "labels": [1, [2]]}': "field 'labels' is not the ids themselves",
        '{"tokens": [1, 2], "labels": {"a": 1}}': "field 'labels' is not the ids themselves",
        '{"tokens": [], "loss_mask": [1]}': "field 'loss_mask' is not 1 at every place",
    },
}
USUAL = {  # kind: (a record, what is read of it, one that is empty)
    "chat": (GOOD, GOOD, {"messages": []}),
    "prompt": (*2 * ({"prompt": "p", "completion": "c"},), {"prompt": "p", "completion": ""}),
    "tokens": ({"tokens": [1]}, [1], {"tokens": []}),
}


@pytest.mark.parametrize("kind, odd", [(kind, odd) for kind in ODD for odd in ODD[kind]])
def test_an_odd_record_is_refused_by_place_and_reason_or_skipped_and_counted(tmp_path, kind, odd):
    good, wanted, empty = USUAL[kind]
    path = str(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").write_text("\n".join([json.dumps(good), odd, json.dumps(empty), json.dumps(good)]))
    assert refusal(path, kind=kind).startswith(f"data.path: {path}:2: {ODD[kind][odd]}")
    documents = Documents(path, kind=kind, on_bad="skip")
    assert [list(one) if kind == "tokens" else one for one in (documents[0], documents[1])] == [wanted, wanted]
    assert len(documents) == 2 and "1 empty" in documents.summary() and "1 skipped" in documents.summary()


def test_a_record_nested_too_deeply_for_what_follows_its_parser_is_refused_by_place_or_skipped(tmp_path):
    depth = 700 if sys.version_info < (3, 12) else 3000  # from 3.12 on the parser counts by itself, and further
    nested = '[{"a": ' + "[" * depth + "]" * depth + "}]"
    for tools in (nested, json.dumps(nested), json.dumps("[" * 100_000)):
        line = json.dumps({"messages": GOOD["messages"]})[:-1] + f', "tools": {tools}}}'
        formats.parse_json(line)
        (tmp_path / "d.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
        assert f"{tmp_path / 'd.jsonl'}:2: is nested too deeply" in refusal(str(tmp_path / "d.jsonl"), kind="chat")
        assert read(str(tmp_path / "d.jsonl"), kind="chat", on_bad="skip") == [GOOD]


def test_tools_calls_and_own_fields_of_messages_come_through_from_json_and_tables_alike(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q", "name": "Ann"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "1 \ud83d"},
            ],
            "tools": json.dumps([{"name": "f", "parameters": {"x": {"type": "integer", "default": None}}}]),
        },
        {**GOOD, "tools": None},
    ]
    want = json.loads(json.dumps(rows).replace("\\ud83d", "\\ufffd"))
    want[0]["tools"] = json.loads(want[0]["tools"])
    del want[1]["tools"]
    jsonl = write(tmp_path, "c.jsonl", rows)
    rows[0]["messages"][2]["content"] = "1 \ufffd"
    assert read(jsonl, kind="chat") == want
    assert read(write(tmp_path, "c.parquet", rows), kind="chat") == want


def test_pairs_may_have_other_field_names_and_no_prompt_but_need_something_to_learn(tmp_path):
    path = write(tmp_path, "p.jsonl", [{"q": "", "a": "x"}, {"q": "p", "a": ""}])
    documents = Documents(path, kind="prompt", prompt_field="q", completion_field="a")
    assert (
        len(documents) == 1 and documents[0] == {"prompt": "", "completion": "x"} and "1 empty" in documents.summary()
    )


# ---------------------------------------------------------------------------------------------------------------- tokens


def test_nulls_and_floats_in_a_column_of_ids_are_refused(tmp_path):
    path = write(tmp_path, "n.parquet", [{"input_ids": [1, None]}])
    assert "n.parquet, row 1: place 1 of field 'input_ids' is null" in refusal(path, kind="tokens")
    path = write(tmp_path, "f.parquet", [{"input_ids": [1.0]}])
    assert "f.parquet, row 1: place 0 of field 'input_ids' is a number (1.0)" in refusal(path, kind="tokens")


def test_ids_come_as_int32_with_the_largest_known_and_masks_that_change_nothing(tmp_path):
    rows = [
        {"input_ids": [1, 70000], "labels": [1, 70000], "attention_mask": [1, 1]},
        {"input_ids": [3], "labels": [3], "attention_mask": [1]},
    ]
    for name in FORMATS:
        documents = Documents(write(tmp_path, f"t.{name}", rows), kind="tokens")
        assert documents[0].dtype == np.int32 and documents[0].tolist() == [1, 70000]
        assert documents.largest_token == (70000, documents.where(0))


@pytest.mark.parametrize(
    "field, values",
    [
        ("attention_mask", [1, 1, 0]),
        ("loss_mask", [0, 1, 1]),
        ("labels", [-100, 5, 9]),
        ("labels", [7, 5]),
        ("labels", [[7], [5, 5], [9]]),
    ],
)
def test_masks_of_token_ids_that_ask_for_more_than_training_on_all_are_refused(tmp_path, field, values):
    for name in ("t.jsonl", "t.parquet"):
        reason = refusal(write(tmp_path, name, [{"input_ids": [7, 5, 9], field: values}]), kind="tokens")
        assert f"field '{field}' is not " in reason and f"{name}" in reason


def test_a_messages_own_word_on_being_trained_is_read_from_every_format(tmp_path):
    for switch, on, off in (("weight", 1, 0), ("train", True, False), ("training", True, False)):
        messages = [{"role": "user", "content": "a"}]
        messages += [{"role": "assistant", "content": "b", switch: value} for value in (on, off)]
        for name in ("m.jsonl", "m.parquet"):
            got = read(write(tmp_path, name, [{"messages": messages}]), kind="chat")[0]["messages"]
            assert [message.get("weight") for message in got] == [None, 1, 0] and (
                switch == "weight" or switch not in got[1]
            )
    for odd in ({"weight": 0.5}, {"weight": "0"}, {"train": 2}, {"training": []}, {"weight": 1, "train": False}):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **odd}]
        assert "message 2 of 'messages': " in refusal(write(tmp_path, "m.jsonl", [{"messages": messages}]), kind="chat")


@pytest.mark.parametrize("name", ["train.jsonl-00000-of-00002", "part-00000", "part-00000.gz", "d.log"])
def test_json_lines_under_another_name_are_not_taken_for_one_text(tmp_path, name):
    raw = b'\xef\xbb\xbf\n{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert f"the first line of {tmp_path / name} is a JSON object" in refusal(str(tmp_path / name))
    for text in (b"{not json}\n", b"[1]\n{}", b"plain"):
        (tmp_path / "part-1").write_bytes(text)
        assert len(Documents(str(tmp_path / "part-1"))) == 1
    (tmp_path / "a.txt").write_bytes(raw)
    assert len(Documents(str(tmp_path / "a.txt"))) == 1
    (tmp_path / "t.csv").write_text("a,b\n")
    assert "cannot read .csv files" in refusal(str(tmp_path / "t.csv"))


def test_a_folder_for_copies_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    documents = Documents(write(tmp_path, "d.jsonl.gz", [{"text": "one"}]), folder="~/c")
    assert documents[0] == "one" and (tmp_path / "home" / "c").is_dir() and not (tmp_path / "~").exists()


@pytest.mark.parametrize("dtype", ["uint16", "int32", ">i4", "int64"])
def test_an_array_gives_its_rows_its_pieces_or_itself(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("jaxllm.data.sources.BLOCK", 24)  # many blocks
    ids = (np.arange(60) % 7).astype(dtype)
    np.save(tmp_path / "rows.npy", ids.reshape(10, 6))
    rows = Documents(str(tmp_path / "rows.npy"), kind="tokens")
    assert np.array_equal([rows[n] for n in range(10)], ids.reshape(10, 6)) and rows.where(9).endswith(
        "rows.npy, row 10"
    )
    np.save(tmp_path / "one.npy", ids)
    one = Documents(str(tmp_path / "one.npy"), kind="tokens")
    assert len(one) == 1 and np.array_equal(one[0], ids) and one[0].dtype == np.int32
    assert one.where(0) == str(tmp_path / "one.npy")
    (tmp_path / "one.npy.json").write_text('{"document_end": 6}')
    pieces = Documents(str(tmp_path / "one.npy"), kind="tokens")
    assert [pieces[n].tolist() for n in range(9)] == [list(range(7))] * 8 + [[0, 1, 2, 3]] and len(pieces) == 9
    assert pieces.largest_token[0] == 6 and pieces.fingerprint != one.fingerprint
    assert len(Documents(str(tmp_path), kind="tokens")) == 19, "the description is not data"


def test_raw_numbers_need_a_description_and_are_refused_where_it_does_not_fit(tmp_path):
    ids = np.array([5, 6, 2, 7, 2, 2, 8], "<u2")
    ids.tofile(tmp_path / "t.bin")
    path = str(tmp_path / "t.bin")
    described = tmp_path / "t.bin.json"
    assert 'must hold an object like {"dtype": "uint16", "document_end": 2}' in refusal(path, kind="tokens")
    described.write_text('{"dtype": "uint16", "document_end": 2}')
    assert [ids.tolist() for ids in read(path, kind="tokens")] == [[5, 6, 2], [7, 2], [2], [8]]
    described.write_text('{"dtype": "uint16", "document_end": null}')
    assert [ids.tolist() for ids in read(path, kind="tokens")] == [ids.tolist()]
    for text, reason in {
        '{"dtype": "uint16"}': "must hold an object like",
        '{"dtype": "uint32", "document_end": 2}': "14 bytes are no whole number of uint32",
        '{"dtype": "float32", "document_end": 2}': "dtype is 'float32'",
        '{"dtype": "uint16", "document_end": "2"}': "document_end is a string",
        "{": "is no JSON",
    }.items():
        described.write_text(text)
        assert reason in refusal(path, kind="tokens")


@pytest.mark.parametrize(
    "ids, reason",
    [
        (np.ones(4), "holds float64 of shape (4,)"),
        (np.ones(4, bool), "holds bool"),
        (np.zeros((2, 2, 2), int), "of shape (2, 2, 2)"),
        (np.asfortranarray(np.zeros((3, 2), int)), "C order"),
        (np.array([1, -1]), "the number at place 1 is -1, no token id"),
        (np.array([2**31, 1]), "the number at place 0 is 2147483648, no token id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_array_of_anything_but_token_ids_is_refused(tmp_path, ids, reason):
    np.save(tmp_path / "a.npy", ids)
    assert reason in refusal(str(tmp_path / "a.npy"), kind="tokens")


# ------------------------------------------------------------------------------------------------------- damaged, missing


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst"])
def test_a_file_that_is_cut_off_names_how_far_it_goes_and_its_whole_lines_can_be_kept(tmp_path, name):
    rng = np.random.default_rng(0)
    rows = [{"text": f"{n} " + rng.bytes(300).hex()} for n in range(400)]
    path = write(tmp_path, name, rows)
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) * 2 // 3)
    message = refusal(path)
    assert f"{name}: is cut off: it can be read up to line " in message and "bytes) of its content" in message
    documents = Documents(path, on_bad="skip")
    lines = int(message.split("up to line ")[1].split()[0].replace(",", ""))
    assert 100 < len(documents) == lines < 400 and "1 skipped" in documents.summary()
    assert [documents[n] for n in range(lines)] == [row["text"] for row in rows[:lines]]


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst", "d.parquet", "d.arrow", "d.stream.arrow", "d.feather"])
def test_a_file_that_is_not_what_its_name_says_is_refused_without_a_traceback(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": "plain"}\n' * 20)
    assert refusal(str(tmp_path / name)).startswith(f"data.path: {tmp_path / name}: ")


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow", "d.stream.arrow"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_table_that_is_cut_off_is_refused(tmp_path, name, share):
    path = write(tmp_path, name, [{"text": f"{n} " * 50} for n in range(90)], group=30)
    with open(path, "r+b") as file:
        file.truncate(int(os.path.getsize(path) * share))
    assert refusal(path).startswith(f"data.path: {path}: ")


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst"])
def test_damage_inside_a_compressed_file_is_found(tmp_path, name):
    raw = b"".join(b'{"text": "%s"}\n' % os.urandom(40).hex().encode() for _ in range(300))
    compress = gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor(write_checksum=True).compress
    damaged = bytearray(compress(raw))
    damaged[-3] ^= 0xFF  # in the check sum
    for content in (damaged, bytes(100), compress(raw) + bytes(100) + b"more"):
        (tmp_path / name).write_bytes(content)
        assert f"{name}: is damaged after " in refusal(str(tmp_path / name))


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    paths = {name: write(tmp_path, f"d.{name}", [{"text": "x"}]) for name in ("parquet", "arrow", "jsonl.zst")}
    for package in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc", "zstandard"):
        monkeypatch.setitem(sys.modules, package, None)
    for name, package in (("parquet", "pyarrow"), ("arrow", "pyarrow"), ("jsonl.zst", "zstandard")):
        assert f"needs the package {package}: pip install {package}" in refusal(paths[name], on_bad="skip")


def test_a_full_disk_or_a_folder_that_cannot_be_written_is_no_bad_record(tmp_path, monkeypatch):
    path = write(tmp_path, "d.jsonl.gz", [{"text": "x"}])
    (tmp_path / "file").write_text("")
    assert "no temporary copy" in refusal(path, on_bad="skip", folder=str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: open("/dev/full", "wb"))  # noqa: SIM115
    message = refusal(path, on_bad="skip")
    assert "No space left on device" in message and "data.cache or the environment variable TMPDIR" in message


@pytest.mark.parametrize(
    "name, kind, parts",
    [
        ("d.xz", "text", ["cannot read .xz files", "plain text, JSON lines, Parquet, Arrow or token arrays"]),
        ("d.tar.gz", "text", ["cannot read .tar.gz files"]),
        ("d.parquet.gz", "text", ["cannot read .parquet.gz files"]),
        (
            "d.txt",
            "chat",
            ['data.kind = "chat" is read from JSON lines (.jsonl), Parquet or Arrow files; got ', "d.txt"],
        ),
        ("d.npy", "text", ['data.kind = "text" is read from', "d.npy"]),
    ],
)
def test_a_file_that_cannot_hold_such_records_is_refused_by_name(tmp_path, name, kind, parts):
    (tmp_path / name).write_bytes(b"x")
    assert all(part in refusal(str(tmp_path / name), kind=kind) for part in parts)


def test_one_name_in_two_formats_is_refused_unless_one_is_left_out_or_both_are_named(tmp_path):
    a, b = (write(tmp_path, name, [{"text": name}]) for name in ("d.jsonl", "d.jsonl.gz"))
    assert "one name in two formats" in refusal(str(tmp_path)) and "one name" in refusal(str(tmp_path / "d.*"))
    assert read(str(tmp_path), exclude=["*.gz"]) == ["d.jsonl"] and read([a, b]) == ["d.jsonl", "d.jsonl.gz"]
    write(tmp_path, "d.parquet", [{"text": "x"}])
    assert "one name in two formats" in refusal(str(tmp_path), exclude=["*.gz"])


def test_a_folder_gives_the_files_that_can_hold_the_kind(tmp_path):
    write(tmp_path, "a.jsonl", [GOOD])
    write(tmp_path, "b.parquet", [GOOD])
    for name in ("README.md", "c.npy", "d.png"):
        (tmp_path / name).write_text("x")
    documents = Documents(str(tmp_path), kind="chat")
    assert len(documents) == 2 and "3 files of other kinds" in documents.summary()


# --------------------------------------------------------------------------------------------------------- by number


def test_sources_are_the_ranges_of_the_patterns_and_stay_right_in_a_split(tmp_path):
    for folder, count in (("a", 40), ("b", 60)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "1.jsonl.gz", [{"text": f"{folder}{n}"} for n in range(count // 2)])
        write(tmp_path / folder, "2.parquet", [{"text": f"{folder}{n}"} for n in range(count // 2, count)])
    patterns = [str(tmp_path / "b"), str(tmp_path / "a" / "*"), str(tmp_path / "b" / "1*")]
    data = DataConfig(path=patterns)
    whole = open_documents(data)[0]
    assert whole.sources == [(patterns[0], 0, 60), (patterns[1], 60, 40), (patterns[2], 100, 0)]
    training, held = open_documents(data, EvaluationConfig(holdout=0.3))
    texts = []
    for part in (training, held):
        assert [name for name, _, _ in part.sources] == patterns
        assert sum(count for _, _, count in part.sources) == len(part)
        for (_, first, count), letter in zip(part.sources, "ba?", strict=True):
            assert all(part[n].startswith(letter) for n in range(first, first + count))
        texts += [part[n] for n in range(len(part))]
        assert part.where(len(part) - 1).startswith(str(tmp_path / "a" / "2.parquet") + ", row ")
    assert sorted(texts) == sorted(whole[n] for n in range(100)) and 0 < len(held) < 60


def as_given(records):
    return [record for record, _ in records]


def in_a_worker(documents):
    """All records, read by a new process."""
    workers = Workers(Rendering(documents, as_given), 1)
    try:
        return workers.rendered(range(len(documents)))
    finally:
        workers.close()


def test_a_child_process_reads_the_same_documents(tmp_path):
    path = [
        write(tmp_path, name, [{"text": f"{name} {n}"} for n in range(9)])
        for name in ("a.jsonl.zst", "b.parquet", "c.jsonl")
    ]
    documents = Documents(path)
    assert in_a_worker(documents) == [documents[n] for n in range(27)]
    spool = documents._copies.spool
    pickled = pickle.dumps(spool)
    with open(path[2]) as other:
        os.dup2(other.fileno(), spool.descriptor)
    with pytest.raises(OSError, match="is not the temporary file of .* it was not inherited"):
        pickle.loads(pickled)


def test_the_fingerprint_tells_the_used_content_the_kind_and_the_fields(tmp_path):
    rows = [{"text": "a", "b": "x"}, {"text": "c", "b": "y"}]
    prints = {Documents(write(tmp_path, "d.parquet", rows)).fingerprint}
    assert prints == {Documents(write(tmp_path, "d.parquet", [{**row, "more": 1} for row in rows])).fingerprint}
    prints.add(Documents(str(tmp_path / "d.parquet"), text_field="b").fingerprint)
    prints.add(
        Documents(str(tmp_path / "d.parquet"), kind="prompt", prompt_field="text", completion_field="b").fingerprint
    )
    prints.add(Documents(write(tmp_path, "d.parquet", [{"text": "ac"}, {"text": "c"}])).fingerprint)
    prints.add(Documents(write(tmp_path, "d.parquet", [{"text": "a"}, {"text": "cc"}])).fingerprint)
    assert len(prints) == 5


# ------------------------------------------------------------------------------------------------------- the catalogue

BAD_ROWS = [
    {"text": "a"},
    {"text": ""},
    {"text": "b \ud83d c"},
    {"text": "d", "labels": 1},
    {"other": 5},
    {"text": "e"},
] * 4


def catalogued(path, folder, **options):
    return Documents(path, folder=str(folder), catalogue=True, **options)


def everything(documents):
    numbers = range(len(documents))
    known = documents.fingerprint, documents.content, documents.sources, documents.largest_token, documents.summary()
    return known, [documents.where(n) for n in numbers], [documents.size[n] for n in numbers]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_catalogue_gives_is_what_reading_gives_and_copies_are_made_when_wanted(tmp_path, name, monkeypatch):
    rows = BAD_ROWS if "jsonl" in name else [row for row in BAD_ROWS if "\ud83d" not in row.get("text", "")]
    path, cache = write(tmp_path, f"d.{name}", rows), tmp_path / "cache"
    want = Documents(path, on_bad="skip")
    assert "skipped" in want.summary() and everything(catalogued(path, cache, on_bad="skip")) == everything(want)
    assert [found.name[:10] for found in cache.iterdir()] == ["documents-"]
    with monkeypatch.context() as patch:
        patch.setattr("jaxllm.data.sources.open_stream", None)
        patch.setattr("jaxllm.data.sources.table_rows", None)
        documents = catalogued(path, cache, on_bad="skip")
        assert everything(documents) == everything(want)
    part, rest = documents.split(0.5)
    assert part._copies is rest._copies, "copies are made once for both"
    assert [documents[n] for n in range(len(want))] == [want[n] for n in range(len(want))]
    again = catalogued(path, cache, on_bad="skip")
    assert in_a_worker(again) == [want[n] for n in range(len(again))]


def test_a_catalogue_keeps_what_is_told_of_token_ids_their_arrays_and_replaced_bytes(tmp_path):
    (tmp_path / "d").mkdir()
    np.save(tmp_path / "d" / "a.npy", np.array([5, 6, 2, 7, 70000, 2], np.int32))
    (tmp_path / "d" / "a.npy.json").write_text('{"document_end": 2}')
    write(tmp_path / "d", "b.jsonl.gz", [{"input_ids": [1, 9], "labels": [1, 9]}])
    want = Documents(str(tmp_path / "d"), kind="tokens")
    for _ in range(2):
        got = catalogued(str(tmp_path / "d"), tmp_path / "cache", kind="tokens")
        assert everything(got) == everything(want)
        assert [got[n].tolist() for n in range(3)] == [[5, 6, 2], [7, 70000, 2], [1, 9]] and got[0].dtype == np.int32
    (tmp_path / "d" / "a.npy.json").write_text('{"document_end": 7}')
    assert catalogued(str(tmp_path / "d"), tmp_path / "cache", kind="tokens")[0].tolist() == [5, 6, 2, 7]
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    for _ in range(2):
        text = catalogued(str(tmp_path / "c.txt"), tmp_path / "cache", on_bad="replace")
        assert "replaced by U+FFFD in 1 record" in text.summary() and text[0] == "caf\ufffd"


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_a_file_changed_under_the_same_size_and_date_is_read_anew(tmp_path, name, monkeypatch):
    monkeypatch.setattr(gzip, "compress", gzip_stored)
    path, cache = write(tmp_path, name, [{"text": "one"}]), tmp_path / "cache"
    old, before = catalogued(path, cache), os.stat(path)
    write(tmp_path, name, [{"text": "two"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    new = catalogued(path, cache)
    assert new[0] == "two" and new.fingerprint != old.fingerprint
    assert catalogued(path, cache, text_field="text", on_bad="skip")[0] == "two" and len(list(cache.iterdir())) == 3


def gzip_stored(raw):
    packer = zlib.compressobj(0, wbits=31)
    return packer.compress(raw) + packer.flush()


def test_a_damaged_catalogue_is_made_again_and_a_changed_file_is_told(tmp_path):
    path, cache = write(tmp_path, "d.jsonl.gz", [{"text": "one"}]), tmp_path / "cache"
    want = everything(catalogued(path, cache))
    (found,) = cache.iterdir()
    whole = found.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], bytes([*whole[:80], whole[80] ^ 255, *whole[81:]])):
        found.write_bytes(damaged)
        assert everything(catalogued(path, cache)) == want and catalogued(path, cache)[0] == "one"
        assert list(cache.iterdir()) == [found]
    documents = catalogued(path, cache)
    write(tmp_path, "d.jsonl.gz", [{"text": "two"}])
    with pytest.raises(UserError, match=r"data\.path: the documents have changed since the run began"):
        documents[0]


def test_another_reader_makes_another_catalogue(tmp_path, monkeypatch):
    path, cache = write(tmp_path, "d.jsonl", [{"text": "one"}]), tmp_path / "cache"
    catalogued(path, cache)
    (tmp_path / "formats.py").write_text("# other rules")
    monkeypatch.setattr(formats, "__file__", str(tmp_path / "formats.py"))
    catalogued(path, cache)
    assert len(list(cache.iterdir())) == 2


def test_files_that_change_while_they_are_read_leave_no_catalogue_and_unreadable_ones_neither(tmp_path, monkeypatch):
    path, cache = write(tmp_path, "d.jsonl", [{"text": "one"}]), tmp_path / "cache"
    read = Documents._read
    with monkeypatch.context() as patch:
        patch.setattr(Documents, "_read", lambda self: (write(tmp_path, "d.jsonl", [{"text": "two"}]), read(self)))
        with pytest.raises(UserError, match="has changed since the run began"):
            catalogued(path, cache)[0]
    assert not cache.exists()
    os.symlink("nowhere", tmp_path / "e.jsonl")
    documents = catalogued(str(tmp_path / "*.jsonl"), cache, on_bad="skip")
    assert len(documents) == 1 and "1 skipped" in documents.summary() and not cache.exists()
    (tmp_path / "file").write_text("")
    assert catalogued(path, tmp_path / "file")[0] == "two", "where none can be left, none is"


@pytest.mark.parametrize("name", ["big.txt", "big.txt.gz", "d.jsonl", "d.jsonl.zst"])
def test_a_document_too_large_to_hold_is_refused_with_its_size_and_the_way_out(tmp_path, name, monkeypatch):
    monkeypatch.setattr("jaxllm.data.sources.LARGEST", 100)
    monkeypatch.setattr("jaxllm.data.sources.BLOCK", 16)
    lines = [json.dumps({"text": text}) for text in ("a" * 87, "b" * 88, "c" * 300, "last")]
    for most in (100, 101):
        raw = "\n".join(lines).encode() if ".jsonl" in name else b"x" * most
        pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rsplit(".")[-1], bytes)
        (tmp_path / name).write_bytes(pack(raw))
        path = str(tmp_path / name)
        if ".jsonl" in name:
            reason = f"{path}:2: a line of 101 bytes, more than the 100 that one document may have"
        elif most == 100:
            assert read(path) == ["x" * 100]
            continue
        else:
            reason = f"{path}: a text of 101 bytes, more than the 100"
        message = refusal(path)
        assert message.startswith(f"data.path: {reason}") and "into several files, or into JSON lines" in message
    if ".jsonl" in name:
        documents = Documents(path, on_bad="skip")
        assert [documents[n] for n in range(2)] == ["a" * 87, "last"] and len(documents) == 2
        assert "2 skipped" in documents.summary() and documents.where(1) == f"{path}:4"


MEMORY = """
import resource, sys
from jaxllm.data.sources import Documents
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
documents = Documents(sys.argv[1])
assert [len(documents[n]) for n in range(len(documents))] == [50_000_000, 4]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)
"""


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "d.parquet"])
def test_a_line_of_50_mb_is_read_in_bounded_memory(tmp_path, name):
    path = write(tmp_path, name, [{"text": "word " * 10_000_000}, {"text": "tail"}])
    done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 450, "MB, nine times the line"

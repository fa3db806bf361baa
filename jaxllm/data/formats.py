"""Files to records: how bytes are read, by the ending of a file's name, and what a record of each kind must look like.

Three shapes of files: lines or whole texts (also .gz and .zst), tables (Parquet and Arrow, as a file or as a stream;
only the columns that are used are read, a few megabytes at a time), and arrays of token ids (.npy, and .bin with a
description beside it). What looks the same here is the same afterwards: a row gives the same record from every format.
A field of a struct that is null counts as absent, because a column's type has every field that any of its rows has.

Nothing is converted in silence: a number, a date or a boolean where text is wanted is an error, never its spelling.
Archives (.zip, .tar), single JSON arrays and other compressors are not read.
"""

import collections
import dataclasses
import importlib
import io
import json
import os
import re
import tempfile
import zlib

import numpy as np

from jaxllm.section import UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")
TEXT = (".txt", ".text", ".md", ".rst", ".py")
TABLES = (".parquet", ".arrow", ".feather", ".ipc")
ARRAYS = (".npy", ".bin")
COMPRESSED = (".gz", ".zst")
SHEETS = (".csv", ".tsv")
UNREADABLE = (".zip", ".bz2", ".xz", ".tar", ".tgz", ".npz", ".pkl", ".pt", *SHEETS)
READS = {  # the shapes of files that can hold records of a kind
    "text": ("lines", "text", "table"),
    "chat": ("lines", "table"),
    "prompt": ("lines", "table"),
    "tokens": ("lines", "table", "array"),
}
TOKEN_FIELDS = ("tokens", "input_ids")
MASKS = {  # of token ids: what such a field may say without changing what is trained
    "attention_mask": "1 at every place",
    "loss_mask": "1 at every place",
    "labels": "the ids themselves",
}
SWITCHES = ("weight", "train", "training")  # of a message: whether it is trained
BLOCK = 1 << 24  # bytes of a table or an array that are held at once, unless one record is larger
SURROGATE = re.compile("[\ud800-\udfff]")


class Bad(Exception):
    """A record or file that cannot be read; the text says why, without the place."""


def shape_of(path):
    """(shape: "lines", "text", "table", "array" or None if it cannot be read, ending, compression: "", ".gz" or
    ".zst") of a file, by its name alone. A name without a known ending is a text."""
    stem, ending = os.path.splitext(path.lower())
    compression = ending if ending in COMPRESSED else ""
    if compression:
        ending = os.path.splitext(stem)[1]
    if ending in UNREADABLE or (compression and ending in TABLES + ARRAYS):
        return None, ending + compression, compression
    shapes = {"lines": JSON_LINES, "table": TABLES, "array": ARRAYS}
    return next((shape for shape, endings in shapes.items() if ending in endings), "text"), ending, compression


def begins_with_object(path):
    """Whether the first line of a text file that has anything on it is a JSON object; of a line longer than 1 MiB,
    whether it begins like one. False for a file that cannot be read: its reader says why."""
    try:
        with open_stream(path) as stream:
            line = b"\n"
            while line and not line.strip():
                line = stream.readline(1 << 20).removeprefix(b"\xef\xbb\xbf")
    except (OSError, Bad):
        return False
    line = line.strip()
    if len(line) > (1 << 20) - 4:
        return re.match(rb'\{\s*"[^"]*"\s*:', line) is not None
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class _Twins(dict):
    """A JSON object in which keys stood twice. twins: set of these."""


def _object(pairs):
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    found = _Twins(found)
    found.twins = {name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1}
    return found


parse_json = json.JSONDecoder(object_pairs_hook=_object).decode
"""json.loads, with objects that `_refuse_twins` knows again if a key stands twice in them: parsers differ on which value it has
(RFC 8259, section 4)."""


def _refuse_twins(value, used=None):
    """Raises Bad when a key stands twice in an object that parse_json made: one of `used`, or, anywhere in it, any."""
    twins = getattr(value, "twins", set())
    if twins := sorted(twins if used is None else twins.intersection(used)):
        raise Bad(f"the key {twins[0]!r} stands twice in one object, and which of the two counts is not agreed on")
    for part in (value.values() if isinstance(value, dict) else value) if used is None else ():
        if isinstance(part, dict | list):
            _refuse_twins(part)


def _library(name, path, package=None):
    try:
        return importlib.import_module(name)
    except ImportError:
        package = package or name
        raise UserError(f"{path}: reading it needs the package {package}: pip install {package}") from None


# --------------------------------------------------------------------------------------------------------------- lines


def open_stream(path):
    """The file's content as a buffered binary stream, decompressed if its name says so. A file that is cut off or
    damaged raises Bad at that place, after all that comes before it has been read."""
    compression = shape_of(path)[2]
    if not compression:
        return open(path, "rb")
    if compression == ".gz":
        new, errors = (lambda: zlib.decompressobj(wbits=31)), zlib.error
    else:
        zstandard = _library("zstandard", path)
        new, errors = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, zstandard.ZstdError
    return io.BufferedReader(_Chunks(_decompressed(path, new, errors)), 1 << 18)


def _decompressed(path, new, errors):
    """Chunks of content; a file may be several compressed streams one after another, those of gzip with zeros behind them.
    Small reads bound what one call can expand to."""
    lines = size = 0
    decoder, ended, padded = None, False, shape_of(path)[2] == ".gz"
    with open(path, "rb") as file:
        while raw := file.read(1 << 14):
            while raw:
                if padded and ended and decoder is None and not (raw := raw.lstrip(b"\0")):
                    break
                decoder = decoder or new()
                try:
                    chunk = decoder.decompress(raw)
                except errors as error:
                    raise Bad(f"is damaged after {lines:,} lines ({size:,} bytes) of its content: {error}") from None
                lines, size = lines + chunk.count(b"\n"), size + len(chunk)
                yield chunk
                raw = decoder.unused_data
                if decoder.eof:
                    decoder, ended = None, True
    if decoder is not None:
        raise Bad(f"is cut off: it can be read up to line {lines:,} ({size:,} bytes) of its content")


class _Chunks(io.RawIOBase):
    """An iterator of bytes as a stream."""

    def __init__(self, chunks):
        self.chunks, self.left = chunks, memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not len(self.left):
            chunk = next(self.chunks, None)
            if chunk is None:
                return 0
            self.left = memoryview(chunk)
        size = min(len(buffer), len(self.left))
        buffer[:size], self.left = self.left[:size], self.left[size:]
        return size

    def close(self):
        self.chunks.close()
        super().close()


# -------------------------------------------------------------------------------------------------------------- tables


def table_rows(path, choose):
    """Yields (row from 1, {column: value}) of a Parquet or Arrow file. choose: list of the file's columns -> list of
    those to read; may raise Bad. A string that is not UTF-8 is given as its UnicodeDecodeError, a list of whole numbers
    as a numpy array."""
    pa = _library("pyarrow", path)
    batches = _parquet_batches if shape_of(path)[1] == ".parquet" else _arrow_batches
    row = 0
    try:
        for batch in batches(path, choose):
            columns = {name: _values(pa.types, column) for name, column in zip(batch.schema.names, batch.columns)}
            for values in zip(*columns.values(), strict=True):
                row += 1
                yield row, dict(zip(columns, values, strict=True))
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        reason = str(error).split("\n")[0]
        raise Bad(f"is damaged, cut off or no such file; it can be read up to row {row:,}: {reason}") from None


def _parquet_batches(path, choose):
    parquet = _library("pyarrow.parquet", path, "pyarrow")
    # Column chunks are streamed: a row group may be larger than the memory.
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        columns = choose(file.schema_arrow.names)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            parts = [group.column(index) for index in range(group.num_columns)]
            size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
            for batch in file.iter_batches(_rows_of(size, group.num_rows), row_groups=[number], columns=columns):
                yield batch.select(columns)


def _arrow_batches(path, choose):
    ipc = _library("pyarrow.ipc", path, "pyarrow")
    pa = _library("pyarrow", path)
    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(max(os.path.getsize(path) - 8, 0))
        if not is_file and file.read(8) != b"\xff\xff\xff\xff\0\0\0\0":
            raise Bad("has no end mark of an Arrow stream: it is cut off, still being written, or no Arrow file")
    reader = ipc.open_file if is_file else ipc.open_stream
    with pa.memory_map(path) as source, reader(source) as file:
        names = file.schema.names
        columns = choose(names)
    # Mapped, not read: a batch may be the whole file. Its pages count as memory in use, but the system takes them back.
    options = ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
    with pa.memory_map(path) as source, reader(source, options=options) as file:
        for batch in (file.get_batch(n) for n in range(file.num_record_batches)) if is_file else file:
            rows = _rows_of(batch.nbytes, batch.num_rows)
            for first in range(0, batch.num_rows, rows):
                yield batch.slice(first, rows)


def _rows_of(size, rows):
    """Rows to take at once out of `rows` that make `size` bytes."""
    return max(1, min(4096, rows * BLOCK // max(size, 1)))


def _values(types, column):
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_list = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    if is_list and types.is_integer(column.type.value_type):
        lists = (scalar.values for scalar in column)
        return [v if v is None else v.to_pylist() if v.null_count else v.to_numpy() for v in lists]
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(scalar) for scalar in column]
    return values if types.is_string(column.type) else [_without_nulls(value) for value in values]


def _value(scalar):
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _without_nulls(value):
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


# -------------------------------------------------------------------------------------------------------- token arrays


@dataclasses.dataclass(frozen=True)
class TokenArray:
    """Where the ids of a .npy or .bin file lie: their dtype, the byte at which they begin, their number, the length of
    a row (None: not in rows) and the id that ends every document (None: the file is one document)."""

    dtype: np.dtype
    begin: int
    count: int
    row: int | None
    document_end: int | None


def token_array(path):
    """The TokenArray of a file. A .bin file is raw numbers, so FILE.bin.json must say {"dtype": "uint16",
    "document_end": 2}, where document_end is null if the file is one document; beside a one-dimensional .npy such a file
    may give document_end alone."""
    beside, described = path + ".json", {}
    is_raw = shape_of(path)[1] == ".bin"
    if os.path.exists(beside):
        with open(beside, "rb") as file:
            try:
                described = json.loads(file.read())
            except ValueError as error:
                raise Bad(f"{beside} is no JSON: {error}") from None
    wanted = {"dtype", "document_end"} if is_raw else {"document_end"}
    if not isinstance(described, dict) or (set(described) != wanted and (is_raw or described)):
        example = '{"dtype": "uint16", "document_end": 2}' if is_raw else '{"document_end": 2}'
        raise Bad(
            f"{beside} must hold an object like {example}: the type of the numbers and the id that ends each document, "
            "null if the file is one document"
        )
    end = described.get("document_end")
    if end is not None and type(end) is not int:
        raise Bad(f"{beside}: document_end is {kind_of(end)}, a token id or null is wanted")
    if is_raw:
        if described["dtype"] not in ("uint8", "uint16", "uint32", "int32", "int64"):
            raise Bad(f'{beside}: dtype is {described["dtype"]!r}, "uint16", "uint32", "int32" or "int64" is wanted')
        dtype, begin, size = np.dtype(described["dtype"]).newbyteorder("<"), 0, os.path.getsize(path)
        if size % dtype.itemsize:
            raise Bad(f"is cut off, or of another dtype: {size:,} bytes are no whole number of {dtype.name}")
        return TokenArray(dtype, begin, size // dtype.itemsize, None, end)
    try:
        ids = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise Bad(f"is cut off or no array of numbers: {error}") from None
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or not ids.flags.c_contiguous:
        raise Bad(
            f"holds {ids.dtype} of shape {ids.shape}, whole numbers in one or two dimensions (C order) are wanted"
        )
    if end is not None and ids.ndim == 2:
        raise Bad(f"{beside} gives a document_end, but each row of a two-dimensional array is a document")
    return TokenArray(ids.dtype, ids.offset, ids.size, ids.shape[1] if ids.ndim == 2 else None, end)


# ------------------------------------------------------------------------------------------------------------- records


class Records:
    """What a record of one kind must look like, and how records that cannot be read again in their file are kept.

    kind "text": str; "chat": {"messages": [{"role", "content", ...}, ...]} with "tools" if there are any, where only the
    content beside "tool_calls" may be null; a message's "weight" (0 or 1), "train" or "training" (true or false) becomes
    "weight", 0 or 1, which says whether it is trained; "prompt": {"prompt": str, "completion": str}; "tokens": int32[n]. fields:
    {setting: name of the field that it chooses}.
    """

    def __init__(self, kind, fields, on_bad):
        self.kind, self.fields, self.on_bad = kind, fields, on_bad
        self.replaced = self.surrogates = 0  # records in which something was replaced

    def columns(self, names):
        """The fields to read out of those that a record or table has; raises Bad if one is missing."""
        if self.kind == "tokens":
            chosen = [name for name in TOKEN_FIELDS if name in names]
            if len(chosen) != 1:
                found = "both are there" if chosen else "neither is there"
                raise Bad(f"one field of token ids is wanted, 'tokens' or 'input_ids'; {found} ({_listed(names)})")
            chosen += [name for name in MASKS if name in names]
        else:
            chosen = [self._present(setting, names) for setting in self.fields]
            if self.kind == "chat" and "tools" in names:
                chosen.append("tools")
        if twice := [name for name in chosen if list(names).count(name) > 1]:
            raise Bad(f"there are several columns {twice[0]!r}")
        return chosen

    def record(self, row, counting=False):
        """The record of an object or row, None if it is empty; raises Bad. counting: add what is replaced to the
        counts."""
        try:
            return self._record(row, counting)
        except RecursionError:  # what its parser takes may be too deep for Python's own functions
            raise Bad("is nested too deeply") from None

    def _record(self, row, counting):
        columns = self.columns(row)
        _refuse_twins(row, columns)
        if self.kind == "tokens":
            ids = self._tokens(columns[0], row[columns[0]])
            for name in columns[1:]:
                _check_mask(name, row[name], ids)
            return ids
        if self.kind == "chat":
            record = self._chat(row, columns[0])
        else:
            texts = [self._text(setting, row[name], counting) for setting, name in self.fields.items()]
            record = texts[0] if self.kind == "text" else dict(zip(("prompt", "completion"), texts, strict=True))
            if not texts[-1]:
                return None
        mended = _mend(record)
        if counting and mended != record:
            self.surrogates += 1
        return mended

    def decoded(self, raw, offset=0, counting=False):
        """Bytes that begin at `offset` of a file as text, by the rule of data.on_bad."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if self.on_bad != "replace":
                raise Bad(
                    f"not UTF-8 at byte {offset + error.start} of the file (0x{raw[error.start]:02x}); "
                    'data.on_bad = "replace" reads such bytes as U+FFFD'
                ) from None
        self.replaced += counting
        return raw.decode(errors="replace")

    def to_bytes(self, record):
        if self.kind == "tokens":
            return record.tobytes()
        try:
            text = record if self.kind == "text" else json.dumps(record, ensure_ascii=False)
        except TypeError as error:  # a date among a message's own fields
            raise Bad(f"a message holds what JSON cannot: {error}") from None
        return text.encode()

    def from_bytes(self, raw):
        if self.kind == "tokens":
            return np.frombuffer(raw, np.int32)
        return raw.decode() if self.kind == "text" else json.loads(raw)

    def _present(self, setting, names):
        name = self.fields[setting]
        if name not in names:
            raise Bad(f"no field {name!r} ({_listed(names)}); data.{setting} chooses it")
        return name

    def _text(self, setting, value, counting):
        if isinstance(value, UnicodeDecodeError):
            if self.on_bad != "replace":
                raise Bad(
                    f"field {self.fields[setting]!r} is not UTF-8 at its byte {value.start} "
                    f'(0x{value.object[value.start]:02x}); data.on_bad = "replace" reads such bytes as U+FFFD'
                )
            self.replaced += counting
            return value.object.decode(errors="replace")
        if not isinstance(value, str):
            raise Bad(
                f"field {self.fields[setting]!r} is {kind_of(value)}, a string is wanted; "
                f"data.{setting} chooses the field"
            )
        return value

    def _chat(self, row, name):
        messages = row[name]
        if not isinstance(messages, list | np.ndarray):
            raise Bad(
                f"field {name!r} is {kind_of(messages)}, a list of messages is wanted; "
                "data.messages_field chooses the field"
            )
        _refuse_twins(messages)
        record = {"messages": [_message(message, f"message {n} of {name!r}") for n, message in enumerate(messages, 1)]}
        tools = row.get("tools")
        if isinstance(tools, str):  # a table's column has one type, but every tool its own parameters
            try:
                tools = parse_json(tools)
            except ValueError as error:
                raise Bad(f"field 'tools' is a string, but no JSON: {error}") from None
        if tools:
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise Bad(f"field 'tools' is {kind_of(tools)}, a list of objects is wanted")
            _refuse_twins(tools)
            record["tools"] = tools
        return record if record["messages"] else None

    def _tokens(self, name, value):
        if isinstance(value, np.ndarray):
            ids = value
        else:
            if not isinstance(value, list):
                raise Bad(f"field {name!r} is {kind_of(value)}, a list of token ids is wanted")
            if set(map(type, value)) - {int}:
                place = next(place for place, token in enumerate(value) if type(token) is not int)
                raise Bad(
                    f"place {place} of field {name!r} is {kind_of(value[place])} ({value[place]!r}), a token id is wanted"
                )
            ids = np.array(value) if value else np.zeros(0, np.int32)
        if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
            place = next(place for place, token in enumerate(ids.tolist()) if not 0 <= token < 2**31)
            raise Bad(f"place {place} of field {name!r} is {ids[place]}, no token id")
        return ids.astype(np.int32) if ids.size else None


def _message(message, where):
    if not isinstance(message, dict):
        raise Bad(f"{where} is {kind_of(message)}, an object with 'role' and 'content' is wanted")
    message = {name: value for name, value in message.items() if value is not None}
    role, content = message.pop("role", None), message.pop("content", None)
    for name, value in (("role", role), ("content", content)):
        if not isinstance(value, str) and not (name == "content" and value is None and message.get("tool_calls")):
            known = ["role"] * (role is not None) + ["content"] * (content is not None) + list(message)
            raise Bad(f"{where}: {name!r} is {kind_of(value)}, a string is wanted ({_listed(known)})")
    switches = {name: message.pop(name) for name in SWITCHES if name in message}
    for name, value in switches.items():
        if type(value) not in (bool, int, float) or value not in (0, 1):
            wanted = "0 or 1" if name == "weight" else "true or false"
            raise Bad(f"{where}: {name!r} says whether the message is trained, {wanted} is wanted, got {value!r}")
    if len(set(switches.values())) > 1:
        raise Bad(f"{where}: {' and '.join(map(repr, switches))} contradict each other")
    weight = {"weight": int(next(iter(switches.values())))} if switches else {}
    return {"role": role, "content": content, **message, **weight}


def _check_mask(name, values, ids):
    """Raises Bad when a field beside token ids asks for something else than to train on all of them."""
    if values is None:
        return
    wanted = (ids if name == "labels" else np.ones(len(ids), np.int8)) if ids is not None else np.zeros(0)
    # numpy makes no array of a list that holds lists of different lengths
    same = np.array_equal(values, wanted) if isinstance(values, np.ndarray) else values == wanted.tolist()
    if not same:
        raise Bad(
            f'field {name!r} is not {MASKS[name]}, but with data.kind = "tokens" every id is trained and seen; cut padding '
            "off, and take the field away where all that is left is to be trained"
        )


def _listed(names):
    return "fields here: " + (", ".join(sorted(names)) or "none")


def _mend(value):
    """Half surrogate pairs, legal in JSON, are no characters, and no tokenizer takes them."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value) if SURROGATE.search(value) else value
    if isinstance(value, dict):
        return {_mend(name): _mend(part) for name, part in value.items()}
    return [_mend(part) for part in value] if isinstance(value, list) else value


def kind_of(value):
    """What a value is, in a user's words."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object",
        np.ndarray: "a list", UnicodeDecodeError: "not UTF-8",
    }  # fmt: skip
    return names.get(type(value)) or f"of type {type(value).__name__}"


class Spool:
    """Records kept in an unlinked temporary file, for random access to what has none. It takes the disk space of the
    records until the process ends, however it ends; a child process that inherits `descriptor` and gets the object reads
    the same file."""

    def __init__(self, folder=None):
        self.folder = folder or tempfile.gettempdir()
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise self._full(error) from None
        self.end = 0

    def write(self, raw):
        """Appends bytes; returns where they begin."""
        try:
            self.file.write(raw)
        except OSError as error:
            raise self._full(error) from None
        self.end += len(raw)
        return self.end - len(raw)

    def flush(self):
        try:
            self.file.flush()
        except OSError as error:
            raise self._full(error) from None

    def read(self, offset, size):
        raw = os.pread(self.file.fileno(), size, offset)
        if len(raw) != size:
            raise OSError(f"a temporary file of {self.folder} ends at byte {offset + len(raw)}")
        return raw

    def _full(self, error):
        return UserError(
            f"data.path: no temporary copy of compressed files and tables can be written to {self.folder}: "
            f"{error.strerror}; data.cache or the environment variable TMPDIR chooses another folder"
        )

    @property
    def descriptor(self):
        """What a process must inherit (subprocess.Popen's pass_fds) to get this object by pickle."""
        return self.file.fileno()

    def __reduce__(self):
        found = os.fstat(self.descriptor)
        return Spool._inherited, (self.folder, self.descriptor, (found.st_dev, found.st_ino), self.end)

    @classmethod
    def _inherited(cls, folder, descriptor, identity, end):
        spool = object.__new__(cls)
        spool.folder, spool.file, spool.end = folder, os.fdopen(os.dup(descriptor), "rb"), end
        found = os.fstat(spool.descriptor)
        if (found.st_dev, found.st_ino) != identity:
            raise OSError(f"descriptor {descriptor} is not the temporary file of {folder}; it was not inherited")
        return spool

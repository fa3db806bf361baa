"""Files to documents: what a path names, which records it holds, and each record by number.

One pass over the files at the start reads every record once. It finds what is wrong while a stop still costs nothing,
notes where each record lies, and takes a fingerprint of the content; records are then read again one by one, so memory
holds 28 bytes per document and no text. The price is that the files are read once before the first step, on every
process.

Compressed files and tables have no quick way to one record. Theirs are copied by that pass into a temporary file
without a name, which needs the disk space of the records (of a table: of the columns that are used) once per process,
in data.cache or else in TMPDIR, and is gone when the process ends. Text, JSON lines and token arrays are read in place,
and a file that is written to after the start ends the run when it is next read: a record of it might be another one, or
a part of one, and still look whole.

With data.cache the pass leaves a catalogue there: what it found in these very files. A later run reads their bytes, for
nothing less tells that they are the same (a date or a size does not), but neither unpacks nor parses nor copies them; if
records are wanted after all, which a token cache does not, the copy is made then.

A text or a line is held in memory as a whole, with several times its size while it becomes tokens, so one of more than
LARGEST bytes is refused. It is not cut: where a text may be cut without changing its tokens depends on the tokenizer,
and one document is nothing to shuffle or to share out over rows in any case.

Everything is UTF-8. An encoding declared inside a Python file is not honoured: two rules for one byte would depend on a
file's name. Texts are taken as they are, line ends and Unicode forms included; only a byte order mark at the very
beginning of a file is dropped.
"""

import array
import collections
import contextlib
import copy
import dataclasses
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import pathlib
import sysconfig
import threading
import zipfile

import numpy as np

from jaxllm.data import formats
from jaxllm.data.formats import (
    BLOCK,
    COMPRESSED,
    READS,
    SHEETS,
    TEXT,
    Bad,
    Records,
    Spool,
    begins_with_object,
    kind_of,
    open_stream,
    parse_json,
    shape_of,
    table_rows,
    token_array,
)
from jaxllm.data.workshop import workshop
from jaxllm.section import UserError

BOM = b"\xef\xbb\xbf"
LARGEST = 1 << 30  # bytes of a text file or of a line
COLUMNS = {"file": np.int32, "offset": np.int64, "size": np.int64, "line": np.int64}  # line: from 1; 0 = the whole file
SIDECARS = (".npy.json", ".bin.json")  # describe the array beside them


@dataclasses.dataclass(frozen=True)
class File:
    """A file to read: its path, its name relative to the fixed part of the pattern that found it, which does not depend
    on the machine, and the number of that pattern."""

    path: str
    relative: str
    source: int


def find_files(patterns, exclude=(), key="data.path", kind="text"):
    """The files that `patterns` (see DataConfig.path) name, in the order in which they are read.

    Returns (files: list[File], ignored: Counter of what was passed over). Raises UserError, naming `key`, for a pattern
    without a file, for a file that cannot hold records of `kind` (see DataConfig.kind), and for a pattern that finds
    the same name in two formats.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise UserError(f"{key}: is not set; name files, folders or globs")
    files, seen, ignored = [], set(), collections.Counter()
    for source, pattern in enumerate(patterns):
        base, found = _expand(pattern, ignored, kind)
        chosen = []
        for path in found:
            relative = path[len(base) :].lstrip(os.sep).replace(os.sep, "/")
            if any(fnmatch.fnmatchcase(relative, glob_) for glob_ in exclude):
                ignored["files excluded"] += 1
            else:
                chosen.append(File(path, relative, source))
        if not chosen:
            reason = f"all {len(found)} files that match are excluded by data.exclude" if found else "matches 0 files"
            raise UserError(f"{key}: {pattern!r} {reason} (working directory {os.getcwd()})")
        chosen.sort(key=lambda file: file.relative)
        _check(chosen, key, kind)
        for file in chosen:
            real = os.path.realpath(file.path)
            if real in seen:
                ignored["files reached twice"] += 1
            else:
                seen.add(real)
                files.append(file)
    return files, ignored


def _check(files, key, kind):
    """Refuses files that cannot be read as `kind`, and one that seems to be another one in another format: it would be
    trained on twice."""
    names = {}
    for file in files:
        shape, ending, compression = shape_of(file.path)
        if shape is None:
            raise UserError(
                f"{key}: cannot read {ending} files, got {file.path}; give plain text, JSON lines, Parquet, Arrow or token arrays"
                + (", or name it .txt if its rows are to be trained as they are spelled" if ending in SHEETS else "")
            )
        if shape not in READS[kind]:
            what = {
                "lines": "JSON lines (.jsonl)",
                "text": "plain text",
                "table": "Parquet or Arrow files",
                "array": ".npy or .bin",
            }
            raise UserError(
                f'{key}: data.kind = "{kind}" is read from {", ".join(what[shape] for shape in READS[kind])}; '
                f"got {file.path}, which data.exclude can leave out"
            )
        if shape == "text" and ending not in TEXT and begins_with_object(file.path):
            raise UserError(
                f"{key}: the first line of {file.path} is a JSON object, but its name has no ending of JSON lines, so the file "
                "would be one text; name it .jsonl, or .txt if the objects are to be trained as they are spelled"
            )
        name = file.relative[: len(file.relative) - len(compression)]
        name = name if shape == "text" else name[: len(name) - len(ending)]
        other = names.setdefault((shape == "text", name), file)
        if other is not file:
            raise UserError(
                f"{key}: {other.path} and {file.path} have one name in two formats; if they hold the same, leave one out "
                "with data.exclude, else name both"
            )


def _expand(pattern, ignored, kind):
    """(fixed folder, paths that begin with it) of one pattern, unsorted. Broken links stay in: the reader reports them
    as unreadable."""
    stdlib = sysconfig.get_path("stdlib")
    plain = str(pathlib.PurePath(os.path.expanduser(pattern.replace("{stdlib}", stdlib))))
    if os.path.isfile(plain):
        return os.path.dirname(plain), [plain]
    if os.path.isdir(plain):
        found = list(_walk(plain))
        paths = [path for path in found if _is_data(path, kind)]
        ignored["files of other kinds"] += len(found) - len(paths)
        return "" if plain == "." else plain, paths
    escaped = pathlib.PurePath(os.path.expanduser(pattern.replace("{stdlib}", glob.escape(stdlib))))
    if "{stdlib}" in pattern:  # its own name may hold characters that globs use
        base = stdlib
    else:
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), escaped.parts[:-1])
        base = os.path.join("", *fixed)
    paths = [path for path in glob.glob(str(escaped), recursive=True) if not os.path.isdir(path)]
    kept = [path for path in paths if not _is_marker(os.path.basename(path))]
    ignored["marker files"] += len(paths) - len(kept)
    return base, kept


def _is_marker(name):
    return name.startswith(".") or (name.startswith("_") and "." not in name) or name.endswith(SIDECARS)


def _is_data(path, kind):
    """Whether a folder gives this file: by its ending, for a file that is only not known to be anything else is none."""
    shape, ending, _ = shape_of(path)
    return shape in READS[kind] and (shape != "text" or ending in TEXT)


def _walk(folder):
    """Every file under a folder that is neither hidden nor a marker; links to folders are followed, each real folder
    once."""
    visited = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        root = "" if root == "." else root.removeprefix("." + os.sep)
        real = os.path.realpath(root or os.curdir)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(root, name) for name in names if not _is_marker(name))


class Documents:
    """Documents by number: `len(documents)`, `documents[i]` is the record (see formats.Records), in the order of the
    files and of the lines or rows in them.

    fingerprint: str, a hash of every file's relative name and content and of which of its records are meant: equal
    fingerprints mean the same documents under the same numbers, on any machine. `summary()` says in one line what was
    found and what was left out, and why. sources: list of (pattern, number of its first document, count), in the order
    of the patterns. `where(i)` names a document's file and place for a message. size: int64[n], bytes.
    largest_token: (id, where) for kind "tokens", else None. The options are those of DataConfig; folder: for the
    temporary file, created if need be. catalogue: leave one there, and read by the one that is there.
    """

    def __init__(
        self,
        patterns,
        *,
        kind="text",
        exclude=(),
        text_field="text",
        messages_field="messages",
        prompt_field="prompt",
        completion_field="completion",
        on_bad="error",
        key="data.path",
        folder=None,
        catalogue=False,
    ):
        fields = {
            "text": {"text_field": text_field},
            "chat": {"messages_field": messages_field},
            "prompt": {"prompt_field": prompt_field, "completion_field": completion_field},
            "tokens": {},
        }[kind]
        self.kind, self.on_bad, self.key = kind, on_bad, key
        self._folder = None if folder is None else os.path.expanduser(folder)
        self.patterns, self._fields = [patterns] if isinstance(patterns, str) else list(patterns), fields
        self.files, self._ignored = find_files(patterns, exclude, key, kind)
        self._states = [_state(file.path) for file in self.files]  # before they are read
        path = self._catalogue() if catalogue else None
        if path is None or not self._read_by_catalogue(path):
            self._read()
            if path is not None:
                self._leave_catalogue(path)
        if not len(self):
            names = ", ".join(file.path for file in self.files[:3])
            raise UserError(f"{key}: no document in {len(self.files)} files ({names}); {self.summary()}")

    def _read(self):
        """The pass over all files."""
        self.records, self.left_out = Records(self.kind, self._fields, self.on_bad), self._ignored.copy()
        self.first_bad, self.largest_token, self._spool, self._dtypes = None, None, None, {}
        columns = [array.array(kind) for kind in "iqqq"]  # COLUMNS
        content = hashlib.blake2b("\0".join([self.kind, *self._fields.values()]).encode(), digest_size=16)
        for number, file in enumerate(self.files):
            content.update(f"\0{file.relative}\0".encode("utf-8", "surrogateescape"))
            scan = {"table": self._scan_table, "array": self._scan_array}.get(self._shape(number), self._scan_lines)
            try:
                scan(number, file, columns, content)
            except OSError as error:
                self._bad(file.path, f"cannot be read: {error.strerror or error}")
            except Bad as error:
                self._bad(file.path, error)
        if self._spool:
            self._spool.flush()
        self._copies = _Copies(self._spool, None)
        self.content = content.hexdigest()
        for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True):
            setattr(self, name, np.array(column, dtype))

    def _catalogue(self):
        """The file that holds what a pass over these files finds: named by their paths and bytes, by what is to be read
        of them, and by the code that reads. None when one of them cannot be read."""
        parts = [self.kind, self._fields, self.on_bad, self._ignored]
        for module in (formats.__file__, __file__):
            parts.append(hashlib.blake2b(pathlib.Path(module).read_bytes()).hexdigest())
        for file in self.files:
            beside = file.path + ".json"  # describes an array
            described = self.kind == "tokens" and os.path.exists(beside)
            for path in (file.path, beside)[: 1 + described]:
                try:
                    with open(path, "rb") as stream:
                        parts.append([path, file.relative, hashlib.file_digest(stream, "blake2b").hexdigest()])
                except OSError:
                    return None
        name = hashlib.blake2b(json.dumps(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        return pathlib.Path(self._folder) / f"documents-{name}.npz"

    def _read_by_catalogue(self, path):
        """Whether there is a catalogue of these files; then this is as after `_read`, but nothing has been copied."""
        try:
            with np.load(path, allow_pickle=False) as found:
                columns = {name: found[f"{name}s"] for name in COLUMNS}
                told = json.loads(str(found["told"]))
            self.records, self._spool = Records(self.kind, self._fields, self.on_bad), None
            self.records.replaced, self.records.surrogates = told["records"]
            self.left_out = collections.Counter(told["left_out"])
            self.content, self.first_bad = told["content"], told["first_bad"]
            self.largest_token = told["largest_token"] and tuple(told["largest_token"])
            self._dtypes = {int(number): np.dtype(dtype) for number, dtype in told["dtypes"].items()}
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):  # none, or damaged
            return False
        self.__dict__.update(columns)
        self._copies = _Copies(None, copy.copy(self) if any(map(self._is_spooled, range(len(self.files)))) else None)
        return True

    def _leave_catalogue(self, path):
        if self._catalogue() != path:
            return  # the files have changed while they were read
        told = {
            "records": [self.records.replaced, self.records.surrogates],
            "left_out": self.left_out,
            "content": self.content,
            "first_bad": self.first_bad,
            "largest_token": self.largest_token,
            "dtypes": {number: dtype.str for number, dtype in self._dtypes.items()},
        }
        columns = {f"{name}s": getattr(self, name) for name in COLUMNS}
        # OSError: a folder that cannot be written may hold a token cache all the same, and reading it needs no catalogue
        with contextlib.suppress(OSError), workshop(path.parent) as place:
            np.savez(place / path.name, told=np.array(json.dumps(told)), **columns)
            os.replace(place / path.name, path)

    def __len__(self):
        return len(self.file)

    def __getitem__(self, number):
        file = int(self.file[number])
        offset, size, line = int(self.offset[number]), int(self.size[number]), int(self.line[number])
        try:
            if self._is_spooled(file):
                return self.records.from_bytes(self._copies.read(offset, size))
            with open(self.files[file].path, "rb") as stream:
                if _state(stream.fileno()) != self._states[file]:
                    raise Bad("its file has another size, date or inode than when it was read at the start")
                stream.seek(offset)
                raw = stream.read(size)
            if file in self._dtypes:
                if len(raw) != size:
                    raise Bad("it is shorter")
                return np.frombuffer(raw, self._dtypes[file]).astype(np.int32)
            record = self._parse(raw, offset, line)
            if record is None:
                raise Bad("it is empty")
            return record
        except (OSError, Bad) as error:
            raise UserError(f"{self.key}: {self.where(number)} has changed since the run began: {error}") from None

    def where(self, number):
        """ "file:line", "file, row N" or "file" of a document."""
        return self._place(int(self.file[number]), int(self.line[number]))

    @property
    def sources(self):
        source = np.array([file.source for file in self.files])[self.file]
        edges = np.searchsorted(source, np.arange(len(self.patterns) + 1))
        counts = np.diff(edges)
        return [
            (name, int(first), int(count)) for name, first, count in zip(self.patterns, edges, counts, strict=False)
        ]

    def split(self, share):
        """(training, held out): two disjoint Documents; a document is held out if the hash of its relative file name
        and line is below `share`."""
        limit, held = int(share * 2**64), np.zeros(len(self), bool)
        for number, (file, line) in enumerate(zip(self.file, self.line, strict=True)):
            name = f"{self.files[file].relative}\0{line}".encode("utf-8", "surrogateescape")
            held[number] = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") < limit
        for side, what in ((held, "no document out"), (~held, "every document out")):
            if not side.any():
                raise UserError(
                    f"evaluation.holdout: {share} holds {what} of {len(self)}; choose another share, set "
                    "evaluation.path instead, or evaluation.every=0 evaluation.holdout=0 to train without evaluation"
                )
        return self._take(~held), self._take(held)

    def _take(self, mask):
        part = object.__new__(Documents)
        part.__dict__.update(self.__dict__)
        part.file, part.offset, part.size, part.line = (
            column[mask] for column in (self.file, self.offset, self.size, self.line)
        )
        return part

    @property
    def descriptors(self):
        """Of the temporary file, if there is one: what a process must inherit to get this object by pickle."""
        return self._copies.descriptors

    @property
    def fingerprint(self):
        records = np.stack([self.file.astype(np.int64), self.line]).tobytes()
        return hashlib.blake2b(self.content.encode() + records, digest_size=16).hexdigest()

    def summary(self):
        def count(number, noun):
            return f"{number:,} {noun if number == 1 else noun + 's'}"

        parts = [
            f"{count(len(self), 'record')} in {count(len(np.unique(self.file)), 'file')}, "
            f"{self.size.sum() / 1e6:.1f} MB"
        ]
        left_out = [f"{number:,} {what}" for what, number in sorted(self.left_out.items()) if number]
        if left_out:
            parts.append("left out: " + ", ".join(left_out))
        if self.first_bad:
            parts.append(f"first that could not be read: {self.first_bad}")
        if number := self.records.replaced:
            parts.append(f"bytes that are no UTF-8 replaced by U+FFFD in {count(number, 'record')}")
        if number := self.records.surrogates:
            parts.append(f"half surrogate pairs replaced by U+FFFD in {count(number, 'record')}")
        return "; ".join(parts)

    def _shape(self, file):
        return shape_of(self.files[file].path)[0]

    def _is_spooled(self, file):
        path = self.files[file].path
        return path.lower().endswith(COMPRESSED) or self._shape(file) == "table"

    def _place(self, file, line):
        path = self.files[file].path
        if not line:
            return path
        return f"{path}:{line}" if self._shape(file) == "lines" else f"{path}, row {line}"

    def _scan_lines(self, number, file, columns, content):
        """Adds the records of one file to the columns and its content to the hash."""
        is_json, spooled = self._shape(number) == "lines", self._is_spooled(number)
        offset = 0
        with open_stream(file.path) as stream:
            for line, (raw, length) in enumerate(_pieces(stream, is_json, None if spooled else content), start=1):
                start, offset, line = offset, offset + length, line if is_json else 0
                if length > LARGEST:
                    self._bad(
                        self._place(number, line),
                        f"{'a line' if is_json else 'a text'} of {length:,} bytes, more than the {LARGEST:,} that one "
                        "document may have, since it is held in memory as a whole; divide it into documents: "
                        "into several files, or into JSON lines with one document each",
                    )
                    continue
                if is_json and _is_blank(raw.removeprefix(BOM if start == 0 else b"")):
                    self.left_out["blank lines"] += 1
                    continue
                try:
                    record = self._parse(raw, start, line, counting=True)
                    self._add(columns, number, line, record, start, len(raw), content if spooled else None)
                except Bad as error:
                    self._bad(self._place(number, line), error)
        if is_json and offset == 0:
            self.left_out["empty"] += 1

    def _scan_table(self, number, file, columns, content):
        row = 0
        for row, values in table_rows(file.path, self.records.columns):
            try:
                record = self.records.record(values, counting=True)
                self._add(columns, number, row, record, spooled=content)
            except Bad as error:
                self._bad(self._place(number, row), error)
        if row == 0:
            self.left_out["empty"] += 1

    def _scan_array(self, number, file, columns, content):
        """Reads all ids of an array; its documents are its rows, the pieces between its end ids, or the whole of it."""
        ids = token_array(file.path)
        largest, ends, place = -1, [np.zeros(1, np.int64)], 0
        content.update(f"{ids.dtype.str} {ids.row} {ids.document_end}".encode())
        with open(file.path, "rb") as stream:
            stream.seek(ids.begin)
            while (
                place < ids.count
                and (
                    block := np.frombuffer(stream.read(min(BLOCK, (ids.count - place) * ids.dtype.itemsize)), ids.dtype)
                ).size
            ):
                content.update(block)
                if not 0 <= block.min() <= block.max() < 2**31:
                    bad = int(np.flatnonzero((block < 0) | (block >= 2**31))[0])
                    raise Bad(f"the number at place {place + bad} is {block[bad]}, no token id")
                largest = max(largest, int(block.max()))
                if ids.document_end is not None:
                    ends.append(np.flatnonzero(block == ids.document_end) + place + 1)
                place += block.size
        if ids.row:
            edges = np.arange(0, ids.count + 1, ids.row)
        else:
            edges = np.unique(np.concatenate([*ends, np.array([ids.count])]))
        lines = np.arange(1, len(edges))
        if ids.row is None and ids.document_end is None:
            lines = np.zeros(len(edges) - 1)
        if not len(lines):
            self.left_out["empty"] += 1
        self._dtypes[number] = ids.dtype
        size = ids.dtype.itemsize
        found = (np.full(len(lines), number), ids.begin + edges[:-1] * size, np.diff(edges) * size, lines)
        for column, values in zip(columns, found, strict=True):
            column.frombytes(values.astype(f"i{column.itemsize}").tobytes())
        if len(lines) and largest > (self.largest_token or (-1,))[0]:
            self.largest_token = (largest, file.path)

    def _add(self, columns, number, line, record, offset=None, size=None, spooled=None):
        """Notes a record by its place in its file, or, with a hash as `spooled`, keeps it and adds it to the hash."""
        if record is None:
            self.left_out["empty"] += 1
            return
        if spooled:
            raw = self.records.to_bytes(record)
            self._spool = self._spool or Spool(self._folder)
            offset, size = self._spool.write(raw), len(raw)
            spooled.update(size.to_bytes(8, "little"))
            spooled.update(raw)
        if self.kind == "tokens" and (largest := int(record.max())) > (self.largest_token or (-1,))[0]:
            self.largest_token = (largest, self._place(number, line))
        for column, value in zip(columns, (number, offset, size, line), strict=True):
            column.append(value)

    def _bad(self, where, reason):
        if self.on_bad != "skip":
            raise UserError(
                f'{self.key}: {where}: {reason}. Mend it, or set data.on_bad = "skip" to leave such records out'
            )
        self.left_out["skipped"] += 1
        self.first_bad = self.first_bad or f"{where}: {reason}"

    def _parse(self, raw, offset, line, counting=False):
        """The record of one line, bytes at `offset` of its file's content; line 0 means that the whole file is a
        text. None: it is empty."""
        skip = len(BOM) if offset == 0 and raw.startswith(BOM) else 0
        text = self.records.decoded(raw[skip:], offset + skip, counting)
        if line == 0:
            return text or None
        try:
            row = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise Bad(f"not one JSON object per line: {error}") from None
        if not isinstance(row, dict):
            raise Bad(f"a JSON object is wanted, got {kind_of(row)}")
        return self.records.record(row, counting)


def _state(file):
    """What changes with a file's content: (bytes, ns of its date, inode) of a path or a descriptor; None: unreadable."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _is_blank(raw):
    return not raw or raw.isspace()  # `not raw.strip()` would copy the line


def _pieces(stream, is_json, content):
    """Yields (bytes, length) of each line of a stream, or of all of it, and adds them to the hash `content` unless that is
    None. Of more than LARGEST bytes only the length is kept."""
    while True:
        parts, length, ended = [], 0, False
        while not ended:
            part = stream.readline(BLOCK) if is_json else stream.read(1 << 20)
            ended = not part or (is_json and part.endswith(b"\n"))
            length += len(part)
            if content is not None:
                content.update(part)
            if length <= LARGEST:
                parts.append(part)
            else:
                parts.clear()
        if is_json and not length:
            return
        whole = b"".join(parts)
        parts.clear()
        yield whole, length
        del whole
        if not is_json:
            return


class _Copies:
    """The Spool of a Documents: made by its pass over the files, or, when that was spared by a catalogue, by a pass of
    `documents` when a record is wanted. documents: None when there is a spool, or nothing to copy."""

    def __init__(self, spool, documents):
        self.spool, self.documents, self.lock = spool, documents, threading.Lock()

    def read(self, offset, size):
        self._make()
        return self.spool.read(offset, size)

    def _make(self):
        with self.lock:
            if self.documents is None:
                return
            content, again = self.documents.content, copy.copy(self.documents)
            again._read()
            if again.content != content:
                raise UserError(f"{again.key}: the documents have changed since the run began")
            self.spool, self.documents = again._spool, None

    @property
    def descriptors(self):
        self._make()
        return [] if self.spool is None else [self.spool.descriptor]

    def __getstate__(self):
        self._make()  # once, here, and not in every process that gets it
        return {"spool": self.spool}

    def __setstate__(self, state):
        self.__init__(state["spool"], None)


def read_documents(data, path, key="data.path"):
    """The Documents of `path`, by the rules of the section DataConfig. key: the setting that `path` comes from."""
    fields = ("kind", "exclude", "text_field", "messages_field", "prompt_field", "completion_field", "on_bad")
    options = {name: getattr(data, name) for name in fields}
    return Documents(path, key=key, folder=data.cache, catalogue=data.cache is not None, **options)


def open_documents(data, evaluation=None):
    """(training, evaluation) Documents of the sections DataConfig and EvaluationConfig; the second is None when nothing
    is to be evaluated on."""
    training = read_documents(data, data.path)
    if evaluation is None or not (evaluation.path or evaluation.holdout):
        return training, None
    if evaluation.path:
        return training, read_documents(data, evaluation.path, "evaluation.path")
    return training.split(evaluation.holdout)

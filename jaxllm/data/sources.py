"""Files to documents: what a path names, which records it holds, and each record's text by number.

One pass over the files at the start reads every record once. It finds what is wrong while a stop still costs nothing,
notes where each record lies, and takes a fingerprint of the content; texts are then read again one by one, so memory
holds 28 bytes per document and no text. The price is that the files are read once before the first step, on every
process.

Everything is UTF-8. An encoding declared inside a Python file is not honoured: two rules for one byte would depend on a
file's name. Texts are taken as they are, line ends and Unicode forms included; only a byte order mark at the very
beginning of a file is dropped.
"""

import array
import collections
import dataclasses
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import sysconfig

import numpy as np

from jaxllm.section import UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")
TEXT = (".txt", ".text", ".md", ".rst", ".py")
UNREADABLE = (".gz", ".zst", ".zip", ".bz2", ".xz", ".parquet", ".arrow", ".npy", ".bin")
BOM = b"\xef\xbb\xbf"
SURROGATE = re.compile("[\ud800-\udfff]")


class _Bad(Exception):
    """A record that cannot be read; the text says why, without the place."""


@dataclasses.dataclass(frozen=True)
class File:
    """A file to read: its path, and its name relative to the fixed part of the pattern that found it, which does not
    depend on the machine."""

    path: str
    relative: str


def find_files(patterns, exclude=(), key="data.path"):
    """The files that `patterns` (see DataConfig.path) name, in the order in which they are read.

    Returns (files: list[File], ignored: Counter of what was passed over). Raises UserError, naming `key`, for a pattern
    without a file.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise UserError(f"{key}: is not set; name files, folders or globs of plain text or JSON lines")
    files, seen, ignored = [], set(), collections.Counter()
    for pattern in patterns:
        base, found = _expand(pattern, ignored)
        chosen = []
        for path in found:
            relative = path[len(base) :].lstrip(os.sep).replace(os.sep, "/")
            if any(fnmatch.fnmatchcase(relative, glob_) for glob_ in exclude):
                ignored["files excluded"] += 1
            else:
                chosen.append(File(path, relative))
        if not chosen:
            reason = f"all {len(found)} files that match are excluded by data.exclude" if found else "matches 0 files"
            raise UserError(f"{key}: {pattern!r} {reason} (working directory {os.getcwd()})")
        for file in sorted(chosen, key=lambda file: file.relative):
            suffix = os.path.splitext(file.path)[1].lower()
            if suffix in UNREADABLE:
                raise UserError(f"{key}: cannot read {suffix} files, got {file.path}; give plain text or JSON lines")
            real = os.path.realpath(file.path)
            if real in seen:
                ignored["files reached twice"] += 1
            else:
                seen.add(real)
                files.append(file)
    return files, ignored


def _expand(pattern, ignored):
    """(fixed folder, paths that begin with it) of one pattern, unsorted. Broken links stay in: the reader reports them
    as unreadable."""
    stdlib = sysconfig.get_path("stdlib")
    plain = str(pathlib.PurePath(os.path.expanduser(pattern.replace("{stdlib}", stdlib))))
    if os.path.isfile(plain):
        return os.path.dirname(plain), [plain]
    if os.path.isdir(plain):
        found = list(_walk(plain))
        endings = JSON_LINES + TEXT
        paths = [path for path in found if os.path.splitext(path)[1].lower() in endings]
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
    return name.startswith(".") or (name.startswith("_") and "." not in name)


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
    """Documents by number: `len(documents)`, `documents[i]` is the text, in the order of the files and of the lines in
    them.

    fingerprint: str, a hash of every file's relative name and content and of which of its records are meant: equal
    fingerprints mean the same documents under the same numbers, on any machine. `summary()` says in one line what was
    found and what was left out, and why.
    """

    def __init__(self, patterns, *, exclude=(), text_field="text", on_bad="error", key="data.path"):
        self.text_field, self.on_bad, self.key = text_field, on_bad, key
        self.files, self.left_out = find_files(patterns, exclude, key)
        self.first_bad, self.replaced, self.surrogates = None, 0, 0
        columns = [array.array(kind) for kind in "iqqq"]  # file, byte offset, bytes, line (from 1; 0 = the whole file)
        content = hashlib.blake2b(text_field.encode(), digest_size=16)
        for number, file in enumerate(self.files):
            content.update(f"\0{file.relative}\0".encode("utf-8", "surrogateescape"))
            try:
                self._scan(number, file, columns, content)
            except OSError as error:
                self._bad(f"{file.path}", f"cannot be read: {error.strerror or error}")
        self.content = content.hexdigest()
        dtypes = (np.int32, np.int64, np.int64, np.int64)
        self.file, self.offset, self.size, self.line = (
            np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)
        )
        if not len(self):
            names = ", ".join(file.path for file in self.files[:3])
            raise UserError(f"{key}: no document in {len(self.files)} files ({names}); {self.summary()}")

    def __len__(self):
        return len(self.file)

    def __getitem__(self, number):
        file = self.files[self.file[number]]
        offset, size, line = int(self.offset[number]), int(self.size[number]), int(self.line[number])
        try:
            with open(file.path, "rb") as stream:
                stream.seek(offset)
                return self._parse(stream.read(size), offset, line)
        except (OSError, _Bad) as error:
            where = f"{file.path}:{line}" if line else file.path
            raise UserError(f"{self.key}: {where} has changed since the run began: {error}") from None

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
        if self.replaced:
            parts.append(f"bytes that are no UTF-8 replaced by U+FFFD in {count(self.replaced, 'record')}")
        if self.surrogates:
            parts.append(f"half surrogate pairs replaced by U+FFFD in {count(self.surrogates, 'record')}")
        return "; ".join(parts)

    def _scan(self, number, file, columns, content):
        """Adds the records of one file to the columns and its bytes to the hash."""
        is_json = os.path.splitext(file.path)[1].lower() in JSON_LINES
        with open(file.path, "rb") as stream:
            offset = 0
            for line, raw in enumerate(stream if is_json else [stream.read()], start=1):
                content.update(raw)
                start, offset, line = offset, offset + len(raw), line if is_json else 0
                if is_json and not raw.removeprefix(BOM if start == 0 else b"").strip():
                    self.left_out["blank lines"] += 1
                    continue
                try:
                    text = self._parse(raw, start, line, counting=True)
                except _Bad as error:
                    self._bad(f"{file.path}:{line}" if line else file.path, error)
                    continue
                if not text:
                    self.left_out["empty"] += 1
                    continue
                for column, value in zip(columns, (number, start, len(raw), line), strict=True):
                    column.append(value)
        if is_json and offset == 0:
            self.left_out["empty"] += 1

    def _bad(self, where, reason):
        if self.on_bad != "skip":
            raise UserError(
                f'{self.key}: {where}: {reason}. Mend it, or set data.on_bad = "skip" to leave such records out'
            )
        self.left_out["skipped"] += 1
        self.first_bad = self.first_bad or f"{where}: {reason}"

    def _parse(self, raw, offset, line, counting=False):
        """The text of one record: bytes at `offset` of its file; line 0 means that the whole file is the text."""
        skip = len(BOM) if offset == 0 and raw.startswith(BOM) else 0
        try:
            text = raw[skip:].decode()
        except UnicodeDecodeError as error:
            if self.on_bad != "replace":
                place = offset + skip + error.start
                raise _Bad(
                    f"not UTF-8 at byte {place} of the file (0x{raw[skip + error.start]:02x}); "
                    'data.on_bad = "replace" reads such bytes as U+FFFD'
                ) from None
            text = raw[skip:].decode(errors="replace")
            self.replaced += counting
        if line == 0:
            return text
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Bad(f"not one JSON object per line: {error}") from None
        if not isinstance(record, dict):
            raise _Bad(f"a JSON object is wanted, got {_kind(record)}")
        if self.text_field not in record:
            keys = ", ".join(sorted(record)) or "none"
            raise _Bad(f"no field {self.text_field!r} (fields here: {keys}); data.text_field chooses it")
        text = record[self.text_field]
        if not isinstance(text, str):
            raise _Bad(
                f"field {self.text_field!r} is {_kind(text)}, a string is wanted; data.text_field chooses the field"
            )
        if SURROGATE.search(text):  # legal in JSON, but no character: no tokenizer takes it
            text = SURROGATE.sub("\ufffd", text)
            self.surrogates += counting
        return text


def _kind(value):
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def open_documents(data, evaluation=None):
    """(training, evaluation) Documents of the sections DataConfig and EvaluationConfig; the second is None when nothing
    is to be evaluated on."""
    options = {"exclude": data.exclude, "text_field": data.text_field, "on_bad": data.on_bad}
    training = Documents(data.path, **options)
    if evaluation is None or not (evaluation.path or evaluation.holdout):
        return training, None
    if evaluation.path:
        return training, Documents(evaluation.path, key="evaluation.path", **options)
    return training.split(evaluation.holdout)

"""The token cache: documents that were rendered once, found again by number, mapped from disk.

A cache is a folder inside data.cache whose name begins with its key, a hash of everything its tokens depend on: the
documents' content, the tokenizer, the template, what is trained, the length where documents are cut, and the code that
reads and renders (our modules and the versions of the libraries that tokenise and fill templates). So there is no
stale cache, only one that no run asks for any more. One whose files are not of the length that its own table of contents
says is passed over with a line and kept, and the next is built beside it; nothing here ever deletes a finished cache.
A cache appears whole, by a rename. Of two runs that build the same one at once, the second to finish uses the first's.

Files: tokens.i32; weights.bits, one bit per token, each document padded to a byte; lengths.i32 and last.i32, per
document, its tokens and the target at its last place (all other targets are the next token); cache.json. That is 4.1
bytes per token. Weights other than 0 and 1 cannot be kept.
"""

import array
import contextlib
import errno
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import sys
import threading

import numpy as np

from jaxllm.data.pipeline import Rendering
from jaxllm.data.render import Rendered
from jaxllm.data.summary import Totals, render_all
from jaxllm.data.workers import Workers
from jaxllm.data.workshop import workshop
from jaxllm.section import UserError

VERSION = 1
HERE = pathlib.Path(__file__).parent
FILES = ("tokens.i32", "weights.bits", "lengths.i32", "last.i32")
PART = 1 << 20  # tokens that are written at once; a multiple of 8


class TokenCache(Rendering):
    """The documents of a finished cache, rendered. totals: the Totals of all of them."""

    def __init__(self, folder, documents):
        super().__init__(documents, None)
        self.folder = folder
        contents = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
        self.lengths = np.fromfile(folder / "lengths.i32", "<i4")
        self.last = np.fromfile(folder / "last.i32", "<i4")
        self.begins = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.bytes = np.concatenate([[0], np.cumsum((self.lengths.astype(np.int64) + 7) // 8)])
        self.tokens, self.weights = (
            np.memmap(folder / name, dtype, mode="r") if (folder / name).stat().st_size else np.zeros(0, dtype)
            for name, dtype in (("tokens.i32", "<i4"), ("weights.bits", np.uint8))
        )
        self.totals = Totals(self.lengths, contents["trained"], contents["counts"])

    def num_bytes(self, number):
        return 4 * int(self.lengths[number])

    def rendered(self, numbers):
        return [self._document(number) for number in numbers]

    def _document(self, number):
        begin, end = int(self.begins[number]), int(self.begins[number + 1])
        tokens = self.tokens[begin:end]
        targets = np.empty(end - begin, np.int32)
        targets[:-1], targets[-1:] = tokens[1:], self.last[number]
        bits = self.weights[self.bytes[number] : self.bytes[number + 1]]
        return Rendered(tokens, targets, np.unpackbits(bits, count=end - begin).view(bool))


def key_of(documents, render, data):
    """The hash that names the cache of these documents."""
    parts = [VERSION, documents.fingerprint, render.fingerprint, data.kind, _code(data.kind)]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _code(kind):
    """What makes the tokens of a kind besides its input: our own modules, by their bytes, and the libraries' versions."""
    chat = kind == "chat"
    modules = ("formats", "sources", "render", *["chat"] * chat)
    own = [hashlib.blake2b((HERE / f"{name}.py").read_bytes()).hexdigest() for name in modules]
    for package in ("tokenizers", *["jinja2", "mistral-common"] * chat):
        try:
            own.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            own.append(None)
    return own


def find(folder, key, documents, tell=None):
    """The TokenCache of `key` in `folder`, None if there is no whole one. What is there under its name and is not is
    told and left alone."""
    for path in sorted(pathlib.Path(folder).expanduser().glob(f"{key}*")):
        wrong = _what_is_wrong(path, key, len(documents))
        if wrong is None:
            return TokenCache(path, documents)
        (tell or _tell)(f"token cache {path}: {wrong}; it is not used, and left as it is")
    return None


def _tell(text):
    print(text, file=sys.stderr, flush=True)


def _what_is_wrong(path, key, count):
    try:
        contents = json.loads((path / "cache.json").read_text(encoding="utf-8"))
        return _differs(path, contents, key, count)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its cache.json cannot be read ({type(error).__name__})"


def _differs(path, contents, key, count):
    if (contents["version"], contents["key"], contents["documents"]) != (VERSION, key, count):
        return "it was made of something else"
    for name in FILES:
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != contents["sizes"][name]:
            return f"{name} has {'no' if size is None else f'{size:,}'} bytes instead of {contents['sizes'][name]:,}"
    return None


def build(folder, key, source):
    """Renders every document of `source` into a new cache beside the others, and returns where it is. What is half
    built is removed: after an error at once, after a kill by the next that builds here."""
    folder = pathlib.Path(folder).expanduser()
    try:
        with workshop(folder, _tell) as place:
            beside = place / key
            beside.mkdir()
            _write(beside, key, source)
            return _move(beside, folder, key, len(source))
    except OSError as error:
        raise UserError(f"data.cache: cannot write to {folder}: {error.strerror or error}") from None


def _write(beside, key, source):
    totals, last = Totals(), array.array("i")
    with contextlib.ExitStack() as stack:
        tokens, weights = (stack.enter_context(open(beside / name, "wb")) for name in FILES[:2])
        for documents in render_all(source):
            totals.add(documents)
            for document in documents:
                _check(document)
                for begin in range(0, len(document.tokens), PART):
                    part = slice(begin, begin + PART)
                    tokens.write(np.ascontiguousarray(document.tokens[part], "<i4"))
                    weights.write(np.packbits(document.loss_weights[part] != 0))
                last.append(int(document.targets[-1]) if len(document.targets) else 0)
    for name, values in (("lengths.i32", totals.lengths), ("last.i32", last)):
        np.array(values, "<i4").tofile(beside / name)
    contents = {
        "version": VERSION,
        "key": key,
        "documents": len(totals.lengths),
        "trained": totals.trained,
        "counts": source.counts,
        "sizes": {name: (beside / name).stat().st_size for name in FILES},
    }
    (beside / "cache.json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    for name in (*FILES, "cache.json"):
        with open(beside / name, "rb") as file:
            os.fsync(file.fileno())


def _move(beside, folder, key, count):
    """Gives the finished cache its name, or the next one that is free, unless another builder was quicker; returns the
    path that holds it."""
    for number in itertools.count(1):
        path = folder / (key if number == 1 else f"{key}-{number}")
        try:
            os.rename(beside, path)
            return path
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if _what_is_wrong(path, key, count) is None:
            return path


def _check(document):
    weights = document.loss_weights
    binary = weights.dtype == bool or np.isin(weights, (0, 1)).all()
    if not binary or not np.array_equal(document.targets[:-1], document.tokens[1:]):
        raise ValueError("a token cache keeps documents whose targets are their next tokens, with weights 0 and 1")


def is_alone():
    """Whether there is no other process. jax.process_count() alone would start a backend, memory that a look at the
    data has no use for."""
    import jax

    return not jax.distributed.is_initialized() or jax.process_count() == 1


def is_first():
    """Whether this is process 0; see is_alone."""
    import jax

    return is_alone() or jax.process_index() == 0


def on_first_process(action):
    """`action()` on process 0, while the others wait without a collective that could time out. Its value there, None
    elsewhere; an error there is an error everywhere."""
    if is_alone():
        return action()
    from jax.experimental import multihost_utils

    result, errors, done = [], [], threading.Event()

    def run():
        try:
            result.append(action())
        except BaseException as error:
            errors.append(error)
        done.set()

    first = is_first()
    if first:
        threading.Thread(target=run, name="jaxllm-data-first", daemon=True).start()
    state = 0
    while not state:
        mine = first and done.wait(1.0) and (2 if errors else 1)
        state = int(np.max(multihost_utils.process_allgather(np.array([mine or 0], np.int32))))
    if errors:
        raise errors[0]
    if state == 2:
        raise UserError("data: process 0 could not go on with the documents; its own message says why")
    return result[0] if first else None


def cached(source, data):
    """The TokenCache of a Rendering in data.cache, built by process 0 and its workers if there is none. With several
    processes all must call it."""
    key = key_of(source.documents, source.render, data)

    def make():
        if find(data.cache, key, source.documents) is not None:
            return
        _tell(f"token cache: rendering {len(source):,} documents into {data.cache}")
        if not data.workers:
            build(data.cache, key, source)
            return
        workers = Workers(source, data.workers)
        try:
            build(data.cache, key, workers)
        finally:
            workers.close()

    on_first_process(make)
    found = find(data.cache, key, source.documents, tell=lambda _: None)
    if not _all_agree(found is not None):
        raise UserError(
            f"data.cache: {data.cache} is not the same folder for all processes: what process 0 wrote there is not found by "
            "another; name a folder that all hosts share, or leave it out"
        )
    return found


def _all_agree(mine):
    if is_alone():
        return mine
    from jax.experimental import multihost_utils

    return bool(np.min(multihost_utils.process_allgather(np.array([mine], np.int32))))

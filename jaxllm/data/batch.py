"""Rows of numpy to a Batch on devices, and the two iterators that a run uses: training batches without end, evaluation
batches that repeat.

This is where rows meet the mesh: which rows of the global batch a process needs, how they fold into microbatches, and
(for a sequence axis longer than one) in which order the places of a row are laid out. Above it everything is numpy,
below it everything is jax.Array.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
import socket

import jax
import numpy as np

from jaxllm.attention import row_layout, row_places
from jaxllm.data import cache, summary
from jaxllm.data.pipeline import Pipeline, Rendering, cut_for, empty_rows
from jaxllm.data.render import load_tokenizer, make_renderer, render_for
from jaxllm.data.sources import open_documents, read_documents
from jaxllm.data.workers import Workers
from jaxllm.section import UserError
from jaxllm.sharding import batch_sharding
from jaxllm_kernels import token_order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows, all [num_microbatches, B, T]; evaluation batches have one microbatch.

    tokens, targets: i32; the target is the next token of the same document, also when that stands in a later row.
    positions: i32, from 0 in every document, and again from 0 in every piece of a document that is split.
    segment_ids: i32, documents of a row counted from 1; 0 = padding, and nothing else says padding.
    k_start, k_end: i32; the query at this place sees the keys at [k_start, k_end) of its row, counted before any
        reordering for devices: its own document up to itself. Both 0 for padding.
    loss_weights: f32; 0 where there is no target (the last token of a document, padding), else 1.
    layout: in which order the T places hold the row (`jaxllm.attention.row_layout`), the same for all arrays. row_length:
        tokens of a row before it was completed for the devices; None: T.
    """

    tokens: jax.Array
    targets: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    k_start: jax.Array
    k_end: jax.Array
    loss_weights: jax.Array
    layout: str = dataclasses.field(default="contiguous", metadata={"static": True})
    row_length: int | None = dataclasses.field(default=None, metadata={"static": True})


def local_lanes(mesh, global_batch_size, num_microbatches):
    """Numbers of the global batch's rows that this process's devices hold, i64[n], ascending.

    Row r belongs to microbatch r // (global_batch_size / num_microbatches), so a process holds the same block of every
    microbatch. Raises UserError when the rows do not divide.
    """
    rows = _rows_per_microbatch(mesh, global_batch_size, num_microbatches)
    block = _local_rows(mesh, rows)
    return (np.arange(num_microbatches)[:, None] * rows + block).reshape(-1)


def _rows_per_microbatch(mesh, global_batch_size, num_microbatches):
    rows, rest = divmod(global_batch_size, num_microbatches)
    shards = _num_shards(mesh, 1)
    if rest or rows % shards:
        raise UserError(
            f"data.global_batch_size: {global_batch_size} rows do not divide into "
            f"optimizer.num_microbatches = {num_microbatches} times {shards} shares of the mesh's batch axes; "
            f"choose a multiple of {num_microbatches * shards}"
        )
    return rows


def _layout(mesh, seq_len, window):
    """(layout, places): how a row of seq_len tokens is laid out, and how many places it takes, completed by padding."""
    shards = _num_shards(mesh, 2)
    return row_layout(shards, seq_len, window), row_places(shards, seq_len, window)


def _num_shards(mesh, dim):
    """Into how many parts the mesh cuts dimension `dim` of [num_microbatches, B, T]."""
    axes = batch_sharding(mesh).spec[dim] or ()
    return int(np.prod([mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes)]))


def _local_rows(mesh, rows):
    """Which of a microbatch's rows live on devices of this process, ascending."""
    places = batch_sharding(mesh).addressable_devices_indices_map((1, rows, _num_shards(mesh, 2)))
    return np.unique(np.concatenate([np.arange(rows)[place[1]] for place in places.values()]))


def to_device(rows, num_microbatches, mesh, global_batch_size=None, window=None):
    """A Batch from rows of numpy [B_local, T]: the rows `local_lanes` names, in that order, by default the whole batch.

    With a sequence axis, rows are completed with padding to what its devices divide and laid out for equal work, once
    for all arrays. window: that of the model, if it has one. Not collective: each process puts the parts that its own
    devices need. Raises UserError when rows do not divide over the mesh.
    """
    num_local, seq_len = rows["tokens"].shape
    per_microbatch = _rows_per_microbatch(mesh, global_batch_size or num_local, num_microbatches)
    local = _local_rows(mesh, per_microbatch)
    layout, places = _layout(mesh, seq_len, window)
    if num_local != num_microbatches * len(local):
        raise ValueError(f"got {num_local} rows, this process holds {num_microbatches} x {len(local)}")
    order = token_order(layout, _num_shards(mesh, 2), places)

    def laid_out(values):
        values = np.pad(values, [(0, 0), (0, places - seq_len)])[:, order]
        return values.reshape(num_microbatches, len(local), places)

    sharding, shape = batch_sharding(mesh), (num_microbatches, per_microbatch, places)

    def put(values):
        def part(index):
            begin, end, _ = index[1].indices(per_microbatch)
            first = int(np.searchsorted(local, begin))
            return values[index[0], first : first + end - begin, index[2]]

        return jax.make_array_from_callback(shape, sharding, part)

    arrays = {name: put(laid_out(values)) for name, values in rows.items()}
    return Batch(**arrays, layout=layout, row_length=seq_len)


def abstract_batch(mesh, num_microbatches, num_rows, seq_len, window=None):
    """A Batch of jax.ShapeDtypeStructs with shardings: what a step is compiled for."""
    layout, places = _layout(mesh, seq_len, window)
    shape, sharding = (num_microbatches, num_rows // num_microbatches, places), batch_sharding(mesh)
    names = [field.name for field in dataclasses.fields(Batch) if not field.metadata.get("static")]
    dtypes = dict.fromkeys(names, np.int32) | {"loss_weights": np.float32}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
    return Batch(**arrays, layout=layout, row_length=seq_len)


def _mesh(mesh):
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    if mesh.empty:
        raise ValueError("batches need a mesh: call inside `with jax.set_mesh(make_mesh(cfg.mesh)):`, or pass mesh")
    return mesh


def _check_ids(documents, vocab_size):
    """UserError when documents of token ids hold one that the model has no embedding for."""
    if vocab_size is not None and documents is not None and documents.largest_token is not None:
        largest, where = documents.largest_token
        if largest >= vocab_size:
            raise UserError(
                f"{documents.key}: {where} holds token id {largest}, but the embedding has model.vocab_size = {vocab_size} "
                "rows; were these ids made with another tokenizer?"
            )


def _check_some_left(documents, totals, purpose):
    """UserError when every document was left out. totals: their Totals where they are known, else None."""
    if totals is not None and not any(totals.lengths):
        left_out = totals.counts.get("left_out", {})
        raise UserError(
            f"{documents.key}: no document is left to {purpose} ({documents.summary()}"
            f"{''.join(f'; {number:,} {what}' for what, number in sorted(left_out.items()))})"
        )


def _on_all_alike(key, what, read):
    """`read()` on every process: something with a fingerprint, which must be the same everywhere; None is alike too.

    With several processes all must call it. An error of one ends all: there with its own message, elsewhere with a
    UserError that names the process and its host. So does a different fingerprint, for the order of the data and the
    meaning of a position hang on it, and nothing later would show that processes train on different orders.
    """
    if cache.is_alone():
        return read()
    result, error = None, None
    try:
        result = read()
    except Exception as caught:  # whatever it is: the others wait in the exchange below, and it is raised behind that
        error = caught
    host = socket.gethostname().encode()[:48].ljust(48, b"\0")
    mark = bytes.fromhex(result.fingerprint) if result is not None else bytes(16)
    told = _gather(np.frombuffer(bytes([error is not None, 0, 0, 0]) + mark + host, np.int32))
    found = [(row[0] != 0, row[4:20], row[20:].rstrip(b"\0").decode(errors="replace")) for row in _rows_of(told)]
    if error is not None:
        raise error
    named = [f"process {number} on {host}" for number, (*_, host) in enumerate(found)]
    if failed := [name for name, (bad, *_) in zip(named, found, strict=True) if bad]:
        raise UserError(f"{key}: {', '.join(failed)} could not read the {what}; its own message says why")
    if others := [name for name, (_, mark, _) in zip(named, found, strict=True) if mark != found[0][1]]:
        raise UserError(
            f"{key}: {', '.join(others)} found another {what} than {named[0]}; all processes must read the same "
            "files under the same names: copy them anew, or name a folder that all hosts share"
        )
    return result


def _rows_of(told):
    """The bytes that each process gave to _gather."""
    return [row.tobytes() for row in told.reshape(jax.process_count(), -1)]


def _counted(documents, source, purpose):
    """The Totals of a source that has some: told where it is counted, so that all processes learn of it."""
    totals = summary.count_all(source)
    _check_some_left(documents, totals, purpose)
    return totals


class Training:
    """What a config trains on, without devices: documents and held_out, tokenizer, render, and `source`, which a
    Pipeline reads. summary, fingerprint: str; where documents are rendered to be counted, this takes as long, and with
    several processes only process 0 counts."""

    def __init__(self, cfg):
        data = cfg.data
        opened = []

        def open_training():
            opened[:] = open_documents(data, cfg.evaluation)
            _check_ids(opened[0], cfg.model.vocab_size)
            return opened[0]

        self.documents = _on_all_alike("data.path", "set of documents", open_training)
        self.held_out = opened[1]

        def load_renderer():
            self.tokenizer = load_tokenizer(cfg, self.documents)
            return make_renderer(cfg, self.tokenizer)

        self.render = _on_all_alike("data.tokenizer", "tokenizer or template", load_renderer)
        # with weights the order depends on where one source ends and the next begins
        borders = str([count for _, _, count in self.documents.sources]) if data.weights else ""
        self.source, self._close, totals = Rendering(self.documents, self.render), lambda: None, None
        # a position counts pieces where documents are cut into some
        numbered = cut_for(data, self.source)
        borders += str(numbered.sources) if numbered is not self.source else ""
        self.fingerprint = hashlib.blake2b(
            (self.documents.fingerprint + self.render.fingerprint + borders).encode(), digest_size=16
        ).hexdigest()
        if data.cache:
            self.source = cache.cached(self.source, data)
            totals = self.source.totals
        elif data.workers:
            self.source = Workers(self.source, data.workers)
            self._close = self.source.close
        try:
            self.summary = self.documents.summary()
            if totals is None and data.kind in ("chat", "prompt"):
                totals = cache.on_first_process(lambda: _counted(self.documents, self.source, "train on"))
            _check_some_left(self.documents, totals, "train on")
            if cache.is_first():
                self.summary += "\n" + summary.describe(data, cfg.seed, self.documents, self.source, totals)
        except BaseException:
            self.close()
            raise

    def close(self):
        """Ends the workers."""
        self._close()


class Batches:
    """Iterator of training Batches. tokenizer, documents, render: what they are made with; summary, fingerprint: str.

    cursors: i64[global_batch_size, 2], where all lanes stand after the last batch handed out (prefetched ones do not
    count). With several processes reading it is collective: all must. It is the whole position of the data, and means
    the same as long as fingerprint, seed and the section `data` are the same.
    """

    def __init__(self, cfg, mesh=None, cursors=None):
        self._mesh, self._size = _mesh(mesh), cfg.data.global_batch_size
        self._num_microbatches, self._window = cfg.optimizer.num_microbatches, cfg.model.sliding_window
        lanes = local_lanes(self._mesh, self._size, self._num_microbatches)
        if cursors is not None and np.shape(cursors) != (self._size, 2):
            raise UserError(
                f"data.global_batch_size: the position to go on from has {len(cursors)} rows, the config "
                f"{self._size}; the order of the data depends on this number, so go on with the same one"
            )
        self._training = training = Training(cfg)
        self.documents, self.held_out, self.tokenizer = training.documents, training.held_out, training.tokenizer
        self.render, self.summary, self.fingerprint = training.render, training.summary, training.fingerprint
        self._cursors = np.zeros((len(lanes), 2), np.int64) if cursors is None else np.asarray(cursors, np.int64)[lanes]
        try:
            self._pipeline = Pipeline(
                training.source, None, cfg.data, seed=cfg.seed, lanes=lanes, cursors=self._cursors
            )
        except BaseException:
            training.close()
            raise
        self._ahead = None  # (item, states of all processes, an error of this one) of the batch to come

    def __iter__(self):
        return self

    def __next__(self):
        if cache.is_alone():
            item = next(self._pipeline, None)
            if item is None:
                raise StopIteration
        else:
            item = self._agreed()
        rows, self._cursors = item or (
            empty_rows(len(self._pipeline.lanes), self._pipeline.config.seq_len),
            self._cursors,
        )
        return to_device(rows, self._num_microbatches, self._mesh, self._size, self._window)

    def _agreed(self):
        """The next item of this process, None for rows of padding; StopIteration when no process has one, and an error on
        all processes when one has an error, else the others would wait for it in the middle of a step.

        Lanes end at different steps; a process that is done goes on with padding until all are. The states of a batch are
        sent before the batch ahead of it is trained on, so that reading them here waits for no step later than the one
        before the last (unmeasured).
        """
        item, states, error = self._ahead or self._look_ahead()
        states = np.asarray(states.addressable_data(0)).reshape(-1)
        if error is not None:
            raise error
        if failed := np.flatnonzero(states == _FAILED).tolist():
            raise UserError(
                f"data: process {', '.join(map(str, failed))} could not go on reading; its own message says why"
            )
        if not (states == _MORE).any():
            raise StopIteration
        self._ahead = self._look_ahead()
        return item

    def _look_ahead(self):
        item, error = None, None
        try:
            item = next(self._pipeline, None)
        except Exception as caught:  # raised by the next call, once all processes know
            error = caught
        return item, _sent_to_all(_FAILED if error else _ENDED if item is None else _MORE), error

    @property
    def cursors(self):
        if cache.is_alone():
            return self._cursors.copy()
        lanes = _gather(self._pipeline.lanes.astype(np.int64).view(np.int32))
        values = _gather(np.ascontiguousarray(self._cursors).view(np.int32).reshape(-1))
        out = np.empty((self._size, 2), np.int64)
        out[lanes.view(np.int64)] = values.view(np.int64).reshape(-1, 2)
        return out

    def close(self):
        """Ends the background thread and the workers."""
        self._training.close()  # first: the thread may be waiting for one
        self._pipeline.close()


_ENDED, _MORE, _FAILED = range(3)  # what a process has for a batch


def _sent_to_all(state):
    """A number of every process, as an array i32[processes] that is there on all of them; not waited for. Collective."""
    shared, copy = _by_process()
    return copy(jax.make_array_from_process_local_data(shared, np.array([state], np.int32), (jax.process_count(),)))


@functools.cache
def _by_process():
    """(sharding of an array with one place per process, jitted copy of such an array to all of them)."""
    by_process = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices = np.array(by_process).reshape(jax.process_count(), -1)[:, :1]
    mesh = jax.sharding.Mesh(devices, ("process", "one"))
    shared = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return shared, jax.jit(lambda values: values, out_shardings=everywhere)


def _gather(values):
    """Concatenates i32[n] of all processes (jax would cut 64-bit numbers)."""
    from jax.experimental import multihost_utils

    return np.ascontiguousarray(np.asarray(multihost_utils.process_allgather(values)).reshape(-1))


def make_batches(cfg, mesh=None, cursors=None):
    """Training batches of a config, from the beginning or from `cursors` of an earlier iterator; see Batches.

    mesh: by default that of `jax.set_mesh`. Files are read and checked, and the tokenizer is found or trained, before
    this returns; everything that is wrong with them is a UserError here.
    """
    return Batches(cfg, mesh, cursors)


class EvaluationBatches:
    """Iterable of Batches with one microbatch: all evaluation documents, every token once; iterating again gives the
    same again.

    Documents are packed into rows in the order of the files, and rows into batches in the order of rows; the last batch
    is filled up with rows of padding. So all batches have one shape, and sums over tokens do not depend on the batch
    size. Every process packs all rows and takes its own.

    Conversations and prompts are all rendered here, as those of the training set are, and with several processes on
    process 0: what cannot be rendered is a UserError before anything is compiled. summary: str, as Training's; of
    documents that were not counted, only what was read.
    """

    def __init__(self, cfg, mesh, documents, render):
        self._mesh, self._size, self._max_batches = _mesh(mesh), cfg.evaluation.batch_size, cfg.evaluation.max_batches
        self._window = cfg.model.sliding_window
        if self._size % (shards := _num_shards(self._mesh, 1)):
            raise UserError(
                f"evaluation.batch_size: {self._size} rows do not divide over {shards} shares of the mesh's batch axes"
            )
        _on_all_alike(documents.key, "set of documents", lambda: documents)
        _check_ids(documents, cfg.model.vocab_size)
        alone = {"global_batch_size": 1, "shuffle": False, "repeat": False, "epochs": None, "weights": None}
        self._config = cfg.data.model_copy(update=alone)
        self.documents, self._source, totals = documents, Rendering(documents, render_for(render, documents.key)), None
        if cfg.data.cache:
            self._source = cache.cached(self._source, cfg.data)
            totals = self._source.totals
        elif cfg.data.kind in ("chat", "prompt"):
            totals = cache.on_first_process(lambda: _counted(documents, self._source, "evaluate on"))
        _check_some_left(documents, totals, "evaluate on")
        self.summary = documents.summary()
        if totals is not None and cache.is_first():
            self.summary += "\n" + summary.describe(self._config, 0, documents, self._source, totals)

    def __iter__(self):
        lanes = local_lanes(self._mesh, self._size, 1)
        rows = Pipeline(self._source, None, self._config, prefetch=2 * self._size)
        num_batches = 0
        try:
            while num_batches != self._max_batches:
                found = [row for row, _ in itertools.islice(rows, self._size)]
                if not found:
                    return
                padding = empty_rows(self._size - len(found), self._config.seq_len)
                parts = [*found, padding]
                whole = {name: np.concatenate([part[name] for part in parts])[lanes] for name in padding}
                yield to_device(whole, 1, self._mesh, self._size, self._window)
                num_batches += 1
        finally:
            rows.close()


def make_eval_batches(cfg, mesh=None, batches=None):
    """The EvaluationBatches of evaluation.path or evaluation.holdout, an iterable to go through again and again. mesh as
    in make_batches. batches: training batches of the same config, whose reading of the files and tokenizer are
    shared."""
    return EvaluationBatches(cfg, mesh, *_held_out(cfg, batches))


def _held_out(cfg, batches):
    if batches is not None:
        documents, render = batches.held_out, batches.render
    else:
        training, documents = open_documents(cfg.data, cfg.evaluation)
        render = make_renderer(cfg, load_tokenizer(cfg, training)) if documents is not None else None
    if documents is None:
        raise UserError("evaluation: there is nothing to evaluate on; set evaluation.holdout or evaluation.path")
    return documents, render


def evaluation_sets(cfg, batches, mesh=None):
    """{name: EvaluationBatches} of everything that a run is measured on: "" for evaluation.path or evaluation.holdout,
    then evaluation.sets in their order. Parameters as in make_eval_batches."""
    sets = {}
    if batches.held_out is not None:
        sets[""] = make_eval_batches(cfg, mesh, batches)
    for name, path in cfg.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        documents = _on_all_alike(key, "set of documents", functools.partial(read_documents, cfg.data, path, key))
        sets[name] = EvaluationBatches(cfg, mesh, documents, batches.render)
    trained = getattr(batches, "documents", None)
    for held_out in sets.values():
        if trained is not None and held_out.documents.key != trained.key:
            held_out.summary += _also_trained_on(held_out.documents, trained)
    return sets


def _also_trained_on(documents, training):
    """What to add to the summary of evaluation documents when some of their files are those of the training."""
    known = {os.path.realpath(file.path) for file in training.files}
    both = [file.path for file in documents.files if os.path.realpath(file.path) in known]
    if not both:
        return ""
    return (
        f"; {len(both)} of its {len(documents.files)} files are in data.path too, so it measures what is trained on "
        f"(first: {both[0]})"
    )

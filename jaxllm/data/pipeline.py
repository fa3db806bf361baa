"""Documents to rows of tokens, lane by lane.

Row r of every batch is a *lane*: it is filled from its own stream, the documents at places r, r + B, r + 2B, ... of the
global order, where B is the number of rows per step. The global order is a function of the seed alone (a new shuffle
for every epoch, by grain, which computes any place of it directly), so what row r of step s holds is a function of
(seed, s, r): not of how many processes, threads or devices there are. Where a lane stands is two integers, (document of
its stream, token in that document), so the position of a whole run is an i64[B, 2] array, and resuming on other
hardware is handing lanes to other processes.

Packing is concatenate-and-split inside a lane. A document that does not fit goes on in the lane's next row as a piece
of its own: segment and positions begin again, and it does not see what the earlier row held. Its targets were made
before the split, so the last token of a piece is trained to predict the first of the next one, and every transition
inside a document is trained exactly once. Best-fit packing, which splits less, is not here: it would need a look-ahead
as part of the position.
"""

import collections
import contextlib
import queue
import threading
import weakref

import numpy as np

from jaxllm.section import UserError

LOOK_AHEAD = 16  # documents per call of the tokenizer, which runs them in parallel
LOOK_AHEAD_BYTES = 1 << 20


def empty_rows(num_rows, seq_len):
    """Rows of nothing but padding: i32[num_rows, seq_len] each, loss_weights f32; segment 0, weight 0, an empty
    interval of visible keys."""
    names = ("tokens", "targets", "positions", "segment_ids", "k_start", "k_end")
    rows = {name: np.zeros((num_rows, seq_len), np.int32) for name in names}
    return rows | {"loss_weights": np.zeros((num_rows, seq_len), np.float32)}


class _Lane:
    """One row's stream. `documents` holds what is rendered ahead; its first entry is the document at `cursor`."""

    def __init__(self, cursor):
        self.document, self.offset = (int(value) for value in cursor)
        self.documents = collections.deque()
        self.num_empty = 0  # documents without a token, in a row


class _Packer:
    """Fills rows. Not thread-safe; an iterator of (rows, cursors) that owns the lanes' positions."""

    def __init__(self, documents, render, config, seed, lanes, cursors):
        import grain

        self.documents, self.render, self.config, self.numbers = documents, render, config, lanes
        order = grain.MapDataset.range(len(documents))
        if config.shuffle:
            order = order.seed(seed).shuffle()
        self.order = order.repeat() if config.repeat else order
        self.lanes = [_Lane(cursor) for cursor in cursors]
        self.positions = np.arange(config.seq_len + 1, dtype=np.int32)

    def __iter__(self):
        return self

    def __next__(self):
        rows = empty_rows(len(self.lanes), self.config.seq_len)
        filled, segments = [0] * len(self.lanes), [0] * len(self.lanes)
        unfinished = list(range(len(self.lanes)))
        while unfinished:
            self._render_for([self.lanes[row] for row in unfinished], [self.numbers[row] for row in unfinished])
            unfinished = [row for row in unfinished if self.lanes[row].documents]  # the others' lanes have ended
            for row in unfinished:
                filled[row] = self._fill(rows, row, filled, segments)
            unfinished = [row for row in unfinished if filled[row] < self.config.seq_len]
        if not any(filled):
            raise StopIteration
        return rows, np.array([(lane.document, lane.offset) for lane in self.lanes], np.int64).reshape(-1, 2)

    def _fill(self, rows, row, filled, segments):
        """Copies what is rendered of the lane into its row; returns where the row then ends."""
        lane, begin, seq_len = self.lanes[row], filled[row], self.config.seq_len
        while lane.documents and begin < seq_len:
            document = lane.documents[0]
            count = min(seq_len - begin, len(document.tokens) - lane.offset)
            if count > 0:
                end, source = begin + count, slice(lane.offset, lane.offset + count)
                segments[row] += 1
                for name in ("tokens", "targets", "loss_weights"):
                    rows[name][row, begin:end] = getattr(document, name)[source]
                rows["positions"][row, begin:end] = self.positions[:count]
                rows["segment_ids"][row, begin:end] = segments[row]
                rows["k_start"][row, begin:end] = begin
                rows["k_end"][row, begin:end] = self.positions[begin + 1 : end + 1]
                lane.offset, begin = source.stop, end
            if lane.offset == len(document.tokens):
                lane.documents.popleft()
                lane.document, lane.offset = lane.document + 1, 0
            if count > 0 and self.config.packing == "none":
                return seq_len
        return begin

    def _render_for(self, lanes, numbers):
        """Renders the next documents of every lane that has none, in one call of the tokenizer."""
        waiting = [(lane, number) for lane, number in zip(lanes, numbers, strict=True) if not lane.documents]
        texts, owners, size = [], [], 0
        for ahead in range(-(-LOOK_AHEAD // max(len(waiting), 1))):
            for lane, number in waiting:
                place = int(number) + self.config.global_batch_size * (lane.document + ahead)
                if (self.config.repeat or place < len(self.documents)) and (ahead == 0 or size < LOOK_AHEAD_BYTES):
                    texts.append(self.documents[self.order[place]])
                    owners.append(lane)
                    size += len(texts[-1])
            if size >= LOOK_AHEAD_BYTES:
                break
        rendered = self.render(texts) if texts else []
        for lane, document in zip(owners, rendered, strict=True):
            if not lane.documents and lane.offset > len(document.tokens):
                raise UserError(
                    f"data.path: the position to go on from is token {lane.offset} of a document that has "
                    f"{len(document.tokens)}; the documents or the tokenizer have changed"
                )
            lane.documents.append(document)
            lane.num_empty = 0 if len(document.tokens) else lane.num_empty + 1
            if self.config.repeat and lane.num_empty > 20 * len(self.documents) + 20:
                raise UserError(
                    "data.path: the documents of a row give no tokens at all; look at the tokenizer and at data.add_eos"
                )


class Pipeline:
    """Iterator of (rows, cursors): the training rows of some lanes, packed by a background thread while the last ones
    are being used.

    documents: Documents, or anything with a length and texts by number. render: list of texts -> list of Rendered.
    config: DataConfig.
    lanes: numbers of the rows of the global batch that are wanted here, by default all. cursors: i64[len(lanes), 2],
    where to begin; by default at the start. rows: see `empty_rows`, one row per lane; cursors: where the lanes stand
    *after* these rows. Without config.repeat a lane that has ended gives rows of padding, and the iterator ends when
    all of its lanes have.

    What goes wrong in the thread is raised here, as it is. `close()` ends the thread; so does dropping the iterator.
    """

    def __init__(self, documents, render, config, *, seed=0, lanes=None, cursors=None, prefetch=2):
        lanes = np.arange(config.global_batch_size) if lanes is None else np.asarray(lanes)
        if not config.repeat and len(documents) < config.global_batch_size:
            raise UserError(
                f"data.global_batch_size: {len(documents)} documents cannot fill a batch of "
                f"{config.global_batch_size} rows; lower it, or set data.repeat = true"
            )
        if not 0 <= seed < 2**32:
            raise UserError(f"seed: must be at least 0 and below 2**32, got {seed}")
        self.documents, self.render, self.config, self.seed, self.lanes = documents, render, config, seed, lanes
        self.prefetch, self._stop = prefetch, None
        self.seek(np.zeros((len(lanes), 2), np.int64) if cursors is None else cursors)

    def __iter__(self):
        return self

    def __next__(self):
        if self._queue is None:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def seek(self, cursors):
        """Goes on from cursors i64[len(lanes), 2], as they came with a batch."""
        cursors = np.asarray(cursors)
        if cursors.shape != (len(self.lanes), 2) or not np.issubdtype(cursors.dtype, np.integer) or (cursors < 0).any():
            raise ValueError(
                f"cursors must be non-negative integers [{len(self.lanes)}, 2], "
                f"got {cursors.dtype}{list(cursors.shape)}"
            )
        self.close()
        packer = _Packer(self.documents, self.render, self.config, self.seed, self.lanes, cursors)
        self._queue, stop = queue.Queue(self.prefetch), threading.Event()
        self._thread = threading.Thread(
            target=_produce, args=(packer, self._queue, stop), name="jaxllm-data", daemon=True
        )
        self._stop = weakref.finalize(self, stop.set)  # also when the iterator is dropped, and at exit
        self._thread.start()

    def close(self):
        """Ends the background thread and the iteration; may be called twice."""
        if self._stop is not None:
            self._stop()
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()  # the thread may be waiting for room
            self._thread.join()
            self._queue, self._stop = None, None


def _produce(items, out, stop):
    """The thread: puts items into the queue, last of all the exception that ended them (StopIteration at their regular
    end)."""
    while not stop.is_set():
        try:
            item = next(items)
        except BaseException as error:  # it is raised by the consumer
            item = error
        while not stop.is_set():
            try:
                out.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(item, BaseException):
            return

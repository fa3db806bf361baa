"""Documents to rows of tokens, lane by lane.

Row r of every batch is a *lane*: it is filled from its own stream, the documents at places r, r + B, r + 2B, ... of the
global order, where B is the number of rows per step. The global order is a function of the seed alone (a new shuffle
for every epoch, by grain, which computes any place of it directly), so what row r of step s holds is a function of
(seed, s, r): not of how many processes, threads, workers or devices there are. Where a lane stands is two integers, so
the position of a whole run is an i64[B, 2] array, and resuming on other hardware is handing lanes to other processes.

"concatenate" and "none": the integers are (document of the lane's stream, token in that document). A document that does
not fit goes on in the lane's next row as a piece of its own: segment and positions begin again, and it does not see
what the earlier row held. Its targets were made before the split, so the last token of a piece is trained to predict
the first of the next one, and every transition inside a document is trained exactly once.

"first_fit": the integers are (first document not yet used, bit k: document k + 1 after it is used). A row looks at the
next WINDOW documents of its stream and takes, in their order, each that still fits; none is split, and none waits for
more than WINDOW - 1 rows, since the first always fits into an empty row. Best-fit over the whole source would fill rows
a little better, but has no position that two integers can hold.
The price is at the start: a lane's first row, also after a resume, waits until its whole window is rendered, which for
conversations of some hundred tokens and rows of 2,048 is the work of nine later rows. Nothing of it is done twice;
data.workers divide it, and from a token cache it is a tenth of that. It is not cut by a row that calls itself full
sooner, because the last places are what the window is for.

Where a step has more rows than there are documents, whole documents would give several lanes the same text at the same
time. With "concatenate", documents are then cut into pieces first (`pieces_per_document`), and a lane's stream is one of
pieces. Otherwise a row is made of whole documents, or of one too long for it, and they are repeated; the summary says so.

Several sources with weights are mixed here too, see `order_of`.
"""

import collections
import contextlib
import functools
import hashlib
import math
import queue
import threading
import weakref

import numpy as np

from jaxllm.data import packing_of
from jaxllm.section import UserError

LOOK_AHEAD = 16  # documents per call of the tokenizer, which runs them in parallel, or per task of a worker
LOOK_AHEAD_BYTES = 1 << 20  # of all lanes together in one call, or, times the workers, in one round of their tasks
TASKS_AHEAD = 2  # tasks per lane that workers are given before their results are needed
WINDOW = 63  # documents that first_fit chooses from; 62 of them have a bit in an i64
COUNTS = ("left_out", "truncated", "escaped", "examples")
MIX_BLOCK = 1024  # places of the global order in which sources with weights are shuffled among each other


def empty_rows(num_rows, seq_len):
    """Rows of nothing but padding: i32[num_rows, seq_len] each, loss_weights f32; segment 0, weight 0, an empty
    interval of visible keys."""
    names = ("tokens", "targets", "positions", "segment_ids", "k_start", "k_end")
    rows = {name: np.zeros((num_rows, seq_len), np.int32) for name in names}
    return rows | {"loss_weights": np.zeros((num_rows, seq_len), np.float32)}


class Rendering:
    """Documents by number, rendered: what a Pipeline reads from. `workers.Workers` and `cache.TokenCache` have the same
    methods."""

    def __init__(self, documents, render):
        self.documents, self.render = documents, render
        self.start_counting()

    def start_counting(self):
        """`counts` begin at nothing."""
        self._before = {name: collections.Counter(counts) for name, counts in _counts(self.render).items()}

    def __len__(self):
        return len(self.documents)

    def rendered(self, numbers):
        """list[Rendered] of the documents with these numbers."""
        # Not kept in a list here: a renderer may let go of a long text before it is done.
        if hasattr(self.documents, "where"):
            return self.render((self.documents[number], self.documents.where(number)) for number in numbers)
        return self.render(self.documents[number] for number in numbers)  # plain texts

    @property
    def counts(self):
        """{"left_out", "truncated", "escaped", "examples": what the renderer counted}, see render.Renderer; of what was
        rendered through this object."""
        now = _counts(self.render)
        return {
            name: {key: value if name == "examples" else value - before[key] for key, value in now[name].items()}
            for name, before in self._before.items()
        }

    def where(self, number):
        return self.documents.where(number) if hasattr(self.documents, "where") else f"document {number}"

    def num_bytes(self, number):
        """About how much of its file a document takes; 0 if unknown."""
        return int(self.documents.size[number]) if hasattr(self.documents, "size") else 0


def _counts(render):
    return {name: dict(getattr(render, name, {})) for name in COUNTS}


# --- pieces of documents, where there are fewer than rows --------------------------------------------------------------


def pieces_per_document(config, documents):
    """[(first document, count, pieces)] of the sources that documents are drawn from: into how many pieces each of their
    documents has to be cut so that the rows of a step, as far as they fall to the source, can hold different ones.

    That is ceil(rows / documents), 1 where there are enough. Without data.weights there is one source.
    """
    sources = getattr(documents, "sources", None)
    if config.weights is None or len(config.weights) == 1 or not sources:
        parts = [(0, len(documents), 1.0)]
    else:
        total = math.fsum(config.weights)
        parts = [(first, count, w / total) for (_, first, count), w in zip(sources, config.weights, strict=True)]
    found = []
    for first, count, share in parts:
        rows = math.ceil(round(config.global_batch_size * share, 6))
        found.append((first, count, max(1, -(-rows // count)) if count else 1))
    return found


def stays_whole(config):
    """Whether no document is split that fits into a row."""
    return packing_of(config) != "concatenate"


def cut_for(config, source):
    """`source` (a Rendering or what is like one), or Pieces of it where it has fewer documents than a step has rows."""
    found = [] if stays_whole(config) else pieces_per_document(config, source.documents)
    return Pieces(source, found) if any(pieces > 1 for *_, pieces in found) else source


class Pieces:
    """The documents of a Rendering, those of each source cut into pieces of equally many tokens, to one; numbered through,
    so that the pieces of a document follow each other.

    A piece is what a row gets of a document that goes on in another row: its last target is the first token of the next
    piece. A document that is cut is rendered once and kept: there are fewer of them than rows, each of which would hold
    one anyway.

    sources: [(name, first piece, count)], as those of Documents.
    """

    def __init__(self, source, parts):
        self.documents, self._source, self._parts, self._kept = source.documents, source, parts, {}
        self._edges = np.cumsum([0, *(count * pieces for _, count, pieces in parts)])
        names = [name for name, *_ in getattr(source.documents, "sources", [])] if len(parts) > 1 else [""]
        self.sources = [
            (name, int(first), count * pieces)
            for name, first, (_, count, pieces) in zip(names, self._edges[:-1], parts, strict=True)
        ]
        if hasattr(source, "submit"):
            self.submit, self.count = self._submit, source.count

    def __len__(self):
        return int(self._edges[-1])

    def _place(self, number):
        """(document, piece, pieces) of a number."""
        part = int(np.searchsorted(self._edges, number, side="right")) - 1
        first, _, pieces = self._parts[part]
        document, piece = divmod(int(number - self._edges[part]), pieces)
        return first + document, piece, pieces

    def where(self, number):
        return self._source.where(self._place(number)[0])

    def num_bytes(self, number):
        document, _, pieces = self._place(number)
        return self._source.num_bytes(document) // pieces

    def rendered(self, numbers):
        places = [self._place(number) for number in numbers]
        wanted = list(dict.fromkeys(document for document, *_ in places if document not in self._kept))
        found = dict(zip(wanted, self._source.rendered(wanted) if wanted else [], strict=True))
        self._kept |= {document: found[document] for document, _, pieces in places if pieces > 1 and document in found}
        return [_piece((self._kept | found)[document], piece, pieces) for document, piece, pieces in places]

    def _submit(self, numbers):
        places = [self._place(number) for number in numbers]
        single = [document for document, _, pieces in places if pieces == 1]
        rest = self._source.submit(single) if single else None
        for document, _, pieces in places:
            if pieces > 1 and document not in self._kept:
                self._kept[document] = self._source.submit([document])
        return _LaterPieces(places, self._kept, rest)


class _LaterPieces:
    """What Pieces.submit gives: a Future, as far as it is used here."""

    def __init__(self, places, kept, rest):
        self._places, self._kept, self._rest = places, kept, rest

    def result(self):
        rest = iter(self._rest.result() if self._rest else [])
        return [
            next(rest) if pieces == 1 else _piece(self._kept[document].result()[0], piece, pieces)
            for document, piece, pieces in self._places
        ]


def _piece(document, piece, pieces):
    count = len(document.tokens)
    return type(document)(*(values[piece * count // pieces : (piece + 1) * count // pieces] for values in document))


# --- the order of documents -------------------------------------------------------------------------------------------


class _Mixture:
    """Place of the global order -> (source, number in the source's own endless order), for grain.

    Up to any multiple of MIX_BLOCK places each source has its exact share of them, to one document. Inside a block the
    sources come in an order drawn by the seed: a regular alternation would give lane r, which has every B-th place,
    always the same sources.
    """

    def __init__(self, weights, seed):
        total = math.fsum(weights)
        self.weights, self.seed, self.length = [max(1, round(w / total * 2**40)) for w in weights], seed, 2**62
        self._block = functools.lru_cache(64)(self._make_block)

    def __len__(self):
        return self.length

    def counts(self, places):
        """How many of the first `places` places each source has, i64[sources]: integers, growing with `places`."""
        counts, left, weight_left = [], places, sum(self.weights)
        for weight in self.weights:
            rest = left * (weight_left - weight) // weight_left
            counts.append(left - rest)
            left, weight_left = rest, weight_left - weight
        return np.array(counts, np.int64)

    def places_for(self, wanted):
        """The smallest number of places among which each source has at least wanted[source]."""
        places = 0
        for source, count in enumerate(wanted):
            block = max(0, count * sum(self.weights) // self.weights[source] // MIX_BLOCK - 1)
            while self.counts((block + 1) * MIX_BLOCK)[source] < count:
                block += 1
            sources, numbers = self._block(block)
            last = np.flatnonzero((sources == source) & (numbers < count))
            places = max(places, block * MIX_BLOCK + int(last.max(initial=-1)) + 1)
        return places

    def __getitem__(self, place):
        block, inside = divmod(int(place), MIX_BLOCK)
        sources, numbers = self._block(block)
        return int(sources[inside]), int(numbers[inside])

    def _make_block(self, block):
        before = self.counts(block * MIX_BLOCK)
        share = self.counts((block + 1) * MIX_BLOCK) - before
        drawn = hashlib.shake_128(f"{self.seed} {block}".encode()).digest(8 * MIX_BLOCK)
        sources = np.repeat(np.arange(len(share)), share)[np.argsort(np.frombuffer(drawn, "<u8"), kind="stable")]
        numbers = np.empty(MIX_BLOCK, np.int64)
        for source in range(len(share)):
            mine = sources == source
            numbers[mine] = before[source] + np.arange(mine.sum())
        return sources, numbers


def order_of(config, seed, documents):
    """(order, length): `order[place]` is the number of the document at a place of the global order; length: how many
    places there are, None without end. documents may be Pieces.

    Without data.weights an epoch is every document once. With them, documents are drawn from the sources (`documents.
    sources`: name, first number, count) in proportion to their weights, each source in an order and in epochs of its
    own, and the data ends when every source has been read config.epochs times, so the smaller ones more often.
    """
    import grain

    def shuffled(dataset, seed):
        return dataset.seed(seed % 2**32).shuffle() if config.shuffle else dataset

    epochs = config.epochs or (None if config.repeat else 1)
    sources = getattr(documents, "sources", None)
    if config.weights is None or len(config.weights) == 1 or not sources:
        order = shuffled(grain.MapDataset.range(len(documents)), seed)
        return order.repeat(epochs), None if epochs is None else epochs * len(documents)
    for name, _, count in sources:
        if not count:
            raise UserError(f"data.weights: there is no document to draw from {name}; leave it out of data.path")
    parts = [
        shuffled(grain.MapDataset.range(first, first + count), seed + number).repeat()
        for number, (_, first, count) in enumerate(sources)
    ]
    mixture = _Mixture(config.weights, seed)
    length = None if epochs is None else mixture.places_for([epochs * count for _, _, count in sources])
    return grain.MapDataset.select_from_datasets(parts, mixture), length


# --- packing ----------------------------------------------------------------------------------------------------------


class _Lane:
    """One row's stream. `documents` holds what is rendered from the document at the cursor on, `tasks` what workers
    render after that; `requested` is the document after both. `used`: first_fit's bits; `next`: the document that
    first_fit looks at next in the row at hand."""

    def __init__(self, number, cursor, first_fit):
        self.number, (self.document, second) = int(number), (int(value) for value in cursor)
        self.offset, self.used = (0, second) if first_fit else (second, 0)
        self.documents, self.tasks = collections.deque(), collections.deque()
        self.requested = self.next = self.document
        self.num_empty = 0  # documents without a token, in a row

    @property
    def cursor(self):
        return self.document, self.used or self.offset

    def has(self, document):
        """Whether it is rendered, and every used one with it."""
        return len(self.documents) > max(document - self.document, self.used.bit_length())

    def drop_first(self):
        """Moves the cursor to the next document that is not used."""
        used = 1
        while used:
            self.documents.popleft()
            self.document += 1
            used, self.used = self.used & 1, self.used >> 1


def ordered(source, config, seed):
    """(source, order_of it): the source that a Packer numbers its documents by, cut into pieces where that is needed."""
    source = cut_for(config, source)
    return source, order_of(config, seed, source if isinstance(source, Pieces) else source.documents)


def too_few(source, config, seed):
    """What is wrong when the data ends before every row of one step got a document; None if it does not."""
    length = ordered(source, config, seed)[1][1]
    if length is None or length >= config.global_batch_size:
        return None
    passes = f", {config.epochs} times over," if config.epochs else ""
    return (
        f"data.global_batch_size: {len(source)} documents{passes} cannot fill a batch of "
        f"{config.global_batch_size} rows; lower it, or set data.repeat = true"
    )


class Packer:
    """Fills rows, see Pipeline. Not thread-safe; an iterator of (rows, cursors) that owns the lanes' positions."""

    def __init__(self, source, config, seed, lanes, cursors):
        self.config, self.packing = config, packing_of(config)
        self.source, (self.order, self.length) = ordered(source, config, seed)
        self.lanes = [
            _Lane(number, cursor, self.packing == "first_fit") for number, cursor in zip(lanes, cursors, strict=True)
        ]
        self.positions = np.arange(config.seq_len + 1, dtype=np.int32)

    def __iter__(self):
        return self

    def __next__(self):
        rows = empty_rows(len(self.lanes), self.config.seq_len)
        filled, segments = [0] * len(self.lanes), [0] * len(self.lanes)
        fill = self._fill_whole if self.packing == "first_fit" else self._fill
        for lane in self.lanes:
            lane.next = lane.document
        unfinished = list(range(len(self.lanes)))
        while unfinished:
            self._render_for([self.lanes[row] for row in unfinished])
            unfinished = [row for row in unfinished if self.lanes[row].has(self.lanes[row].next)]  # others have ended
            unfinished = [row for row in unfinished if not fill(rows, row, filled, segments)]
        if not any(filled):
            raise StopIteration
        return rows, np.array([lane.cursor for lane in self.lanes], np.int64).reshape(-1, 2)

    def _fill(self, rows, row, filled, segments):
        """Copies what is rendered of the lane into its row; returns whether the row is finished."""
        lane, seq_len = self.lanes[row], self.config.seq_len
        while lane.documents and filled[row] < seq_len:
            document = lane.documents[0]
            count = min(seq_len - filled[row], len(document.tokens) - lane.offset)
            if count > 0:
                self._copy(rows, row, filled, segments, document, slice(lane.offset, lane.offset + count))
                lane.offset += count
            if lane.offset == len(document.tokens):
                lane.offset = 0
                lane.drop_first()
            if count > 0 and self.packing == "none":
                filled[row] = seq_len
        lane.next = lane.document
        return filled[row] == seq_len

    def _fill_whole(self, rows, row, filled, segments):
        """As `_fill`, with the documents of the window that fit."""
        lane, seq_len = self.lanes[row], self.config.seq_len
        while lane.has(lane.next) and lane.next < lane.document + WINDOW and filled[row] < seq_len:
            ahead, lane.next = lane.next - lane.document, lane.next + 1
            document = lane.documents[ahead]
            length = len(document.tokens)
            if length > seq_len:
                raise UserError(
                    f'data.packing: "first_fit" splits no document, and {self._where(lane, lane.next - 1)} has {length:,} '
                    f'tokens, more than data.seq_len = {seq_len}; raise it, or set data.packing = "concatenate"'
                )
            if length > seq_len - filled[row] or (ahead and lane.used >> (ahead - 1) & 1):
                continue
            if length:
                self._copy(rows, row, filled, segments, document, slice(0, length))
            if ahead:
                lane.used |= 1 << (ahead - 1)
            else:
                lane.drop_first()
                lane.next = max(lane.next, lane.document)
        return filled[row] == seq_len or lane.next >= lane.document + WINDOW

    def _copy(self, rows, row, filled, segments, document, source):
        count = source.stop - source.start
        begin, end = filled[row], filled[row] + count
        segments[row] += 1
        for name in ("tokens", "targets", "loss_weights"):
            rows[name][row, begin:end] = getattr(document, name)[source]
        rows["positions"][row, begin:end] = self.positions[:count]
        rows["segment_ids"][row, begin:end] = segments[row]
        rows["k_start"][row, begin:end] = begin
        rows["k_end"][row, begin:end] = self.positions[begin + 1 : end + 1]
        filled[row] = end

    def _number(self, lane, document):
        """The number of a document of a lane's stream, None behind the end."""
        place = lane.number + self.config.global_batch_size * document
        return int(self.order[place]) if self.length is None or place < self.length else None

    def _where(self, lane, document):
        return self.source.where(self._number(lane, document))

    def _render_for(self, lanes):
        """Renders on until every lane has its next document, or has ended."""
        while waiting := [lane for lane in lanes if not lane.has(lane.next) and self._goes_on(lane)]:
            if hasattr(self.source, "submit"):
                self._collect(lanes, waiting)
            else:
                self._render_together(waiting)

    def _goes_on(self, lane):
        return bool(lane.tasks) or self._number(lane, lane.requested) is not None

    def _collect(self, lanes, waiting):
        """Takes a task of every waiting lane from the workers, who are given the ones after that."""
        for lane in lanes:
            self._order_ahead(lane)
        for lane in waiting:
            future, count = lane.tasks.popleft()
            self._add([lane] * count, future.result())
            self._order_ahead(lane)

    def _render_together(self, waiting):
        """Renders the next documents of these lanes in one call of the tokenizer."""
        numbers, owners, size = [], [], 0
        for ahead in range(-(-LOOK_AHEAD // len(waiting))):
            for lane in waiting:
                number = self._number(lane, lane.requested)
                if number is not None and (ahead == 0 or size < LOOK_AHEAD_BYTES):
                    numbers.append(number)
                    owners.append(lane)
                    lane.requested += 1
                    size += self.source.num_bytes(number)
            if size >= LOOK_AHEAD_BYTES:
                break
        self._add(owners, self.source.rendered(numbers))

    def _order_ahead(self, lane):
        """Keeps TASKS_AHEAD tasks of the lane under way."""
        limit = LOOK_AHEAD_BYTES * self.source.count // len(self.lanes)
        while len(lane.tasks) < TASKS_AHEAD:
            numbers, size = [], 0
            while len(numbers) < LOOK_AHEAD and (not numbers or size < limit):
                number = self._number(lane, lane.requested)
                if number is None:
                    break
                numbers.append(number)
                lane.requested += 1
                size += self.source.num_bytes(number)
            if not numbers:
                return
            lane.tasks.append((self.source.submit(numbers), len(numbers)))

    def _add(self, lanes, documents):
        for lane, document in zip(lanes, documents, strict=True):
            if not lane.documents and lane.offset > len(document.tokens):
                raise UserError(
                    f"data.path: the position to go on from is token {lane.offset} of a document that has "
                    f"{len(document.tokens)}; the documents or the tokenizer have changed"
                )
            lane.documents.append(document)
            lane.num_empty = 0 if len(document.tokens) else lane.num_empty + 1
            if self.length is None and lane.num_empty > 20 * len(self.source) + 20:
                raise UserError(
                    "data.path: the documents of a row give no tokens at all; look at the tokenizer and at data.add_eos"
                )


class Pipeline:
    """Iterator of (rows, cursors): the training rows of some lanes, packed by a background thread while the last ones
    are being used.

    documents: Documents, or anything with a length and texts by number. render: the renderer of its records; None when
    `documents` renders by itself (Rendering, Workers, TokenCache). config: DataConfig.
    lanes: numbers of the rows of the global batch that are wanted here, by default all. cursors: i64[len(lanes), 2],
    where to begin; by default at the start. rows: see `empty_rows`, one row per lane; cursors: where the lanes stand
    *after* these rows. When the data ends (config.repeat, config.epochs) a lane that has ended gives rows of padding, and
    the iterator ends when all of its lanes have.

    What goes wrong in the thread is raised here, as it is. `close()` ends the thread; so does dropping the iterator.
    """

    def __init__(self, documents, render, config, *, seed=0, lanes=None, cursors=None, prefetch=2):
        lanes = np.arange(config.global_batch_size) if lanes is None else np.asarray(lanes)
        source = Rendering(documents, render) if render is not None else documents
        if wrong := too_few(source, config, seed):
            raise UserError(wrong)
        if not 0 <= seed < 2**32:
            raise UserError(f"seed: must be at least 0 and below 2**32, got {seed}")
        self.source, self.config, self.seed, self.lanes = source, config, seed, lanes
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
        packer = Packer(self.source, self.config, self.seed, self.lanes, cursors)
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

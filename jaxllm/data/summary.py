"""What a source of documents amounts to as tokens and rows, told before training on it.

For conversations and prompts every document is rendered once, which also finds, before the first step, any that cannot
be. For text and tokens a fixed sample is rendered and the rest estimated by size, unless a token cache knows.
"""

import array

import numpy as np

from jaxllm.data import packing_of
from jaxllm.data.pipeline import Packer, Rendering, pieces_per_document, stays_whole
from jaxllm.data.render import Rendered

TOGETHER = 64  # documents per call of the renderer
TOGETHER_BYTES = 1 << 20
SAMPLE, SAMPLE_BYTES = 256, 1 << 20
LANES, ROWS = 8, 16  # packed to see how full rows are


class Totals:
    """What rendered documents amount to: their `lengths` i32, in their order, how many of their tokens are trained, and
    what the renderer counted (Rendering.counts)."""

    def __init__(self, lengths=(), trained=0, counts=None):
        self.lengths, self.trained, self.counts = array.array("i", lengths), trained, counts or {}

    def add(self, documents):
        for document in documents:
            self.lengths.append(len(document.tokens))
            self.trained += int(np.count_nonzero(document.loss_weights))


def render_all(source):
    """Every document of a Rendering or Workers in turn, as lists of Rendered; workers render ahead."""
    if not hasattr(source, "submit"):
        yield from map(source.rendered, _groups(source))
        return
    ahead = []
    for group in _groups(source):
        ahead.append(source.submit(group))
        if len(ahead) > 2 * source.count:
            yield ahead.pop(0).result()
    for future in ahead:
        yield future.result()


def _groups(source):
    group, size = [], 0
    for number in range(len(source)):
        group.append(number)
        size += source.num_bytes(number)
        if len(group) == TOGETHER or size >= TOGETHER_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def count_all(source):
    """The Totals of a Rendering or Workers, by rendering all of it."""
    totals = Totals()
    for documents in render_all(source):
        totals.add(documents)
    totals.counts = source.counts
    return totals


def describe(config, seed, documents, source, totals=None):
    """Documents, tokens, longest, what was cut or left out, share trained, and how full rows are, in one line.

    totals: of all documents, if known; otherwise a sample of them is rendered.
    """
    if totals is None:
        return _describe_sample(config, seed, documents, source)
    lengths = np.array(totals.lengths, np.int64)
    real = lengths[lengths > 0]
    exact = _Lengths(documents, lengths)
    parts = [
        f"{len(real):,} documents, {real.sum():,} tokens, the longest {real.max(initial=0):,}",
        f"{totals.trained / max(real.sum(), 1):.1%} of the tokens trained",
        *_split(config, int((real > config.seq_len).sum()), ""),
        *_few(config, documents),
        *_changed(totals.counts, len(lengths), int(real.sum())),
        _fullness(config, seed, exact, int(real.sum())),
    ]
    return "; ".join(parts)


def _describe_sample(config, seed, documents, source):
    sizes = np.asarray(documents.size, np.int64)
    chosen = np.random.RandomState(0).permutation(len(documents))[:SAMPLE]
    lengths, seen = [], 0.0
    for number in chosen.tolist():
        part, share = _beginning(documents[number], (SAMPLE_BYTES - seen) / max(int(sizes[number]), 1))
        lengths.append(len(source.render([(part, documents.where(number))])[0].tokens))
        seen += share * int(sizes[number])
        if seen >= SAMPLE_BYTES:
            break
    whole = len(lengths) == len(documents) and share == 1
    ratio, sampled, about = sum(lengths) / max(seen, 1), len(lengths), "" if whole else "about "
    tokens, lengths = (sum(lengths), np.array(lengths)) if whole else (round(sizes.sum() * ratio), sizes * ratio)
    trained = max(tokens - len(documents), 0)  # of texts and token ids all but each document's first token
    parts = [
        f"{len(documents):,} documents, {about}{tokens:,} tokens, the longest {about}{round(lengths.max()):,}",
        f"{trained / max(tokens, 1):.1%} of the tokens trained",
        *_split(config, int((lengths > config.seq_len).sum()), about),
        *_few(config, documents),
        _fullness(config, seed, source, tokens),
        f"estimated from {sampled:,} documents{', of the last one its beginning' if share < 1 else ''}",
    ]
    return "; ".join(parts)


def _beginning(record, share):
    """(the first `share` of a text or of token ids, the share that this is)."""
    count = len(record) if share >= 1 else max(1, int(len(record) * share))
    return record[:count], count / max(len(record), 1)


def _few(config, documents):
    """What is done where a step has more rows than there are documents to draw from."""
    for first, count, pieces in pieces_per_document(config, documents):
        if pieces > 1:
            of = f" from number {first + 1:,} on" if count < len(documents) else ""
            few = f"{count:,} document{'s' * (count > 1)}{of} for more rows of a step"
            yield (
                f"{few}: rows of one step repeat documents"
                if stays_whole(config)
                else f"{few}: each is cut into {pieces} pieces of equally many tokens, so that rows differ"
            )


def _changed(counts, num_documents, num_tokens):
    """What was left out, cut or escaped, each with its share and its first example."""
    examples = counts.get("examples", {})

    def example(reason):
        return f" (first: {examples[reason]})" if reason in examples else ""

    for reason, number in sorted(counts.get("left_out", {}).items()):
        yield f"left out as {reason}: {number:,}, {number / num_documents:.2%} of the documents{example(reason)}"
    if cut := counts.get("truncated", {}).get("documents"):
        lost = counts["truncated"]["tokens"]
        yield (
            f"cut at data.seq_len: {cut:,}, {cut / num_documents:.2%} of the documents, and {lost:,} tokens, "
            f"{lost / (num_tokens + lost):.2%}, {counts['truncated']['answer_tokens']:,} of them of answers; of {counts['truncated']['without_answer']:,} "
            f"nothing of the answer is left{example('truncated')}"
        )
    if escaped := sum(counts.get("escaped", {}).values()):
        yield f"special tokens spelled in the data and kept as text: {escaped:,}"


def _split(config, long, about):
    if not long or packing_of(config) == "first_fit":
        return []
    return [f"{about}{long:,} are longer than a row of {config.seq_len:,} and split, no token dropped"]


def _fullness(config, seed, source, tokens):
    if packing_of(config) == "concatenate":
        rows = 1.0
        if config.epochs or not config.repeat:  # each lane's last row ends anywhere
            tokens *= config.epochs or 1
            rows = tokens / (tokens + config.global_batch_size * config.seq_len / 2)
        return f"rows {rows:.1%} full"
    lanes = np.arange(min(config.global_batch_size, LANES))
    packer = Packer(source, config, seed, lanes, np.zeros((len(lanes), 2), np.int64))
    filled = [np.count_nonzero(rows["segment_ids"]) for (rows, _), _ in zip(packer, range(ROWS), strict=False)]
    share = sum(filled) / max(len(filled) * len(lanes) * config.seq_len, 1)
    return f"rows {share:.1%} full ({packing_of(config)}, the first {len(filled) * len(lanes)})"


class _Lengths(Rendering):
    """Documents of which only the length is known."""

    def __init__(self, documents, lengths):
        super().__init__(documents, None)
        self.lengths = lengths

    def num_bytes(self, number):
        return 0

    def rendered(self, numbers):
        zeros = np.zeros(int(self.lengths.max(initial=0)), np.int32)
        return [Rendered(*(zeros[: self.lengths[number]],) * 3) for number in numbers]

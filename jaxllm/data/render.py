"""Documents to tokens: which tokenizer, and what of a document is trained.

A text document becomes [BOS] text [EOS] with exactly one BOS, a pair [BOS] prompt completion [EOS], a conversation what
the model's template makes of it (chat.py). Targets are a document's own tokens moved by one, made here on the whole
document, so that nothing later (splitting, packing, sharding) can shift them again. Text that spells a special token
stays text, and is counted. Padding does not exist at this level, and later it is told by segment id alone: a tokenizer
whose pad token is its EOS needs no special care.

The ids are those of the tokenizer's own tokenizer.json, with its truncation and padding switched off. transformers is
not used: it would import a second to do the same, and it reads a tokenizer.model (SentencePiece, as Mistral publishes
it) with merges in the order of ids, which is another tokenizer for every indented text. Here a tokenizer.model is read
with merges in the order of scores, as SentencePiece itself does. Mistral's tekken.json is not read.
"""

import array
import bisect
import collections
import copy
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import tempfile
from typing import NamedTuple

import numpy as np

from jaxllm.data.sources import open_documents
from jaxllm.hub import resolve_model_path
from jaxllm.section import UserError

SPECIAL = {
    "pad_token": "<|pad|>",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
}  # ids 0, 1, 2, as Llama numbers BOS and EOS
TRAINING_CHARACTERS = 32_000_000
MORE_TEMPLATES = "additional_chat_templates"  # transformers' folder of chat templates with other names than "default"
LONG, CHUNK, OVERLAP = 1 << 18, 1 << 15, 1 << 12  # characters: texts longer than LONG are encoded in overlapping chunks
CALL_CHARACTERS = 1 << 18  # bounds what the library needs, many bytes of memory per character of one call


class Rendered(NamedTuple):
    """One document: tokens, targets [n], i32 or narrower (the next token), and loss_weights bool[n] (False where there is
    no target to learn: the last place). Rows hold ids as i32 and weights as float32; a document of 30 million tokens had
    better not."""

    tokens: np.ndarray
    targets: np.ndarray
    loss_weights: np.ndarray

    @classmethod
    def all_trained(cls, tokens):
        """The document of the tokens [n]; every token but the first is a target."""
        return cls.of_shifted(np.append(tokens, np.zeros(1, tokens.dtype)))

    @classmethod
    def of_shifted(cls, shifted):
        """As all_trained, of the tokens shifted[:-1]. Not copied: targets are the same array from its second place on, so
        its last place, which is no token, is the target where there is none."""
        weights = np.ones(len(shifted) - 1, bool)
        weights[-1:] = False
        return cls(shifted[:-1], shifted[1:], weights)

    @classmethod
    def partly_trained(cls, tokens, trained):
        """The document of the tokens i32[n], of which those marked in `trained` bool[n] are targets."""
        targets, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), bool)
        targets[:-1], weights[:-1] = tokens[1:], trained[1:]
        return cls(np.asarray(tokens, np.int32), targets, weights)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer from disk. file: its tokenizer.json or tokenizer.model. bos_id, eos_id: None if it has none.
    vocab_size: the largest id + 1. adds_bos: it does so by itself. dtype: the smaller of u16 and i32 that holds its ids."""

    file: pathlib.Path
    bos_id: int | None
    eos_id: int | None
    vocab_size: int
    adds_bos: bool
    library: object

    @property
    def folder(self):
        """Where its files are."""
        return self.file.parent

    @property
    def dtype(self):
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.library.encode_special_tokens = True  # the library forgets this when it is pickled

    @classmethod
    def load(cls, path, key="data.tokenizer"):
        """From a folder that holds tokenizer.json or a SentencePiece tokenizer.model, or from such a file; BOS and EOS
        are named by tokenizer_config.json beside it, or by the tokenizer.model."""
        import tokenizers

        path = pathlib.Path(path).expanduser()
        file = _tokenizer_file(path, key)
        if ".model" in file.name:
            library, names = _sentencepiece(file, key)
        else:
            try:
                library, names = tokenizers.Tokenizer.from_file(str(file)), {}
            except Exception as error:  # the library raises nothing more precise
                raise UserError(f"{key}: {file} is no tokenizer of the tokenizers library: {error}") from None
        library.no_truncation()
        library.no_padding()
        names |= tokenizer_settings(file.parent)
        bos_id, eos_id = (_special_id(library, names.get(name), name, file) for name in ("bos_token", "eos_token"))
        adds_bos = bos_id is not None and library.encode("a").ids[:1] == [bos_id]
        library.encode_special_tokens = True
        vocab_size = max(library.get_vocab(with_added_tokens=True).values()) + 1
        return cls(file, bos_id, eos_id, vocab_size, adds_bos, library)

    def encode_batch(self, texts, before=(), after=()):
        """Token ids of each text, [n] of self.dtype, without BOS and EOS; equal to the library's for the whole text, in
        bounded memory for a long one. before, after: ids to put around each."""
        out, group, characters = [None] * len(texts), [], 0
        for number, text in enumerate(texts):
            if len(text) > LONG:
                out[number] = self._encode_long(text, before, after)
                continue
            group.append(number)
            characters += len(text)
            if characters > CALL_CHARACTERS:
                self._encode_into(out, texts, group, before, after)
                group, characters = [], 0
        self._encode_into(out, texts, group, before, after)
        return out

    def encode_continuing(self, texts):
        """As encode_batch, for texts that go on where other text ended: a tokenizer that puts a space before every text
        (SentencePiece's) does not do so here."""
        if self.starts_plainly:
            return self.encode_batch(texts)
        newline = self.encode_batch(["\n"])[0]
        after = self.encode_batch(["\n" + text for text in texts])
        return [
            ids[len(newline) :] if np.array_equal(ids[: len(newline)], newline) else self.encode_batch([text])[0]
            for text, ids in zip(texts, after, strict=True)
        ]

    @functools.cached_property
    def starts_plainly(self):
        """Whether the tokenizer puts nothing before a text."""
        newline, letter, both = self.encode_batch(["\n", "a", "\na"])
        return np.array_equal(np.concatenate([newline, letter]), both)

    @functools.cached_property
    def control_tokens(self):
        """{text: id} of the special tokens."""
        added = self.library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def decode(self, ids, skip_special_tokens=False):
        """The text of token ids."""
        return self.library.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def save(self, folder):
        """Copies the tokenizer's files into a folder, where transformers' AutoTokenizer finds them."""
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        names = (
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            "added_tokens.json",
            "tokenizer.model",
        )
        for name in names:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, pathlib.Path(folder) / name)
        if (self.folder / MORE_TEMPLATES).is_dir():
            shutil.copytree(self.folder / MORE_TEMPLATES, pathlib.Path(folder) / MORE_TEMPLATES, dirs_exist_ok=True)

    def _encode_into(self, out, texts, group, before, after):
        # "fast" gives the same ids in less time, without places.
        encodings = self.library.encode_batch_fast([texts[number] for number in group], add_special_tokens=False)
        for number, encoding in zip(group, encodings, strict=True):
            out[number] = np.array([*before, *encoding.ids, *after], self.dtype)

    def _encode_long(self, text, before, after):
        """Encodes overlapping chunks and joins two where both have the same tokens at the same places all around the
        middle of their overlap.

        Far from its ends a chunk is cut into the same tokens as the whole text, because pre-tokenization and merges are
        local; where the two chunks disagree (a text that is one word without end), the whole text is encoded at once,
        at the library's price in memory.
        """
        out = array.array(self.dtype.char, before)  # it grows in place; pieces joined at the end would be there twice
        last = None
        for chunk in self._chunks(text):
            if last is not None:
                middle = chunk.begin + OVERLAP // 2
                window = (middle - OVERLAP // 4, middle, middle + OVERLAP // 4)
                low, cut, high = map(last.first_token_from, window)
                next_low, next_cut, next_high = map(chunk.first_token_from, window)
                agree = last.tokens(low, high) == chunk.tokens(next_low, next_high)
                if not agree or cut - low < 8 or high - cut < 8:
                    del out, last, chunk
                    ids = self.library.encode(text, add_special_tokens=False).ids
                    return np.array([*before, *ids, *after], self.dtype)
                out.extend(last.ids[last.taken : cut])
                chunk.taken = next_cut
            last = chunk
        out.extend(last.ids[last.taken :])
        out.extend(after)
        return np.frombuffer(out, self.dtype)

    def _chunks(self, text):
        """The overlapping _Chunks of a text, as many encoded at a time as one call may have characters, and each let go of
        before the next call."""
        begins = range(0, len(text) - OVERLAP, CHUNK - OVERLAP)
        together = CALL_CHARACTERS // CHUNK
        for first in range(0, len(begins), together):
            group = begins[first : first + together]
            encodings = self.library.encode_batch([text[b : b + CHUNK] for b in group], add_special_tokens=False)
            for begin in group:
                yield _Chunk(begin, encodings.pop(0))


class _Chunk:
    """A chunk of a text, encoded. begin: its first character's place in the text; ids: list of int; taken: how many of
    them the chunk before has given."""

    def __init__(self, begin, encoding):
        self.begin, self.ids, self.taken, self._encoding = begin, encoding.ids, 0, encoding

    def _place(self, token):
        """Where a token begins in the text. Asked token by token: to make the library's list of all places takes as long
        as to encode."""
        return self.begin + self._encoding.token_to_chars(token)[0]

    def first_token_from(self, place):
        """Number of the first token that begins at or behind a place of the text."""
        return bisect.bisect_left(range(len(self.ids)), place, key=self._place)

    def tokens(self, low, high):
        """[(id, place)] of the tokens low to high."""
        return [(self.ids[token], self._place(token)) for token in range(low, high)]


def _tokenizer_file(path, key):
    """tokenizer.json of a folder, else its tokenizer.model under any of the names that Mistral gives it; or the file."""
    if not path.is_dir():
        file = path
    elif (path / "tokenizer.json").is_file() or not (models := sorted(path.glob("*.model*"))):
        file = path / "tokenizer.json"
    elif (path / "tokenizer.model") in models:
        file = path / "tokenizer.model"
    else:
        file = models[-1]  # the newest version
    if not file.is_file():
        raise UserError(
            f"{key}: no tokenizer.json at {path}, and no tokenizer.model of SentencePiece; save one there with "
            "save_pretrained of a transformers tokenizer"
        )
    if file.name.startswith("tekken"):
        raise UserError(f"{key}: {file}: Mistral's tekken format is not read; give the model's tokenizer.json")
    return file


def tokenizer_settings(folder):
    """What special_tokens_map.json and tokenizer_config.json of a tokenizer's folder say, as one dict."""
    settings = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                settings.update(json.loads((folder / name).read_text(encoding="utf-8")))
            except ValueError as error:
                raise UserError(f"data.tokenizer: {folder / name} is no JSON object: {error}") from None
    return settings


def _sentencepiece(file, key):
    """(library, names of BOS and EOS) of a SentencePiece BPE model: the same ids as SentencePiece's own encoder.

    Its merges are not in the file: any two pieces whose joint text is a piece merge, the best score first, and among
    equals (the runs of spaces) the piece of the lowest number. The format: github.com/google/sentencepiece,
    src/sentencepiece_model.proto.
    """
    from tokenizers import AddedToken, decoders, normalizers, processors
    from tokenizers import Tokenizer as Library
    from tokenizers.models import BPE

    NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4
    try:
        pieces, trainer, normalizer = [], {}, {}
        for number, value in _protobuf_fields(file.read_bytes()):
            if number == 1:
                fields = dict(_protobuf_fields(value))
                score = struct.unpack("<f", fields.get(2, b"\0\0\0\0"))[0]
                pieces.append((fields[1].decode(), score, fields.get(3, NORMAL)))
            elif number in (2, 3):
                (trainer if number == 2 else normalizer).update(_protobuf_fields(value))
    except (IndexError, KeyError, TypeError, ValueError, struct.error):
        raise UserError(f"{key}: {file} is no SentencePiece model") from None
    # model_type BPE, no remove_extra_whitespaces (both are numbers of the proto), no table of Unicode rules
    if trainer.get(3) != 2 or normalizer.get(4, 1) or normalizer.get(2) or not pieces:
        raise UserError(f"{key}: {file} is no SentencePiece BPE without normalisation; give the model's tokenizer.json")
    vocab = {text: number for number, (text, _, _) in enumerate(pieces)}
    usable = {text for text, _, kind in pieces if kind in (NORMAL, USER)}
    merges = sorted(
        (-score, number, vocab[text[:cut]], vocab[text[cut:]])
        for number, (text, score, kind) in enumerate(pieces)
        if kind == NORMAL
        for cut in range(1, len(text))
        if text[:cut] in usable and text[cut:] in usable
    )
    unknown = next((text for text, _, kind in pieces if kind == UNKNOWN), None)
    library = Library(
        BPE(
            vocab,
            [(pieces[left][0], pieces[right][0]) for *_, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(trainer.get(35)),
        )
    )
    prefix = [normalizers.Prepend("▁")] if normalizer.get(3, 1) else []
    library.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    library.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text, _, kind in pieces if kind in (UNKNOWN, CONTROL)]
    )
    library.add_tokens([AddedToken(text, normalized=False) for text, _, kind in pieces if kind == USER])
    bos, eos = (pieces[trainer.get(number, default)][0] for number, default in ((41, 1), (42, 2)))
    library.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
    )
    return library, {"bos_token": bos, "eos_token": eos}


def _protobuf_fields(data):
    """(number, value) of each field of a protobuf message: varints as int, everything else as bytes."""
    place = 0

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}[wire] if wire != 2 else varint()
        if place + size > len(data):
            raise ValueError("cut off")
        yield number, data[place : place + size]
        place += size


def _special_id(library, name, field, file):
    """The id of a special token as tokenizer_config.json names it: a string, or an object with its content."""
    if name is None:
        return None
    text = name["content"] if isinstance(name, dict) else name
    token = library.token_to_id(text)
    if token is None:
        raise UserError(f"{file.parent}/tokenizer_config.json: {field} is {text!r}, which {file.name} does not contain")
    return token


def load_tokenizer(cfg, documents=None):
    """The Tokenizer of a run: data.tokenizer, else that of model.path's folder; "bpe:N" is trained at the first call
    and found again later.

    documents: what to train it on, by default the run's training documents. With several processes every process must
    call it. None for kind "tokens" when nothing names one. Raises UserError when there is no tokenizer or when it has
    ids that the model has no embedding for.
    """
    wanted, key = cfg.data.tokenizer, "data.tokenizer"
    if wanted is None:
        wanted, key = cfg.model.path, "model.path"
        if wanted is None and cfg.data.kind == "tokens":
            return None
        if wanted is None:
            raise UserError(
                'data.tokenizer: is not set, and neither is model.path; name a tokenizer folder, or "bpe:4096" to '
                "train one"
            )
        wanted = str(resolve_model_path(wanted, cfg.model.revision)[0])
    if wanted.startswith("bpe:"):
        documents = documents if documents is not None else open_documents(cfg.data, cfg.evaluation)[0]
        wanted = _trained(documents, int(wanted.removeprefix("bpe:")), pathlib.Path(cfg.output_dir) / "tokenizer")
    tokenizer = Tokenizer.load(wanted, key)
    rows = cfg.model.vocab_size
    if rows is not None and tokenizer.vocab_size > rows:
        last = tokenizer.library.id_to_token(tokenizer.vocab_size - 1)
        raise UserError(
            f"model.vocab_size: the tokenizer in {tokenizer.folder} ends at id {tokenizer.vocab_size - 1} ({last!r}), "
            f"so {tokenizer.vocab_size} entries, but the embedding has {rows} rows; raise model.vocab_size or use the "
            "model's own tokenizer"
        )
    return tokenizer


def _trained(documents, size, folder):
    """Trains on process 0 unless the folder already holds this very tokenizer; the others wait for it."""
    from jaxllm.data.cache import on_first_process

    recipe = {"byte_level_bpe": size, "documents": documents.fingerprint}
    on_first_process(lambda: None if folder.exists() else train_tokenizer(documents, size, folder, recipe))
    made_by = folder / "recipe.json"
    if not made_by.is_file() or json.loads(made_by.read_text(encoding="utf-8")) != recipe:
        raise UserError(
            f'data.tokenizer: {folder} holds a tokenizer of another size or of other documents than "bpe:{size}" would '
            f"be trained on now; set data.tokenizer to that folder to go on with it, or choose another output_dir"
        )
    return folder


def train_tokenizer(documents, size, folder, recipe):
    """Trains a byte-level BPE of `size` entries and writes a folder that transformers' AutoTokenizer opens, with the
    same ids plus BOS.

    Trained on all documents, or on a fixed random choice of them that holds TRAINING_CHARACTERS. A text always decodes
    to itself: all bytes are in the vocabulary, and nothing is normalised.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL.values()),
        show_progress=False,
    )
    library.train_from_iterator(_sample(documents), trainer)
    bos = SPECIAL["bos_token"]
    library.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, library.token_to_id(bos))]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **SPECIAL}
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = pathlib.Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder.parent))
    try:
        library.save(str(beside / "tokenizer.json"))
        for name, value in (("tokenizer_config.json", config), ("recipe.json", recipe)):
            (beside / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        beside.chmod(0o755)
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _sample(documents):
    left = TRAINING_CHARACTERS
    order = np.arange(len(documents))
    if documents.size.sum() > left:
        order = np.random.default_rng(0).permutation(len(documents))
    for number in order:
        text = "\n".join(strings_of(documents[number]))[:left]
        left -= len(text)
        yield text
        if left <= 0:
            return


def strings_of(value):
    """All strings in a record, a conversation or a piece of one; not the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_of(item)


class BadRecord(Exception):
    """A record that cannot be rendered; the text says why, without the place."""


EMPTY = Rendered(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, bool))


def _count_anew(render, key):
    render.key, render.examples = key, {}
    render.left_out, render.truncated, render.escaped = (collections.Counter() for _ in range(3))


def render_for(render, key):
    """The same renderer for the records that the setting `key` names, with counts of its own."""
    other = copy.copy(render)
    _count_anew(other, key)
    return other


class Renderer:
    """What the renderers of all kinds share. Called with an iterable of (record, where), it returns a list of Rendered, of
    length 0 for a record that is left out as data.on_bad and data.on_long say. Picklable.

    fingerprint: str, changes whenever the tokens or what is trained would. begin: i32, [BOS] or nothing, what a text
    begins with. key: the setting that names the records, for messages. Counts since the renderer was made, for the
    summary: left_out: Counter {reason: records}. truncated: Counter of "documents", the "tokens" they lost, how
    many of these answer ("answer_tokens"), and documents "without_answer" that is left. escaped:
    Counter {special token: how often text spelled it and was kept as text}. examples: {reason: the first record of which
    it was true}.

    Raises UserError, naming `where`, for a record that cannot be used otherwise.
    """

    def __init__(self, tokenizer, data, adds_eos=True):
        self.tokenizer, self.data = tokenizer, data
        _count_anew(self, "data.path")
        add_bos = tokenizer.adds_bos if data.add_bos is None else data.add_bos
        add_eos = data.add_eos is not False and adds_eos
        for key, wanted, token in (("add_bos", add_bos, tokenizer.bos_id), ("add_eos", add_eos, tokenizer.eos_id)):
            if wanted and token is None:
                name = f"{key.removeprefix('add_')}_token"
                raise UserError(
                    f"data.{key}: the tokenizer in {tokenizer.folder} names no {name}; name one in its "
                    f"tokenizer_config.json or set data.{key} = false"
                )
        self.begin = np.array([tokenizer.bos_id] if add_bos else [], np.int32)
        self.end = np.array([tokenizer.eos_id] if add_eos else [], np.int32)
        self.controls = control_pattern(tokenizer.control_tokens)
        self._hints = sorted({text[:2] for text in tokenizer.control_tokens})

    def _fingerprint(self, *parts):
        """Of the tokenizer and everything else that decides about the tokens."""
        whole = (type(self).__name__, self.tokenizer.library.to_str(), self.begin.tolist(), self.end.tolist(), *parts)
        return hashlib.blake2b(json.dumps(whole).encode(), digest_size=16).hexdigest()

    def _count_escaped(self, *texts):
        for text in texts:
            if any(hint in text for hint in self._hints):  # far quicker than the pattern
                self.escaped.update(self.controls.findall(text))

    def _leave_out(self, reason, where, detail=""):
        self.left_out[reason] += 1
        self.examples.setdefault(reason, f"{where}: {detail}" if detail else where)

    def _bad(self, where, error):
        if self.data.on_bad != "skip":
            raise UserError(
                f'{self.key}: {where}: {error}. Mend it, or set data.on_bad = "skip" to leave such records out'
            ) from None
        self._leave_out("skipped", where, str(error))

    def _finish(self, tokens, trained, where, answer=None):
        """The document, or what data.on_long leaves of it. answer: bool, which tokens answer; None: those that are trained."""
        longest, length = self.data.seq_len, len(tokens)
        if not trained[1:].any():
            self._bad(where, "nothing in it is trained (see data.train_on)")
            return EMPTY
        if length <= longest:
            return Rendered.partly_trained(tokens, trained)
        too_long = f"{length:,} tokens, data.seq_len is {longest:,}"
        if self.data.on_long == "error":
            raise UserError(
                f'data.on_long: {where}: {too_long}. Raise data.seq_len, or set data.on_long = "truncate" to cut such '
                'documents at their end, or "skip" to leave them out'
            )
        if self.data.on_long == "skip":
            self._leave_out("longer than data.seq_len", where, too_long)
            return EMPTY
        if not trained[1:longest].any():
            first = int(np.argmax(trained[1:])) + 1
            self._bad(where, f"{too_long}, and nothing that is trained is left before the cut (it begins at {first:,})")
            return EMPTY
        answer = trained if answer is None else answer
        self.truncated.update(
            documents=1,
            tokens=length - longest,
            answer_tokens=int(answer[longest:].sum()),
            without_answer=int(not answer[:longest].any()),
        )
        self.examples.setdefault("truncated", f"{where}: {too_long}")
        return Rendered.partly_trained(tokens[:longest], trained[:longest])


def control_pattern(texts):
    """A pattern that finds any of the texts, the longest where several begin."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


class TextRenderer(Renderer):
    """Texts to [BOS] text [EOS] as data.add_bos and data.add_eos say, trained from the first token to the last. Plain
    strings may stand for (record, where)."""

    def __init__(self, tokenizer, data):
        super().__init__(tokenizer, data)
        self.fingerprint = self._fingerprint()

    def __call__(self, records):
        texts = [record if isinstance(record, str) else record[0] for record in records]
        self._count_escaped(*texts)
        encoded = self.tokenizer.encode_batch(texts, self.begin, [*self.end, 0])
        del texts  # a long one need not be there together with its weights
        return [Rendered.of_shifted(ids) for ids in encoded]


class PromptRenderer(Renderer):
    """Pairs to [BOS] prompt completion [EOS], of which the completion and the EOS are trained.

    The tokens up to the border are those of the prompt alone, as the model will see it when it is asked; no token reaches
    across. A completion begins as a continuation: without the space that some tokenizers put before a text.
    """

    def __init__(self, tokenizer, data):
        super().__init__(tokenizer, data)
        self.train_on = data.train_on or ["completion"]
        if not set(self.train_on) <= {"prompt", "completion"}:
            raise UserError(f'data.train_on: for kind "prompt" a choice of "prompt", "completion"; got {self.train_on}')
        self.fingerprint = self._fingerprint(self.train_on, data.on_long, data.on_bad, data.seq_len)

    def __call__(self, records):
        records = list(records)
        out, numbers, prompts, completions = [EMPTY] * len(records), [], [], []
        for number, (record, where) in enumerate(records):
            try:
                for field in ("prompt", "completion"):
                    if not isinstance(record[field], str):
                        raise BadRecord(f"the {field} is {json.dumps(record[field])[:40]}, a string is wanted")
                if not record["completion"]:
                    raise BadRecord("the completion is empty")
            except BadRecord as error:
                self._bad(where, error)
                continue
            numbers.append(number)
            prompts.append(record["prompt"])
            completions.append(record["completion"])
            self._count_escaped(record["prompt"], record["completion"])
        starts = self.tokenizer.encode_batch(prompts)
        ends = self.tokenizer.encode_continuing(completions)
        for number, prompt, start, end in zip(numbers, prompts, starts, ends, strict=True):
            if not prompt:
                end = self.tokenizer.encode_batch([records[number][0]["completion"]])[0]
            parts = [self.begin, start, end, self.end]
            marks = [False, "prompt" in self.train_on, *2 * ["completion" in self.train_on]]
            sizes = [len(part) for part in parts]
            trained, answer = np.repeat(marks, sizes), np.repeat([False, False, True, True], sizes)
            out[number] = self._finish(np.concatenate(parts), trained, records[number][1], answer)
        return out


class TokensRenderer:
    """Ids that were made elsewhere, as they are and trained from the first to the last; neither BOS nor EOS is added."""

    def __init__(self, tokenizer, data, vocab_size):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        _count_anew(self, "data.path")
        has_bos = tokenizer is not None and tokenizer.adds_bos
        self.begin = np.array([tokenizer.bos_id] if has_bos else [], np.int32)
        self.fingerprint = hashlib.blake2b(b"tokens", digest_size=16).hexdigest()

    def __call__(self, records):
        out = []
        for ids, where in records:
            ids = np.asarray(ids)
            rows = self.vocab_size if self.vocab_size is not None else 2**31
            if len(ids) and not 0 <= ids.min() <= ids.max() < rows:
                wrong = ids[(ids < 0) | (ids >= rows)]
                raise UserError(
                    f"{self.key}: {where}: token id {int(wrong[0])}, but the embedding has {rows} rows "
                    "(model.vocab_size); these ids were made with another tokenizer"
                )
            out.append(Rendered.all_trained(ids.astype(np.int32, copy=False)) if len(ids) else EMPTY)
        return out


def make_renderer(cfg, tokenizer):
    """The Renderer of a config's data.kind. tokenizer: as load_tokenizer gives it; None will do for "tokens"."""
    if cfg.data.kind == "tokens":
        return TokensRenderer(tokenizer, cfg.data, cfg.model.vocab_size)
    if cfg.data.kind == "chat":
        from jaxllm.data.chat import make_chat_renderer

        return make_chat_renderer(tokenizer, cfg.data)
    return (PromptRenderer if cfg.data.kind == "prompt" else TextRenderer)(tokenizer, cfg.data)

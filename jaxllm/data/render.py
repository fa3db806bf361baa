"""Documents to tokens: which tokenizer, and what of a document is trained.

A text document becomes [BOS] text [EOS] with exactly one BOS; its targets are its own tokens moved by one, made here on
the whole document, so that nothing later (splitting, packing, sharding) can shift them again. Text that spells a
special token stays text. Padding does not exist at this level, and later it is told by segment id alone: a tokenizer
whose pad token is its EOS needs no special care.

The ids are those of the tokenizer's own tokenizer.json, with its truncation and padding switched off. transformers is
not used: it would import a second to do the same. Tokenizers without a tokenizer.json (SentencePiece's tokenizer.model)
are not read.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
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
LONG, CHUNK, OVERLAP = 1 << 18, 1 << 16, 1 << 12  # characters: texts longer than LONG are encoded in overlapping chunks
CALL_CHARACTERS = 1 << 20  # the library needs about 100 bytes of memory per character of one call


class Rendered(NamedTuple):
    """One document: tokens, targets i32[n] (the next token) and loss_weights f32[n] (0 where there is no target to
    learn: the last place)."""

    tokens: np.ndarray
    targets: np.ndarray
    loss_weights: np.ndarray

    @classmethod
    def all_trained(cls, *parts):
        """The document that the token arrays make one after another; every token but the first is a target."""
        length = sum(len(part) for part in parts)
        shifted = np.zeros(length + 1, np.int32)
        np.concatenate(parts, out=shifted[:-1])
        weights = np.ones(length, np.float32)
        weights[-1:] = 0
        return cls(shifted[:-1], shifted[1:], weights)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer from disk. bos_id, eos_id: None if it has none. vocab_size: the largest id + 1. adds_bos: it does so
    by itself."""

    folder: pathlib.Path
    bos_id: int | None
    eos_id: int | None
    vocab_size: int
    adds_bos: bool
    library: object

    @classmethod
    def load(cls, path, key="data.tokenizer"):
        """From a folder that holds tokenizer.json, or from that file; BOS and EOS are named by tokenizer_config.json
        beside it."""
        import tokenizers

        path = pathlib.Path(path).expanduser()
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(
                f"{key}: no tokenizer.json at {path}; save one there with save_pretrained of a transformers tokenizer"
            )
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{key}: {file} is no tokenizer of the tokenizers library: {error}") from None
        library.no_truncation()
        library.no_padding()
        names = {}
        for config in ("special_tokens_map.json", "tokenizer_config.json"):
            if (file.parent / config).is_file():
                names.update(json.loads((file.parent / config).read_text(encoding="utf-8")))
        bos_id, eos_id = (_special_id(library, names.get(name), name, file) for name in ("bos_token", "eos_token"))
        adds_bos = bos_id is not None and library.encode("a").ids[:1] == [bos_id]
        library.encode_special_tokens = True
        vocab_size = max(library.get_vocab(with_added_tokens=True).values()) + 1
        return cls(file.parent, bos_id, eos_id, vocab_size, adds_bos, library)

    def encode_batch(self, texts):
        """Token ids of each text, i32[n], without BOS and EOS; equal to the library's for the whole text, in bounded
        memory for a long one."""
        out, group, characters = [None] * len(texts), [], 0
        for number, text in enumerate(texts):
            if len(text) > LONG:
                out[number] = self._encode_long(text)
                continue
            group.append(number)
            characters += len(text)
            if characters > CALL_CHARACTERS:
                self._encode_into(out, texts, group)
                group, characters = [], 0
        self._encode_into(out, texts, group)
        return out

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
        )
        for name in names:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, pathlib.Path(folder) / name)

    def _encode_into(self, out, texts, group):
        encodings = self.library.encode_batch([texts[number] for number in group], add_special_tokens=False)
        for number, encoding in zip(group, encodings, strict=True):
            out[number] = np.array(encoding.ids, np.int32)

    def _encode_long(self, text):
        """Encodes overlapping chunks and joins two where both have the same tokens at the same places all around the
        middle of their overlap.

        Far from its ends a chunk is cut into the same tokens as the whole text, because pre-tokenization and merges are
        local; where the two chunks disagree (a text that is one word without end), the whole text is encoded at once,
        at the library's price in memory.
        """
        begins = range(0, len(text) - OVERLAP, CHUNK - OVERLAP)
        pieces, ids, places = [], None, None
        for first in range(0, len(begins), CALL_CHARACTERS // CHUNK):
            group = begins[first : first + CALL_CHARACTERS // CHUNK]
            encodings = self.library.encode_batch([text[b : b + CHUNK] for b in group], add_special_tokens=False)
            for begin, encoding in zip(group, encodings, strict=True):
                next_ids = np.array(encoding.ids, np.int32)
                next_places = np.array([place for place, _ in encoding.offsets], np.int64) + begin
                if ids is not None:
                    middle = begin + OVERLAP // 2
                    window = (middle - OVERLAP // 4, middle, middle + OVERLAP // 4)
                    low, cut, high = np.searchsorted(places, window)
                    next_low, next_cut, next_high = np.searchsorted(next_places, window)
                    agree = np.array_equal(places[low:high], next_places[next_low:next_high]) and np.array_equal(
                        ids[low:high], next_ids[next_low:next_high]
                    )
                    if not agree or cut - low < 8 or high - cut < 8:
                        return np.array(self.library.encode(text, add_special_tokens=False).ids, np.int32)
                    pieces.append(ids[:cut])
                    next_ids, next_places = next_ids[next_cut:], next_places[next_cut:]
                ids, places = next_ids, next_places
        return np.concatenate([*pieces, ids])


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
    call it. Raises UserError when there is no tokenizer or when it has ids that the model has no embedding for.
    """
    wanted, key = cfg.data.tokenizer, "data.tokenizer"
    if wanted is None:
        wanted, key = cfg.model.path, "model.path"
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
    import jax
    from jax.experimental import multihost_utils

    recipe = {"byte_level_bpe": size, "documents": documents.fingerprint}
    if jax.process_index() == 0 and not folder.exists():
        train_tokenizer(documents, size, folder, recipe)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("tokenizer trained")
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
        text = documents[number][:left]
        left -= len(text)
        yield text
        if left <= 0:
            return


class TextRenderer:
    """Texts to Rendered documents, [BOS] text [EOS] as data.add_bos and data.add_eos say. `fingerprint` changes
    whenever the tokens would."""

    def __init__(self, tokenizer, data):
        add_bos = tokenizer.adds_bos if data.add_bos is None else data.add_bos
        for key, wanted, token in (("add_bos", add_bos, tokenizer.bos_id), ("add_eos", data.add_eos, tokenizer.eos_id)):
            if wanted and token is None:
                name = f"{key.removeprefix('add_')}_token"
                raise UserError(
                    f"data.{key}: the tokenizer in {tokenizer.folder} names no {name}; name one in its "
                    f"tokenizer_config.json or set data.{key} = false"
                )
        self.tokenizer = tokenizer
        self.begin = np.array([tokenizer.bos_id] if add_bos else [], np.int32)
        self.end = np.array([tokenizer.eos_id] if data.add_eos else [], np.int32)
        parts = (tokenizer.library.to_str().encode(), self.begin.tobytes(), b"/", self.end.tobytes())
        self.fingerprint = hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()

    def __call__(self, texts):
        return [Rendered.all_trained(self.begin, ids, self.end) for ids in self.tokenizer.encode_batch(texts)]

"""The way from files to rows of tokens: what a run trains on, in which order, and what it is measured on.

`sources` finds documents, `render` turns them into tokens, targets and loss weights, `pipeline` packs them into rows
lane by lane, `batch` puts rows on devices. This file holds only the two config sections, so that reading a config
imports no tokenizer and no data library; the rest is reached on first use.
"""

import importlib
import json
from typing import Literal, Self

import pydantic

from jaxllm.section import Section

LAZY = {name: "jaxllm.data.batch" for name in ("Batch", "make_batches", "make_eval_batches")}

ONLY_FOR = {
    "text_field": (("text",), "each kind has fields of its own"),
    "messages_field": (("chat",), "each kind has fields of its own"),
    "prompt_field": (("prompt",), "each kind has fields of its own"),
    "completion_field": (("prompt",), "each kind has fields of its own"),
    "train_on": (("chat", "prompt"), "documents of other kinds are trained from the first token to the last"),
    "chat_template": (("chat",), "nothing else is rendered with a template"),
    "on_long": (("chat", "prompt"), "documents of other kinds are split"),
    "add_bos": (("text", "chat", "prompt"), "token ids are trained as they are"),
    "add_eos": (
        ("text", "prompt"),
        "the chat template writes the end of a turn, and token ids are trained as they are",
    ),
}  # setting: (the kinds that read it, why others do not); all other settings are for every kind


def __getattr__(name):
    if name in LAZY:
        return getattr(importlib.import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class DataConfig(Section):
    """What is trained on and how it becomes rows."""

    kind: Literal["text", "chat", "prompt", "tokens"] = "text"
    """"text": every document is trained on from its first token to its last. "chat": conversations, of which the
    assistant's turns are trained; one that says "weight": 0, "train": false or "training": false is read and not trained.
    "prompt": pairs of prompt and completion, of which the completion is trained. "tokens": ids that were made elsewhere,
    trained on from first to last."""

    path: str | list[str] = pydantic.Field(default_factory=list)
    """Files, folders or globs (`**` goes into subfolders); `{stdlib}` stands for the folder of Python's standard library.
    Relative paths start at the working directory. The name tells the format: .jsonl, .ndjson and .json are one JSON
    object per line, .parquet, .arrow, .feather and .ipc are tables, .npy and .bin (with FILE.bin.json beside it) hold
    token ids, all other files are one document each, in UTF-8, unless their first line is a JSON object or they are called
    .csv or .tsv, which is refused; text and JSON lines may be compressed as .gz or .zst. A
    folder gives its .txt, .text, .md, .rst, .py, JSON lines and table files, subfolders included. Files are taken entry
    by entry, sorted within each, and one that is reached twice is read once; hidden files and marker files (_SUCCESS)
    are passed over. A text file or a line holds at most 1 GiB."""

    weights: list[float] | None = None
    """Share of the documents drawn from each entry of `path`, in any unit. Each source is shuffled by itself and begins
    again when it is used up; with `epochs` or `repeat = false` the data ends when every source was read that often. Not
    set: every document once per epoch."""

    exclude: list[str] = pydantic.Field(default_factory=list)
    """Globs of files to leave out, matched with the path relative to the pattern's fixed folder; here `*` also crosses
    `/`."""

    text_field: str = "text"
    """"text": the field of a JSON object that holds the document."""

    messages_field: str = "messages"
    """"chat": the field that holds the list of messages, each with `role` and `content`."""

    prompt_field: str = "prompt"
    """"prompt": the field that holds the prompt."""

    completion_field: str = "completion"
    """"prompt": the field that holds what is to be learned."""

    train_on: list[str] | None = None
    """What is trained. "chat": roles, by default ["assistant"]. "prompt": by default ["completion"]; with "prompt" as
    well, all of it."""

    chat_template: str | None = None
    """"chat": a Jinja file to render conversations with. Not set: the tokenizer's own template."""

    on_long: Literal["error", "truncate", "skip"] = "error"
    """"chat", "prompt": what to do with a document of more than seq_len tokens. "truncate" cuts it at its end. Documents
    of other kinds are split, and no token is dropped."""

    on_bad: Literal["error", "skip", "replace"] = "error"
    """What to do with a record that cannot be read (bytes that are no UTF-8, a malformed line, a missing or differently
    typed field, one of the fields in use or a key inside of it twice, an unreadable file). "error": stop before training, with file and line. "skip":
    leave it out and count it. "replace": as "error", but bytes that are no UTF-8 become U+FFFD and are counted."""

    tokenizer: str | None = None
    """A folder with tokenizer.json, or such a file; "bpe:4096" trains a byte-level BPE of 4,096 entries on the training
    documents (on 32 million characters of them at most) and keeps it in <output_dir>/tokenizer; "tokens" hold no text to
    train it on. Not set: the tokenizer in the folder of model.path."""

    add_bos: bool | None = None
    """"text", "chat", "prompt": begin each document with the BOS token. Not set: if the tokenizer or the chat template
    does so. A template that begins every turn with the BOS token (SmolLM2's `<|im_start|>`) keeps it, also with false:
    there it is part of the turn."""

    add_eos: bool | None = None
    """"text", "prompt": end each document with the EOS token; it is trained on. Not set: true."""

    seq_len: int = pydantic.Field(2048, ge=2)
    """Tokens per row. Unset: model.max_position_embeddings where that is less than 2,048."""

    global_batch_size: int = pydantic.Field(8, ge=1)
    """Rows per optimizer step, over all devices and microbatches."""

    packing: Literal["concatenate", "first_fit", "none"] | None = None
    """"concatenate": documents follow each other until the row is full and the last one goes on in the next row.
    "first_fit": a row takes the next documents that fit whole. "none": one document, or one piece of a longer one, per
    row; the rest is padding. Documents never see each other. Not set: "first_fit" for "chat" and "prompt", else
    "concatenate"."""

    shuffle: bool = True
    """Draw a new order of the documents, by `seed`, in every epoch. False: the order of the files."""

    repeat: bool = True
    """Begin again when the documents are used up. False: one epoch, then the data ends."""

    epochs: int | None = pydantic.Field(None, ge=1)
    """End after so many epochs. Not set: see `repeat`."""

    workers: int = pydantic.Field(0, ge=0)
    """Processes that read and tokenise ahead; 0: a thread of the training process does. The rows are the same."""

    cache: str | None = None
    """Folder (`~` is the home folder) in which tokenised documents are kept, by content, tokenizer and template, and found again; with a catalogue
    of the files, so that a later run neither unpacks nor parses them. Not set: documents are tokenised as they are
    needed."""

    @pydantic.field_validator("cache")
    @classmethod
    def _cache_is_named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError(f"names no folder, got {value!r}; leave it out to tokenise documents as they are needed")
        return value

    @pydantic.model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.weights is not None:
            entries = 1 if isinstance(self.path, str) else len(self.path)
            if len(self.weights) != entries or not all(weight > 0 for weight in self.weights):
                raise ValueError(
                    f"data.weights must be {entries} positive numbers, one per entry of data.path; got {self.weights}"
                )
        if self.epochs is not None and not self.repeat:
            raise ValueError(f"data.epochs = {self.epochs} and data.repeat = false contradict each other; set one")
        whole = self.kind in ("chat", "prompt")
        if whole and self.packing == "concatenate":
            raise ValueError(
                f'data.packing = "concatenate" would split the documents of data.kind = "{self.kind}"; use "first_fit" or "none"'
            )
        if self.kind == "tokens" and (self.tokenizer or "").startswith("bpe:"):
            raise ValueError(
                f'data.tokenizer = "{self.tokenizer}" would be trained on texts, and data.kind = "tokens" has none; name '
                "the folder of the tokenizer that made the ids, or leave it out"
            )
        ignored = []
        for name, (kinds, why) in ONLY_FOR.items():
            value = getattr(self, name)
            if self.kind not in kinds and value != type(self).model_fields[name].default:
                readers = " and ".join(f'"{kind}"' for kind in kinds)
                ignored.append(
                    f"data.{name} = {json.dumps(value)} would be ignored: it is for data.kind = {readers}, here it is "
                    f'"{self.kind}" ({why}); leave it out'
                )
        if ignored:
            raise ValueError("\n".join(ignored))
        return self

    @pydantic.field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_complete(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("bpe:"):
            size = value.removeprefix("bpe:")
            if not size.isdecimal() or int(size) < 260:
                raise ValueError(f'"bpe:N" needs N >= 260 (256 bytes, three special tokens and a merge), got {value!r}')
        return value


def packing_of(config: DataConfig) -> str:
    """`config.packing`, or what is usual for its kind."""
    return config.packing or ("first_fit" if config.kind in ("chat", "prompt") else "concatenate")


class EvaluationConfig(Section):
    """When and on what the model is measured while it trains."""

    every: int = pydantic.Field(0, ge=0)
    """Steps between evaluations; 0 = never."""

    path: str | list[str] | None = None
    """Files to evaluate on, written as in data.path; data.kind and all that says how documents are read and rendered
    holds for them too. Conversations and prompts are all rendered once before training, to find what is wrong."""

    holdout: float = pydantic.Field(0.0, ge=0.0, lt=1.0)
    """Share of the documents of data.path to evaluate on instead; they are never trained on, whether `every` is set or
    not. A document is drawn by a hash of its file's relative path and its line, so adding files moves no other document
    from one side to the other."""

    sets: dict[str, str | list[str]] = {}
    """More sets, each by a name of its own and with its own files, written as in `path`."""

    batch_size: int = pydantic.Field(8, ge=1)
    """Rows per evaluation batch. With max_batches unset the result does not depend on it."""

    max_batches: int | None = pydantic.Field(None, ge=1)
    """Stop an evaluation after so many batches, always the same ones."""

    prompt: str | None = None
    """Text that the model continues before the first step and after the last, to be looked at."""

    prompt_tokens: int = pydantic.Field(64, ge=1)
    """Tokens of that continuation."""

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> Self:
        for name, path in self.sets.items():
            if not name.strip():
                raise ValueError("evaluation.sets: every set needs a name, got an empty one; evaluation.path has none")
            if not path:
                raise ValueError(
                    f"evaluation.sets.{name}: names no files, got {path!r}; name some or leave the set out"
                )
        if self.path and self.holdout:
            raise ValueError("set either evaluation.path or evaluation.holdout, not both")
        if self.every and not self.path and not self.holdout and not self.sets:
            raise ValueError(
                f"evaluation.every = {self.every} needs documents: set evaluation.path, evaluation.holdout or evaluation.sets"
            )
        return self

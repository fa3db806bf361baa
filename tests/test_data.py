"""What the data path promises: every token once, in an order set by seed, step and row alone; no bad file unseen.

Packing is tested on documents whose every token is unique, so that a row tells by itself which document each place came
from; files, tokenizers and batches are tested on small real ones. No model is built here.
"""

import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pydantic
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jaxllm.data.render as render_module
from jaxllm.data import DataConfig, EvaluationConfig, make_batches, make_eval_batches
from jaxllm.data import __main__ as command
from jaxllm.data.batch import Batch, Training, evaluation_sets, local_lanes, to_device
from jaxllm.data.pipeline import Pipeline, Rendering, empty_rows, pieces_per_document
from jaxllm.data.render import Rendered, TextRenderer, Tokenizer, load_tokenizer, train_tokenizer
from jaxllm.data.sources import Documents, open_documents
from jaxllm.section import UserError
from jaxllm.sharding import MeshConfig, make_mesh
from jaxllm_kernels import token_order
from support import finish, together

ROOT = pathlib.Path(__file__).parents[1]
few = settings(max_examples=25, deadline=None)
pytestmark = pytest.mark.usefixtures("remembered_shuffles")


# -------------------------------------------------------------------------------------------------------------- packing


def numbered(lengths):
    """Documents whose tokens are all different, and their renderer: token = 1 + 1000 * document + place."""
    made = [np.arange(length, dtype=np.int32) + 1 + 1000 * number for number, length in enumerate(lengths)]
    return [str(number) for number in range(len(made))], lambda texts: [
        Rendered.all_trained(made[int(t)]) for t in texts
    ]


def pipeline(lengths, **options):
    names = ("seed", "lanes", "cursors", "prefetch")
    documents, render = numbered(lengths)
    data = DataConfig(**{name: value for name, value in options.items() if name not in names})
    return Pipeline(documents, render, data, **{name: value for name, value in options.items() if name in names})


def take(iterator, count):
    got = [item for item, _ in zip(iterator, range(count), strict=False)]
    iterator.close()
    return got


def assert_same_rows(a, b):
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


corpora = st.lists(st.integers(1, 40), min_size=6, max_size=20)
scarce = st.lists(st.integers(1, 40), min_size=1, max_size=9)  # maybe fewer documents than rows, which are then cut
shapes = st.fixed_dictionaries(
    {
        "seq_len": st.integers(2, 24),
        "global_batch_size": st.integers(1, 6),
        "packing": st.sampled_from(["concatenate", "none"]),
    }
)


def cut_or_enough(lengths, shape):
    """Whether the data may end: with packing = "none" nothing is cut to fill a step."""
    return shape["packing"] == "concatenate" or len(lengths) >= shape["global_batch_size"]


@few
@given(corpora | scarce, shapes, st.booleans(), st.integers(0, 2**32 - 1))
def test_an_epoch_has_every_token_once_and_trains_every_transition_inside_a_document_once(
    lengths, shape, shuffle, seed
):
    assume(cut_or_enough(lengths, shape))
    tokens, transitions = collections.Counter(), collections.Counter()
    for rows, _ in pipeline(lengths, **shape, shuffle=shuffle, seed=seed, repeat=False):
        real, trained = rows["segment_ids"] > 0, rows["loss_weights"] > 0
        tokens.update(rows["tokens"][real].tolist())
        transitions.update(zip(rows["tokens"][trained].tolist(), rows["targets"][trained].tolist(), strict=True))
        assert set(rows["loss_weights"].ravel()) <= {0.0, 1.0}
        assert not any(values[~real].any() for values in rows.values()), "padding is zero everywhere"
    documents = [range(1 + 1000 * number, 1 + 1000 * number + length) for number, length in enumerate(lengths)]
    assert tokens == {token: 1 for document in documents for token in document}
    assert transitions == {(token, token + 1): 1 for document in documents for token in document[:-1]}


@few
@given(corpora, shapes)
def test_without_shuffling_row_r_reads_documents_r_and_every_bth_after_it_in_file_order(lengths, shape):
    streams = collections.defaultdict(list)
    for rows, _ in pipeline(lengths, **shape, shuffle=False, repeat=False):
        for row, (tokens, segments) in enumerate(zip(rows["tokens"], rows["segment_ids"], strict=True)):
            streams[row] += tokens[segments > 0].tolist()
    for row in range(shape["global_batch_size"]):
        mine = range(row, len(lengths), shape["global_batch_size"])
        assert streams[row] == [1 + 1000 * number + place for number in mine for place in range(lengths[number])]


@few
@given(
    st.lists(st.integers(1, 8), min_size=6, max_size=20),
    st.integers(1, 6),
    st.sampled_from(["concatenate", "none"]),
    st.integers(0, 9),
)
def test_each_epoch_reads_each_document_once_and_the_next_one_in_another_order(lengths, size, packing, seed):
    rows = pipeline(lengths, seq_len=8, global_batch_size=size, packing=packing, seed=seed)
    order, counts = {}, [0] * size
    for step, _ in take(rows, 3 * len(lengths) // size + 1):  # a row of 8 places ends at least one document
        for row, tokens in enumerate(step["tokens"]):
            for token in tokens[(step["segment_ids"][row] > 0) & (tokens % 1000 == 1)]:
                order[row + size * counts[row]] = int(token) // 1000
                counts[row] += 1
    epochs = [tuple(order[epoch * len(lengths) + place] for place in range(len(lengths))) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(len(lengths))) for epoch in epochs) and len(set(epochs)) > 1


@few
@given(corpora, st.integers(2, 24), st.sampled_from(["concatenate", "none"]), st.booleans(), st.integers(0, 9))
def test_rows_do_not_depend_on_how_lanes_are_shared_out(lengths, seq_len, packing, repeat, seed):
    options = {"seq_len": seq_len, "packing": packing, "repeat": repeat, "seed": seed, "global_batch_size": 4}
    straight = take(pipeline(lengths, **options), 8)
    for owners in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]):
        for lanes in owners:
            mine = take(pipeline(lengths, **options, lanes=lanes), 8)
            for step, (rows, cursors) in enumerate(straight):
                if step < len(mine):
                    assert_same_rows({name: values[lanes] for name, values in rows.items()}, mine[step][0])
                    assert np.array_equal(cursors[lanes], mine[step][1])
                else:
                    assert not rows["segment_ids"][lanes].any(), "a process ends early only if its lanes have ended"


@few
@given(corpora | scarce, shapes, st.booleans(), st.integers(0, 9))
def test_resume_from_the_cursors_is_exact_after_every_step(lengths, shape, repeat, seed):
    options = {**shape, "repeat": repeat or not cut_or_enough(lengths, shape), "seed": seed}
    straight = take(pipeline(lengths, **options), 6)
    again = pipeline(lengths, **options)
    for step, (_, cursors) in enumerate(straight[:-1]):
        again.seek(cursors)
        for rows, after in straight[step + 1 :]:
            got, got_after = next(again)
            assert_same_rows(rows, got)
            assert np.array_equal(after, got_after)
    again.close()


@few
@given(corpora, shapes)
def test_intervals_agree_with_the_dense_mask_and_positions_with_the_segments(lengths, shape):
    for rows, _ in take(pipeline(lengths, **shape), 3):
        place = np.arange(shape["seq_len"])
        for row in range(shape["global_batch_size"]):
            segment = rows["segment_ids"][row]
            dense = (segment[:, None] == segment[None, :]) & (place[None, :] <= place[:, None]) & (segment[:, None] > 0)
            begin, end = rows["k_start"][row][:, None], rows["k_end"][row][:, None]
            assert np.array_equal(dense, (begin <= place) & (place < end))
            first = np.array([np.flatnonzero(segment == s)[0] if s else i for i, s in enumerate(segment)])
            assert np.array_equal(rows["positions"][row], place - first)
            kinds = np.unique(segment[segment > 0])
            assert np.array_equal(kinds, np.arange(len(kinds)) + 1)


def test_a_split_document_is_tokenized_once():
    rendered = []
    documents, render = numbered([1000, 1000])

    def counting(texts):
        texts = list(texts)
        rendered.extend(texts)
        return render(texts)

    data = DataConfig(seq_len=16, global_batch_size=2, repeat=False)
    assert len(list(Pipeline(documents, counting, data))) == 63
    assert sorted(rendered) == ["0", "1"]


def test_an_error_in_the_background_thread_arrives_with_its_own_message_and_after_the_good_rows():
    documents, render = numbered([8] * 40)

    def failing(texts):
        texts = list(texts)
        if "33" in texts:
            raise UserError("file x.txt:33 is bad")
        return render(texts)

    data = DataConfig(seq_len=8, global_batch_size=1, shuffle=False)
    rows = Pipeline(documents, failing, data)
    with pytest.raises(UserError, match=r"^file x\.txt:33 is bad$"):
        for _ in range(40):
            next(rows)
    with pytest.raises(StopIteration):
        next(rows)


def test_close_and_dropping_the_iterator_end_the_thread():
    def alive():
        return [thread for thread in threading.enumerate() if thread.name == "jaxllm-data"]

    before = alive()
    closed, dropped = pipeline([5] * 9, seq_len=4), pipeline([5] * 9, seq_len=4)
    next(closed), next(dropped)
    assert len(alive()) == len(before) + 2
    closed.close()
    closed.close()
    del dropped
    for thread in set(alive()) - set(before):
        thread.join(timeout=5)
    assert alive() == before
    with pytest.raises(StopIteration):
        next(closed)


class _Later(Rendering):
    """A Rendering that is asked as Workers are, without processes."""

    count = 2

    def submit(self, numbers):
        return SimpleNamespace(result=lambda: self.rendered(numbers))


def test_fewer_documents_than_rows_are_cut_into_equal_pieces_so_that_rows_differ():
    for lengths, pieces in (([40], 8), ([9, 31, 8], 3)):
        rows, _ = take(pipeline(lengths, global_batch_size=8, seq_len=5, shuffle=False), 1)[0]
        begins = [1 + 1000 * n + piece * size // pieces for n, size in enumerate(lengths) for piece in range(pieces)]
        assert rows["tokens"][:, 0].tolist() == begins[:8] and not rows["positions"][:, 0].any()
        last = lengths[0] // pieces - 1  # of the first piece: its target is the first token of the next one
        assert rows["targets"][0, last] == begins[1] and rows["loss_weights"][0, last] == 1
    # each of them is rendered once, however many rows and epochs there are
    documents, render = numbered([40, 50])
    asked = []
    counting = lambda texts: render(asked.append(text) or text for text in texts)
    take(Pipeline(documents, counting, DataConfig(global_batch_size=6, seq_len=8)), 20)
    assert sorted(asked) == ["0", "1"]
    # workers render the same pieces
    cfg = DataConfig(global_batch_size=6, seq_len=8)
    plain, apart = Pipeline(documents, render, cfg), Pipeline(_Later(documents, render), None, cfg)
    for (rows, reached), (got, there) in zip(take(plain, 9), take(apart, 9), strict=True):
        assert_same_rows(rows, got)
        assert np.array_equal(reached, there)
    # a source that is drawn from more often than it has documents is cut, the other is not
    documents = SimpleNamespace(sources=[("a", 0, 1), ("b", 1, 5)], __len__=None)
    weighted = DataConfig(path=["a", "b"], weights=[100, 1], global_batch_size=8)
    assert pieces_per_document(weighted, documents) == [(0, 1, 8), (1, 5, 1)]


@pytest.mark.parametrize("packing", ["first_fit", "none"])
def test_documents_that_stay_whole_must_fill_a_batch_if_the_data_ends(packing):
    whole = {"packing": packing, "global_batch_size": 8, "seq_len": 8}
    with pytest.raises(UserError, match=r"data\.global_batch_size: 3 documents cannot fill a batch of 8"):
        pipeline([4, 4, 4], **whole, repeat=False)
    rows = take(pipeline([4, 4, 4], **whole, repeat=True), 5)
    assert len(rows) == 5 and all(row["segment_ids"][:, 0].all() and row["positions"].max() == 3 for row, _ in rows)
    # with weights, small sources are read often before the large one has been read once
    documents, render = numbered([4] * 6)

    class Mixed(list):
        sources = (("a", 0, 1), ("b", 1, 5))

    options = {"path": ["a", "b"], "weights": [100, 1], "epochs": 1}
    take(Pipeline(Mixed(documents), render, DataConfig(**whole, **options)), 1)


def test_documents_without_any_token_end_in_an_error_instead_of_an_endless_search():
    with pytest.raises(UserError, match="no tokens at all"):
        next(pipeline([0, 0, 0], global_batch_size=2))


def test_a_cursor_beyond_its_document_is_refused():
    with pytest.raises(UserError, match=r"token 50 of a document that has 5"):
        next(pipeline([5] * 4, global_batch_size=1, cursors=[[0, 50]]))
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        pipeline([5] * 4, global_batch_size=1, cursors=[[0.5, 0]])


# ---------------------------------------------------------------------------------------------------------------- files


def lines(path, *records, end="\n"):
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + end.encode() for r in records))
    return str(path)


def texts(*args, **options):
    documents = Documents(*args, **options)
    return [documents[number] for number in range(len(documents))]


def test_a_byte_order_mark_is_dropped_at_the_start_of_a_file_only(tmp_path):
    bom = "\ufeff".encode()
    path = lines(tmp_path / "b.jsonl", bom + b'{"text":"alpha"}', {"text": "beta"}, '{"text":"ga\ufeffmma"}'.encode())
    assert texts(path) == ["alpha", "beta", "ga\ufeffmma"]
    (tmp_path / "b.txt").write_bytes(bom + "a\ufeffb".encode())
    assert texts(str(tmp_path / "b.txt")) == ["a\ufeffb"]


def test_blank_lines_crlf_and_unicode_separators_cost_no_record(tmp_path):
    raw = ['{"text":"one"}', "", "   ", '{"text":"two"}', '{"text":"a\u2028b"}', '{"text":"c\x85d\\r\\n"}']
    path = tmp_path / "crlf.jsonl"
    path.write_bytes("\r\n".join(raw).encode())
    documents = Documents(str(path))
    assert [documents[n] for n in range(4)] == ["one", "two", "a\u2028b", "c\x85d\r\n"]
    assert documents.summary().startswith("4 records in 1 file") and "2 blank lines" in documents.summary()


def test_a_text_file_is_one_document_with_its_line_ends_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\n")
    assert texts(str(tmp_path / "a.txt")) == ["one\r\n\r\ntwo\n"]


def test_half_a_surrogate_pair_becomes_one_replacement_character_and_a_pair_its_character(tmp_path):
    path = lines(tmp_path / "s.jsonl", rb'{"text":"x \ud83d y"}', rb'{"text":"x \ud83d\udc4d y"}')
    documents = Documents(path)
    assert [documents[0], documents[1]] == ["x \ufffd y", "x \U0001f44d y"]
    assert "half surrogate pairs replaced by U+FFFD in 1 record" in documents.summary()


def test_a_field_that_is_not_used_may_hold_anything(tmp_path):
    unused = b'"m":1,"m":[{"k":1,"k":2}]', b'"m":NaN,"n":null', b'"TEXT":5,"m":{"text":1,"text":2}'
    documents = Documents(lines(tmp_path / "d.jsonl", *(b'{"text":"good",' + rest + b"}" for rest in unused)))
    assert [documents[n] for n in range(len(documents))] == ["good"] * 3 and "skipped" not in documents.summary()


GOOD = b'{"text":"good"}'
BAD = {
    b'{"text":"c': ["not one JSON object per line"],
    b'{"text":"caf\xe9"}': ["not UTF-8 at byte 29", "0xe9", 'data.on_bad = "replace"'],
    b'{"TEXT":"x","n":1}': ["no field 'text'", "TEXT, n", "data.text_field"],
    b'{"text":null}': ["'text' is null", "a string is wanted"],
    b'{"text":5}': ["'text' is a number"],
    b'{"text":NaN}': ["'text' is a number"],
    b'{"text":["a"]}': ["'text' is a list"],
    b'["text"]': ["a JSON object is wanted, got a list"],
    b'{"text":"a","text":"b"}': ["the key 'text' stands twice in one object"],
    b"[" * 100_000: ["not one JSON object per line"],
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:18].decode(errors="replace"))
def test_a_bad_line_is_refused_by_file_line_and_reason_or_skipped_and_counted(tmp_path, bad):
    path = lines(tmp_path / "bad.jsonl", GOOD, b"", bad, GOOD, GOOD)
    with pytest.raises(UserError) as refused:
        Documents(path)
    assert all(part in str(refused.value) for part in [f"{path}:3: ", 'data.on_bad = "skip"', *BAD[bad]])
    documents = Documents(path, on_bad="skip")
    assert [documents[n] for n in range(len(documents))] == ["good"] * 3
    assert "1 skipped" in documents.summary() and "bad.jsonl:3: " in documents.summary()


def test_bytes_that_are_no_utf8_can_be_replaced_but_never_become_latin1(tmp_path):
    path = lines(tmp_path / "l.jsonl", GOOD, b'{"text":"caf\xe9"}')
    documents = Documents(path, on_bad="replace")
    assert documents[1] == "caf\ufffd" and "replaced by U+FFFD in 1 record" in documents.summary()
    with pytest.raises(UserError, match=r"l\.jsonl:2: not one JSON"):
        Documents(lines(tmp_path / "l.jsonl", GOOD, b'{"text'), on_bad="replace")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    with pytest.raises(UserError, match=r"latin\.py: not UTF-8 at byte 31"):
        Documents(str(tmp_path / "latin.py"))


def test_unused_fields_may_change_type_and_empty_texts_are_left_out_and_counted(tmp_path):
    lines(tmp_path / "m1.jsonl", {"text": "r", "meta": None}, {"text": "s", "meta": [1]}, {"text": ""})
    lines(tmp_path / "m2.jsonl", {"text": "n"})
    documents = Documents(str(tmp_path / "m*.jsonl"))
    assert [documents[n] for n in range(3)] == ["r", "s", "n"] and "1 empty" in documents.summary()


def test_hidden_and_marker_files_are_ignored_and_the_order_is_sorted(tmp_path):
    for name in ("z.jsonl", "sub/k.jsonl", "a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines(tmp_path / name, {"text": name})
    (tmp_path / ".part.jsonl").write_text('{"te')
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    assert texts(str(tmp_path)) == ["a.jsonl", "sub/k.jsonl", "z.jsonl"]
    assert texts(str(tmp_path / "*[!g]")) == ["a.jsonl", "z.jsonl"]
    assert texts(str(tmp_path / "**/*.jsonl"), exclude=["sub/*"]) == ["a.jsonl", "z.jsonl"]
    assert texts([str(tmp_path / "z.jsonl"), str(tmp_path)]) == ["z.jsonl", "a.jsonl", "sub/k.jsonl"]
    assert "1 files of other kinds" in Documents(str(tmp_path)).summary()


def test_links_are_followed_once_and_a_broken_one_is_an_unreadable_file(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(tmp_path)
    assert texts(str(tmp_path)) == ["a"]
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read"):
        texts(str(tmp_path))
    assert texts(str(tmp_path), on_bad="skip") == ["a"]


@pytest.mark.parametrize(
    "path, parts",
    [
        ("nope/*.jsonl", ["'nope/*.jsonl' matches 0 files", "working directory"]),
        ("empty.jsonl", ["no document in 1 file", "empty.jsonl"]),
        ("t.xz", [".xz", "plain text, JSON lines"]),
        ([], ["is not set"]),
        ("only.txt", ["all 1 files that match are excluded by data.exclude"]),
    ],
)
def test_a_path_without_a_document_is_refused(tmp_path, monkeypatch, path, parts):
    monkeypatch.chdir(tmp_path)
    for name, content in (("empty.jsonl", ""), ("t.xz", "x"), ("only.txt", "x")):
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as refused:
        Documents(path, exclude=["only*"])
    assert str(refused.value).startswith("data.path: ") and all(part in str(refused.value) for part in parts)


def test_a_file_that_changes_under_the_run_is_reported(tmp_path):
    documents = Documents(lines(tmp_path / "c.jsonl", {"text": "one"}, {"text": "two"}))
    lines(tmp_path / "c.jsonl", {"text": "a longer one"})
    with pytest.raises(UserError, match=r"c\.jsonl:2 has changed since the run began"):
        documents[1]
    # also where what stands there now would still be a whole record
    documents = Documents(lines(tmp_path / "d.jsonl", {"text": "one"}, {"text": "two"}))
    os.utime(tmp_path / "d.jsonl", ns=(0, 0))
    again = Documents(str(tmp_path / "d.jsonl"))
    lines(tmp_path / "d.jsonl", {"text": "one"}, {"text": "TWO"})
    for opened in (documents, again):
        with pytest.raises(UserError, match=r"d\.jsonl:2 has changed since the run began"):
            opened[1]


def test_the_fingerprint_tells_content_and_choice_but_not_the_folder(tmp_path, monkeypatch):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        lines(tmp_path / folder / "a.jsonl", *({"text": f"t{n}"} for n in range(50)))
    x, y = Documents(str(tmp_path / "x")), Documents(str(tmp_path / "y"))
    assert x.fingerprint == y.fingerprint
    monkeypatch.chdir(tmp_path)
    same = ["x", "./x", "x/*.jsonl", "./x/**/*", "x/../y", str(tmp_path / "x" / "*"), "x/a.jsonl"]
    assert {Documents(path).fingerprint for path in same} == {x.fingerprint}
    monkeypatch.chdir(tmp_path / "x")
    assert {Documents(path).fingerprint for path in (".", "*", "../x/*", "a.jsonl", "./a.jsonl")} == {x.fingerprint}
    assert len({x.fingerprint, *(part.fingerprint for part in x.split(0.5))}) == 3
    lines(tmp_path / "y" / "a.jsonl", *({"text": f"u{n}"} for n in range(50)))
    assert Documents(str(tmp_path / "y")).fingerprint != x.fingerprint


def test_held_out_documents_stay_held_out_when_files_are_added(tmp_path):
    lines(tmp_path / "a.jsonl", *({"text": f"a{n}"} for n in range(400)))
    data, evaluation = DataConfig(path=str(tmp_path)), EvaluationConfig(holdout=0.1)

    def sides():
        return [{part[n] for n in range(len(part))} for part in open_documents(data, evaluation)]

    training, held = sides()
    assert not training & held and len(training | held) == 400 and 20 < len(held) < 60
    lines(tmp_path / "0.jsonl", *({"text": f"b{n}"} for n in range(100)))
    more_training, more_held = sides()
    assert training <= more_training and held <= more_held
    with pytest.raises(UserError, match=r"evaluation\.holdout: 1e-06 holds no document out of 500"):
        open_documents(data, EvaluationConfig(holdout=1e-6))


@pytest.mark.parametrize(
    "section, options",
    [
        (EvaluationConfig, {"every": 5}),
        (EvaluationConfig, {"path": "x", "holdout": 0.1}),
        (EvaluationConfig, {"every": 1, "sets": {"": "x"}}),
        (EvaluationConfig, {"every": 1, "sets": {"a": []}}),
        (DataConfig, {"cache": " "}),
        (DataConfig, {"tokenizer": "bpe:12"}),
        (DataConfig, {"tokenizer": "bpe:big"}),
        (DataConfig, {"shuffle": "false"}),
        (DataConfig, {"kind": "conversation"}),
        (DataConfig, {"kind": "chat", "packing": "concatenate"}),
        (DataConfig, {"on_long": "truncate"}),
        (DataConfig, {"train_on": ["assistant"]}),
        (DataConfig, {"path": ["a", "b"], "weights": [1.0]}),
        (DataConfig, {"epochs": 2, "repeat": False}),
    ],
)
def test_sections_refuse_what_they_cannot_mean(section, options):
    with pytest.raises(pydantic.ValidationError):
        section(**options)


def test_reading_the_config_sections_imports_no_data_library():
    heavy = ("grain", "tokenizers", "transformers", "jax")
    code = f"import sys, jaxllm.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


# ----------------------------------------------------------------------------------------------------------- tokenizers

TEXTS = [
    "caf\u00e9 cafe\u0301",
    "  two\n\n\tx\r\ny",
    "\U0001f468\u200d\U0001f469",
    "def f(x):\n        return x\n",
    "<|eos|> </s>",
]


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    """The quickstart's data: the standard library, with a tokenizer of 4,096 entries trained on it."""
    exclude = ["site-packages/*", "dist-packages/*", "test/*", "*/test/*", "*/tests/*"]
    data = DataConfig(path="{stdlib}/**/*.py", exclude=exclude, on_bad="skip", tokenizer="bpe:4096")
    folder = tmp_path_factory.mktemp("stdlib")
    return config(folder, data=data)


def config(folder, data, evaluation=None, vocab_size=None, num_microbatches=1, seed=0):
    model = SimpleNamespace(path=None, vocab_size=vocab_size, sliding_window=None)
    optimizer = SimpleNamespace(num_microbatches=num_microbatches)
    evaluation = evaluation or EvaluationConfig()
    return SimpleNamespace(
        data=data, evaluation=evaluation, model=model, optimizer=optimizer, seed=seed, output_dir=str(folder / "run")
    )


def test_the_trained_tokenizer_opens_in_transformers_with_the_same_ids(stdlib, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(stdlib)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (4096, 1, 2)
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama"}'
    )  # an export has one, and it must not choose another class
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 0)
    for text, ids in zip(TEXTS[:4], tokenizer.encode_batch(TEXTS[:4]), strict=True):
        assert theirs(text)["input_ids"] == [1, *ids]
        assert theirs.decode(ids) == tokenizer.decode(ids) == text


def test_packing_fills_rows_of_the_standard_library_to_98_percent(stdlib):
    documents = Documents(stdlib.data.path, exclude=stdlib.data.exclude, on_bad="skip")
    render = TextRenderer(load_tokenizer(stdlib, documents), stdlib.data)
    rows = take(Pipeline(documents, render, stdlib.data), 20)
    assert np.mean([row["segment_ids"] > 0 for row, _ in rows]) >= 0.98 and rows[0][0]["tokens"].shape == (8, 2048)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder of a tokenizer of 400 entries."""
    folder = tmp_path_factory.mktemp("small")
    train_tokenizer(Documents("{stdlib}/json/*.py"), 400, folder / "tokenizer", {})
    return folder / "tokenizer"


def test_a_document_has_one_bos_and_one_eos_and_special_text_stays_text(small):
    rendered = TextRenderer(Tokenizer.load(small), DataConfig())(TEXTS)
    for text, document in zip(TEXTS, rendered, strict=True):
        ids = document.tokens.tolist()
        assert ids[0] == 1 and ids.count(1) == 1 and ids[-1] == 2 and ids.count(2) == 1
        assert Tokenizer.load(small).decode(ids[1:-1]) == text
        assert document.targets[:-1].tolist() == ids[1:] and document.loss_weights.tolist() == [1] * (len(ids) - 1) + [
            0
        ]
    bare = TextRenderer(Tokenizer.load(small), DataConfig(add_bos=False, add_eos=False))(TEXTS)
    assert [document.tokens[1:-1].tolist() for document in rendered] == [document.tokens.tolist() for document in bare]


def test_a_tokenizers_own_truncation_padding_and_pad_token_change_nothing(small, tmp_path):
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(small / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64, pad_id=2)
    library.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    want, got = (
        TextRenderer(Tokenizer.load(path), DataConfig())(TEXTS) for path in (small, tmp_path / "tokenizer.json")
    )
    for a, b in zip(want, got, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.loss_weights, b.loss_weights)
        assert b.targets[b.loss_weights > 0][-1] == 2, "the end of a document is trained"


def test_a_long_text_gets_the_ids_of_the_whole_text(small, monkeypatch):
    tokenizer = Tokenizer.load(small)
    long = ["".join(TEXTS[:4]) * 300, "a" * 20_000, " x\u00e9\U0001f44d\n" * 3000]
    want = [tokenizer.library.encode(text, add_special_tokens=False).ids for text in long]
    for name, value in (("LONG", 2000), ("CHUNK", 1000), ("OVERLAP", 200), ("CALL_CHARACTERS", 4000)):
        monkeypatch.setattr(render_module, name, value)
    for ids, got in zip(want, tokenizer.encode_batch(long, [1], [2, 0]), strict=True):
        assert got.tolist() == [1, *ids, 2, 0]


LOOK = """
import resource, sys
from jaxllm.data.__main__ import main
peaks = []
for path in sys.argv[2:]:
    assert main(["--config", sys.argv[1], "--rows", "2", f"data.path={path}"]) == 0
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
assert not sys.modules["jax"]._src.xla_bridge.backends_are_initialized(), "a look starts no backend"
print(peaks[1] - peaks[0], file=sys.stderr)
"""


def test_a_look_at_one_long_line_takes_a_few_times_its_memory(small, tmp_path):
    short, long = (
        lines(tmp_path / "short.jsonl", {"text": "word"}),
        lines(tmp_path / "d.jsonl", {"text": "word " * 1_200_000}),
    )
    (tmp_path / "c.toml").write_text(f'[data]\ntokenizer = "{small}"\nseq_len = 64\nglobal_batch_size = 2\n')
    code = [sys.executable, "-c", LOOK, str(tmp_path / "c.toml"), short, long]
    done = subprocess.run(code, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert float(done.stderr.splitlines()[-1]) < 10 * 6, "MB, ten times the line"
    assert len(done.stdout.splitlines()) == 4


def test_ids_beyond_the_embedding_are_refused_with_both_numbers(small, tmp_path):
    cfg = config(tmp_path, DataConfig(tokenizer=str(small)), vocab_size=300)
    with pytest.raises(UserError, match=r"model\.vocab_size: .*ends at id 399 .* 400 entries, .* 300 rows"):
        load_tokenizer(cfg)
    cfg.model.vocab_size = 512
    assert load_tokenizer(cfg).vocab_size == 400


def test_a_missing_tokenizer_and_a_missing_special_token_are_refused(small, tmp_path):
    with pytest.raises(UserError, match=r"data\.tokenizer: is not set, and neither is model\.path"):
        load_tokenizer(config(tmp_path, DataConfig()))
    with pytest.raises(UserError, match=r"data\.tokenizer: no tokenizer\.json at"):
        load_tokenizer(config(tmp_path, DataConfig(tokenizer=str(tmp_path))))
    (tmp_path / "tokenizer.json").write_bytes((small / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match=r"data\.add_eos: .* names no eos_token"):
        TextRenderer(Tokenizer.load(tmp_path), DataConfig())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is no tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_trained_tokenizer_is_found_again_and_never_replaced(tmp_path):
    lines(tmp_path / "a.jsonl", *({"text": f"some words {n}"} for n in range(30)))
    cfg = config(tmp_path, DataConfig(path=str(tmp_path / "a.jsonl"), tokenizer="bpe:270"))
    first = load_tokenizer(cfg)
    stamp = (first.folder / "tokenizer.json").stat().st_mtime_ns
    assert load_tokenizer(cfg).folder == first.folder == tmp_path / "run" / "tokenizer"
    cfg.data = cfg.data.model_copy(update={"tokenizer": "bpe:280"})
    with pytest.raises(UserError, match="holds a tokenizer of another size or of other documents"):
        load_tokenizer(cfg)
    assert (first.folder / "tokenizer.json").stat().st_mtime_ns == stamp
    assert sorted(os.listdir(tmp_path / "run")) == ["tokenizer"]


# -------------------------------------------------------------------------------------------------------------- batches


@pytest.fixture
def corpus(tmp_path, small):
    """A config over 60 short and two long documents, a fifth of them held out."""
    records = [{"text": f"row {n:03d} " + "word " * (n % 17)} for n in range(60)] + [{"text": "long " * 300}] * 2
    path = lines(tmp_path / "d.jsonl", *records)
    data = DataConfig(path=path, tokenizer=str(small), seq_len=32, global_batch_size=8)
    return config(tmp_path, data, EvaluationConfig(holdout=0.2), num_microbatches=2)


MESHES = [
    {"data": 8},
    {"replica": 2, "data": 2, "sequence": 2, "num": 8},
    {"data": 1, "sequence": 2, "expert": 2},
    {"data": 1},
]


def mesh_of(sizes):
    sizes = {axis: size for axis, size in sizes.items() if axis != "num"}
    return make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def row_order(array, batch):
    """[N, M, T] of a batch with its places in the order of the row, without those that complete it for the devices."""
    order = token_order(batch.layout, array.sharding.mesh.shape["sequence"], array.shape[-1])
    return np.asarray(array)[..., np.argsort(order)][..., : batch.row_length]


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_row_r_lands_in_its_microbatch_whatever_the_mesh(sizes):
    rows = {
        name: values + np.arange(8 * 32, dtype=values.dtype).reshape(8, 32)
        for name, values in empty_rows(8, 32).items()
    }
    mesh = mesh_of(sizes)
    batch = to_device(rows, 2, mesh)
    assert np.array_equal(local_lanes(mesh, 8, 2), np.arange(8))
    for name, values in rows.items():
        array = getattr(batch, name)
        assert array.shape == (2, 4, 32) and array.dtype == values.dtype and array.sharding.mesh == mesh
        assert np.array_equal(row_order(array, batch), values.reshape(2, 4, 32))
    assert len(jax.tree.leaves(batch)) == 7 and isinstance(jax.tree.map(lambda x: x, batch), Batch)


def test_rows_that_do_not_divide_over_the_mesh_are_refused_and_places_are_completed_with_padding():
    with pytest.raises(UserError, match=r"data\.global_batch_size: 6 rows .*num_microbatches = 4 times 1 shares"):
        local_lanes(mesh_of({"data": 1}), 6, 4)
    with pytest.raises(UserError, match=r"data\.global_batch_size: 8 rows .*num_microbatches = 2 times 8 shares"):
        to_device(empty_rows(8, 32), 2, mesh_of({"data": 8}))
    rows = {name: values + 1 for name, values in empty_rows(8, 33).items()}
    batch = to_device(rows, 2, mesh_of({"data": 1, "sequence": 2}))
    for array in jax.tree.leaves(batch):
        assert (row_order(array, batch) == 1).all() and row_order(array, batch).shape == (2, 4, 33)
        assert array.shape[-1] > 33 and np.asarray(array).sum() == 8 * 33


def test_batches_go_on_from_their_cursors_on_another_mesh_with_other_microbatches(corpus):
    with jax.set_mesh(mesh_of({"data": 4})):
        batches = make_batches(corpus)
        straight = [next(batches) for _ in range(3)]
        cursors = batches.cursors
        straight += [next(batches) for _ in range(3)]
        batches.close()
    corpus.optimizer.num_microbatches = 4
    resumed = make_batches(corpus, mesh_of({"data": 1, "sequence": 2, "expert": 2}), cursors=cursors)
    assert np.array_equal(resumed.cursors, cursors) and resumed.fingerprint == batches.fingerprint
    for want in straight[3:]:
        got = next(resumed)
        assert got.tokens.shape == (4, 2, 32)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert np.array_equal(row_order(a, want).reshape(8, 32), row_order(b, got).reshape(8, 32))
    resumed.close()
    with pytest.raises(UserError, match=r"data\.global_batch_size: the position .* has 6 rows, the config 8"):
        make_batches(corpus, mesh_of({"data": 1}), cursors=cursors[:6])


def test_batches_need_a_mesh(corpus):
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        make_batches(corpus)


def found_rows(batches, tokenizer):
    """Numbers of the documents "row NNN ..." that begin somewhere in these batches."""
    found = set()
    for batch in batches:
        tokens, begins = np.asarray(batch.tokens), np.asarray(batch.positions) == 0
        for row, begin in zip(tokens.reshape(-1, 32), begins.reshape(-1, 32), strict=True):
            text = tokenizer.decode(row).split("<|bos|>")
            found |= {part[:7] for part in text if part.startswith("row ") and len(part) >= 7}
            assert begin[0]
    return found


def test_held_out_documents_are_evaluated_and_never_trained_on(corpus):
    mesh = mesh_of({"data": 2})
    _, held = open_documents(corpus.data, corpus.evaluation)
    held = {held[n][:7] for n in range(len(held)) if held[n].startswith("row")}
    corpus.data = corpus.data.model_copy(update={"seq_len": 32, "packing": "none"})
    batches = make_batches(corpus, mesh)
    trained = found_rows((next(batches) for _ in range(60)), batches.tokenizer)
    evaluated = found_rows(make_eval_batches(corpus, mesh), batches.tokenizer)
    batches.close()
    assert len(held) > 4 and evaluated == held and trained == {f"row {n:03d}" for n in range(60)} - held


def test_evaluation_has_every_held_out_token_once_in_one_shape_whatever_the_batch_size(corpus):
    _, held = open_documents(corpus.data, corpus.evaluation)
    render = TextRenderer(load_tokenizer(corpus), corpus.data)
    documents = render([held[n] for n in range(len(held))])
    want_tokens = np.concatenate([document.tokens for document in documents])
    rows = {}
    for size in (2, 4, 8):
        corpus.evaluation = EvaluationConfig(holdout=0.2, batch_size=size)
        batches = make_eval_batches(corpus, mesh_of({"data": 2}))
        for _ in range(2):  # it can be gone through again
            got = list(batches)
            assert {batch.tokens.shape for batch in got} == {(1, size, 32)}
            parts = [
                np.concatenate([np.asarray(x).reshape(-1, 32) for x in leaf])
                for leaf in zip(*map(jax.tree.leaves, got), strict=True)
            ]
            whole = Batch(*parts)
            filled = (whole.segment_ids > 0).any(axis=1)
            assert np.array_equal(whole.tokens[whole.segment_ids > 0], want_tokens)
            assert whole.loss_weights.sum() == sum(len(document.tokens) - 1 for document in documents)
            assert not whole.loss_weights[~filled].any()
        rows[size] = [part[filled] for part in parts]
    for size in (4, 8):
        assert all(np.array_equal(a, b) for a, b in zip(rows[2], rows[size], strict=True))
    corpus.evaluation = EvaluationConfig(holdout=0.2, batch_size=2, max_batches=3)
    assert len(list(make_eval_batches(corpus, mesh_of({"data": 2})))) == 3


def test_evaluation_reads_every_token_once_also_where_training_draws_from_sources_by_weights(corpus, tmp_path):
    evaluated = lines(tmp_path / "e.jsonl", *({"text": f"row {n:03d}"} for n in range(9)))
    corpus.data = corpus.data.model_copy(update={"path": [corpus.data.path, evaluated], "weights": [0.7, 0.3]})
    corpus.evaluation = EvaluationConfig(path=[evaluated, corpus.data.path[0]], batch_size=2)
    got = list(make_eval_batches(corpus, mesh_of({"data": 1})))
    held = [*Documents(corpus.evaluation.path)]
    want = TextRenderer(load_tokenizer(corpus), corpus.data)(held)
    tokens = np.concatenate([np.asarray(batch.tokens)[np.asarray(batch.segment_ids) > 0] for batch in got])
    assert np.array_equal(tokens, np.concatenate([document.tokens for document in want]))


@pytest.fixture
def chats(corpus, tmp_path, small):
    """A config over 20 conversations, of which the last is cut at 64 tokens, and a function that writes a set."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")

    def write(name, *answers):
        return lines(
            tmp_path / f"{name}.jsonl",
            *(
                {"messages": [{"role": "user", "content": "q"}, {"role": role, "content": content}]}
                for role, content in answers
            ),
        )

    path = write("c", *[("assistant", f"answer {n}") for n in range(19)], ("assistant", "long " * 40))
    corpus.data = DataConfig(kind="chat", path=path, tokenizer=str(small), seq_len=64, global_batch_size=8,
                             chat_template=str(tmp_path / "t.jinja"), on_long="truncate", shuffle=False)  # fmt: skip
    corpus.evaluation = EvaluationConfig()
    return corpus, write


@pytest.mark.parametrize("cached", [False, True])
def test_conversations_of_evaluation_sets_are_rendered_and_counted_before_training(chats, tmp_path, cached):
    cfg, write = chats
    good = write("good", ("assistant", "fine"), ("assistant", "much too long " * 40), ("assistant", "also " * 40))
    bad = write("bad", ("assistant", "fine"), ("user", "nobody answers"))
    cfg.data = cfg.data.model_copy(update={"cache": str(tmp_path / "cache") if cached else None})
    cfg.evaluation = EvaluationConfig(every=1, path=good, sets={"odd": bad}, batch_size=2)
    one = mesh_of({"data": 1})
    with contextlib.closing(make_batches(cfg, one)) as batches:
        assert "cut at data.seq_len: 1, 5.00% of the documents" in batches.summary and "c.jsonl:20: " in batches.summary
        with pytest.raises(UserError, match=r"^evaluation\.sets\.odd: .*bad\.jsonl:2: no message of a role that"):
            evaluation_sets(cfg, batches, one)
    cfg.data = cfg.data.model_copy(update={"on_bad": "skip"})
    with contextlib.closing(make_batches(cfg, one)) as batches:
        sets = evaluation_sets(cfg, batches, one)
        assert "cut at data.seq_len: 2, 66.67% of the documents, and " in sets[""].summary
        assert f"(first: {good}:2: " in sets[""].summary and "left out as skipped" not in sets[""].summary
        assert f"left out as skipped: 1, 50.00% of the documents (first: {bad}:2: " in sets["odd"].summary
        cfg.evaluation = EvaluationConfig(every=1, sets={"none": write("none", ("user", "x"), ("user", "y"))})
        with pytest.raises(
            UserError, match=r"^evaluation\.sets\.none: no document is left to evaluate on .*; 2 skipped"
        ):
            evaluation_sets(cfg, batches, one)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_of_which_every_document_is_left_out_is_refused(chats, workers):
    cfg, write = chats
    path = write("long", *[("assistant", "much too long " * 40)] * 9)
    cfg.data = cfg.data.model_copy(update={"path": path, "on_long": "skip", "workers": workers})
    with pytest.raises(
        UserError, match=r"^data\.path: no document is left to train on .*; 9 longer than data\.seq_len"
    ):
        make_batches(cfg, mesh_of({"data": 1}))


def token_file(path, *documents):
    return lines(path, *({"tokens": ids} for ids in documents))


def test_token_ids_beyond_the_embedding_are_refused_in_training_and_in_every_evaluation(tmp_path):
    good, bad = token_file(tmp_path / "a.jsonl", [5, 299]), token_file(tmp_path / "b.jsonl", [5], [300, 7])
    one = mesh_of({"data": 1})
    data = DataConfig(kind="tokens", path=bad, seq_len=8, global_batch_size=1)
    with pytest.raises(UserError, match=r"^data\.path: .*b\.jsonl:2 holds token id 300, but .* = 300 rows"):
        make_batches(config(tmp_path, data, vocab_size=300), one)
    data = data.model_copy(update={"path": good})
    for key, evaluation in (
        ("evaluation.path", EvaluationConfig(every=1, path=bad, batch_size=1)),
        ("evaluation.sets.b", EvaluationConfig(every=1, path=good, sets={"a": good, "b": bad}, batch_size=1)),
    ):
        cfg = config(tmp_path, data, evaluation, vocab_size=300)
        with (
            contextlib.closing(make_batches(cfg, one)) as batches,
            pytest.raises(UserError, match=rf"^{key}: .*b\.jsonl:2 holds token id 300"),
        ):
            evaluation_sets(cfg, batches, one)
        cfg.model.vocab_size = 301
        with contextlib.closing(make_batches(cfg, one)) as batches:
            assert all(len(list(held)) for held in evaluation_sets(cfg, batches, one).values())


def test_the_fingerprint_of_a_run_covers_its_renderer_and_with_weights_where_sources_meet(tmp_path, small):
    def fingerprint(**options):
        data = DataConfig(**{"path": str(tmp_path / "*.jsonl"), "tokenizer": str(small), **options})
        return Training(config(tmp_path, data)).fingerprint

    for name, count in (("a", 4), ("b", 3), ("c", 3)):
        lines(tmp_path / f"{name}.jsonl", *({"text": f"{name} {n}"} for n in range(count)))
    assert fingerprint() != fingerprint(add_eos=False)
    one, two = ([str(tmp_path / pattern) for pattern in patterns] for patterns in (["a*", "[bc]*"], ["[ab]*", "c*"]))
    assert fingerprint(path=one) == fingerprint(path=two) == fingerprint()  # the same documents in the same order
    assert fingerprint(path=one, weights=[1.0, 1.0]) != fingerprint(path=two, weights=[1.0, 1.0])


def test_the_fingerprint_of_a_token_array_covers_the_id_that_ends_its_documents(tmp_path):
    def fingerprint(end):
        np.save(tmp_path / "x.npy", np.array([7, 1, 8, 2, 9], np.int32))
        (tmp_path / "x.npy.json").write_text(json.dumps({"document_end": end}))
        documents = Documents(str(tmp_path / "x.npy"), kind="tokens")
        assert len(documents) == 2
        return documents.fingerprint

    assert fingerprint(1) == fingerprint(1) != fingerprint(2)


def test_the_command_shows_the_rows_of_fewer_documents_than_a_batch_and_says_when_training_would_refuse(
    tmp_path, small, capsys
):
    path = lines(tmp_path / "three.jsonl", *({"prompt": "", "text": f"row {n}"} for n in range(3)))
    (tmp_path / "c.toml").write_text(
        f'[data]\npath = "{path}"\ntokenizer = "{small}"\nseq_len = 16\nglobal_batch_size = 8\nshuffle = false\n'
        'kind = "prompt"\ncompletion_field = "text"\n'
    )
    for rows, overrides, count, told in (
        ("all", [], 3, False), ("8", ["data.repeat=false"], 3, True), ("all", ["data.epochs=2"], 3, True),
        ("8", ["data.epochs=2"], 6, True), ("2", ["data.repeat=false"], 2, True), ("9", [], 9, False),
        ("all", ["data.epochs=3"], 3, False),
    ):  # fmt: skip
        assert (
            command.main(["--config", str(tmp_path / "c.toml"), "--rows", rows, "data.packing=none", *overrides]) == 0
        )
        out, err = capsys.readouterr()
        texts = [json.loads(line)["text"] for line in out.splitlines()]
        assert texts == [f"<|bos|>row {n % 3}<|eos|>" for n in range(count)], (rows, overrides)
        assert ("training will refuse this: data.global_batch_size: 3 documents" in err) == told
        assert "3 records" in err and "rows of one step repeat documents" in err


def test_a_look_leaves_nothing_in_the_folder_of_the_run(tmp_path, capsys):
    path = lines(tmp_path / "d.jsonl", *({"text": f"line {n}"} for n in range(40)))
    asked = [f"data.path={path}", "data.tokenizer=bpe:300", "data.seq_len=16", f"output_dir={tmp_path / 'run'}"]
    (tmp_path / "c.toml").write_text("")
    assert command.main(["--config", str(tmp_path / "c.toml"), "--rows", "1", *asked]) == 0
    assert '"text": "<|bos|>line ' in capsys.readouterr().out and not (tmp_path / "run").exists()


def test_the_sample_that_a_summary_is_estimated_from_takes_part_of_a_document_too_large_for_it(tmp_path, small):
    path = lines(tmp_path / "d.jsonl", {"text": "word " * 400_000}, {"text": "ab"})
    data = DataConfig(path=path, tokenizer=str(small), seq_len=64, global_batch_size=4)
    line = Training(config(tmp_path, data)).summary.splitlines()[-1]
    tokens = int(line.split("about ")[1].split()[0].replace(",", ""))
    want = len(Tokenizer.load(small).encode_batch(["word " * 1000])[0]) * 400
    assert abs(tokens / want - 1) < 0.01 and "100.0% of the tokens trained" in line, line
    assert "estimated from 2 documents, of the last one its beginning" in line


def test_evaluation_on_what_is_trained_on_is_told(corpus, tmp_path):
    apart = lines(tmp_path / "apart.jsonl", {"text": "one of its own"})
    corpus.evaluation = EvaluationConfig(every=1, path=[apart, corpus.data.path], sets={"own": apart}, batch_size=1)
    batches = make_batches(corpus, mesh_of({"data": 1}))
    try:
        sets = evaluation_sets(corpus, batches, mesh_of({"data": 1}))
    finally:
        batches.close()
    assert "1 of its 2 files are in data.path too" in sets[""].summary and "data.path" not in sets["own"].summary


def test_what_the_summary_says_of_a_source_that_was_rendered_whole_is_exact(tmp_path, small):
    texts = ["a", "b " * 20, "\u00e9" * 18]  # bytes and tokens are in no fixed proportion
    data = DataConfig(
        path=lines(tmp_path / "s.jsonl", *({"text": text} for text in texts)), tokenizer=str(small), seq_len=25
    )
    training = Training(config(tmp_path, data))
    lengths = [len(document.tokens) for document in training.render(texts)]
    line = training.summary.splitlines()[-1]
    assert line.startswith(f"3 documents, {sum(lengths)} tokens, the longest {max(lengths)}; ") and "about" not in line
    assert f"; {sum(length > 25 for length in lengths)} are longer than a row of 25" in line


def test_evaluation_without_documents_or_with_rows_that_do_not_divide_is_refused(corpus):
    with pytest.raises(UserError, match=r"evaluation\.batch_size: 8 rows do not divide over 3"):
        make_eval_batches(corpus, mesh_of({"data": 3}))
    corpus.evaluation = EvaluationConfig()
    with pytest.raises(UserError, match="nothing to evaluate on"):
        make_eval_batches(corpus, mesh_of({"data": 1}))


PROCESS = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
from types import SimpleNamespace as N
port, process, folder, axis = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jaxllm.data import DataConfig, EvaluationConfig, make_batches
from jaxllm.sharding import MeshConfig, make_mesh
data = DataConfig(path=folder + "/d.jsonl", tokenizer="bpe:300", seq_len=32, global_batch_size=8, repeat=False)
cfg = N(data=data, evaluation=EvaluationConfig(holdout=0.2), model=N(path=None, vocab_size=None, sliding_window=None), seed=0,
        optimizer=N(num_microbatches=2), output_dir=folder + "/two")
batches = make_batches(cfg, make_mesh(MeshConfig(data=1, sequence=4) if axis == "sequence" else MeshConfig(data=4)))
shards, cursors = [], []
for batch in batches:
    shards.append({str(s.index): np.asarray(s.data) for s in batch.tokens.addressable_shards})
    cursors.append(batches.cursors)
np.savez(f"{folder}/out{process}.npz", cursors=np.array(cursors), lanes=batches._pipeline.lanes, layout=batch.layout,
         **{f"{step}|{key}": value for step, shard in enumerate(shards) for key, value in shard.items()})
jax.distributed.shutdown()
"""


@pytest.mark.parametrize("axis", ["data", "sequence"])
def test_two_processes_see_the_rows_of_one_and_end_together(corpus, tmp_path, axis):
    corpus.data = corpus.data.model_copy(update={"repeat": False, "tokenizer": "bpe:300"})
    batches = make_batches(corpus, mesh_of({"data": 4}))
    want = [(np.asarray(batch.tokens), batches.cursors) for batch in batches]
    with together(PROCESS, 2, tmp_path, axis) as processes:
        finish(processes)
    seen = np.zeros((len(want), *want[0][0].shape), bool)
    for number in range(2):
        out = np.load(tmp_path / f"out{number}.npz")
        assert np.array_equal(out["cursors"], [cursors for _, cursors in want])
        assert len(out["lanes"]) == (8 if axis == "sequence" else 4), "a row cut over both processes is packed by both"
        order = token_order(str(out["layout"]), 4 if axis == "sequence" else 1, 32)
        for key in set(out.files) - {"cursors", "lanes", "layout"}:
            step, index = key.split("|")
            index = eval(index, {"slice": slice})
            assert np.array_equal(out[key], want[int(step)][0][..., order][index])
            seen[int(step)][index] = True
    assert seen.all()

"""What packing, mixing, workers and the token cache promise together: rows that depend on seed, step and row alone.

test_data.py covers files, tokenizers and concatenation; here are first_fit, several sources, epochs, processes that
render ahead, documents that come from disk, and the command that shows rows.
"""

import collections
import io
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import load_config
from jaxllm.data import DataConfig, EvaluationConfig, cache, summary
from jaxllm.data import __main__ as command
from jaxllm.data import pipeline as pipelines
from jaxllm.data import workshop as workshops
from jaxllm.data.batch import Training, evaluation_sets, make_batches, to_device
from jaxllm.data.cache import build, find, key_of
from jaxllm.data.pipeline import MIX_BLOCK, WINDOW, Pipeline, Rendering, empty_rows, order_of
from jaxllm.data.render import Rendered, TextRenderer, Tokenizer, train_tokenizer
from jaxllm.data.sources import Documents
from jaxllm.data.workers import Workers
from jaxllm.data.workshop import workshop
from jaxllm.section import UserError
from support import ROOT, TINY, finish, mesh, tiny, together

few = settings(max_examples=40, deadline=None)
pytestmark = pytest.mark.usefixtures("remembered_shuffles")


class Numbered:
    """Documents whose tokens are all different: token = 1 + 1000 * document + place. They render themselves."""

    def __init__(self, lengths, sources=None):
        self.lengths = lengths
        self.sources = sources or [("all", 0, len(lengths))]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        return number

    def where(self, number):
        return f"d.jsonl:{number + 1}"

    @staticmethod
    def tokens(number, length):
        return 1 + 1000 * number + np.arange(length, dtype=np.int32)

    def render(self, records):
        return [Rendered.all_trained(self.tokens(number, self.lengths[number])) for number, _ in records]


def pipeline(lengths, sources=None, **options):
    names = ("seed", "lanes", "cursors")
    documents = Numbered(lengths, sources)
    data = DataConfig(**{name: value for name, value in options.items() if name not in names})
    return Pipeline(documents, documents.render, data, **{n: v for n, v in options.items() if n in names})


def take(iterator, count):
    got = list(itertools.islice(iterator, count))
    iterator.close()
    return got


def assert_same_rows(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), name


def pieces(rows, row):
    """(document, first token, tokens) of each segment of a row, checked to be a run of one document's tokens."""
    segments = rows["segment_ids"][row]
    for segment in range(1, segments.max() + 1):
        tokens = rows["tokens"][row][segments == segment]
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        yield (int(tokens[0]) - 1) // 1000, (int(tokens[0]) - 1) % 1000, len(tokens)


# ------------------------------------------------------------------------------------------------------------- first fit

whole = st.lists(st.integers(0, 16), min_size=6, max_size=90).filter(any)
shapes = st.fixed_dictionaries({"global_batch_size": st.integers(1, 5), "seq_len": st.integers(16, 24)})


@few
@given(whole, shapes, st.booleans(), st.integers(0, 2**32 - 1))
def test_first_fit_has_every_document_once_and_whole_and_trains_only_inside_it(lengths, shape, shuffle, seed):
    seen, transitions = collections.Counter(), collections.Counter()
    for rows, _ in pipeline(lengths, **shape, packing="first_fit", shuffle=shuffle, seed=seed, repeat=False):
        trained, real = rows["loss_weights"] > 0, rows["segment_ids"] > 0
        transitions.update(zip(rows["tokens"][trained].tolist(), rows["targets"][trained].tolist(), strict=True))
        assert not any(values[~real].any() for values in rows.values())
        for row in range(shape["global_batch_size"]):
            for document, first, length in pieces(rows, row):
                assert (first, length) == (0, lengths[document])
                seen[document] += 1
    assert seen == {number: 1 for number, length in enumerate(lengths) if length}
    assert transitions == {
        (token, token + 1): 1
        for number, length in enumerate(lengths)
        for token in Numbered.tokens(number, length).tolist()[:-1]
    }


def first_fit_by_the_book(lengths, seq_len):
    """Rows as lists of documents: each row takes, in order, what still fits among the next WINDOW that are left,
    counted from the first that is."""
    used, rows = set(), []
    while len(used) < len(lengths):
        row, room, number = [], seq_len, 0
        while number < len(lengths):
            first = min(set(range(len(lengths))) - used, default=len(lengths))
            if number >= first + WINDOW:
                break
            if number not in used and lengths[number] <= room and room:
                used.add(number)
                if lengths[number]:
                    row.append(number)
                    room -= lengths[number]
            number += 1
        rows.append(row)
    return [row for row in rows if row]


@few
@given(st.lists(st.integers(1, 16), min_size=1, max_size=200), st.integers(16, 40))
def test_first_fit_takes_the_documents_that_the_rule_names(lengths, seq_len):
    rows = pipeline(lengths, seq_len=seq_len, global_batch_size=1, packing="first_fit", shuffle=False, repeat=False)
    got = [[document for document, _, _ in pieces(row, 0)] for row, _ in rows]
    assert got == first_fit_by_the_book(lengths, seq_len)


@settings(max_examples=15, deadline=None)
@given(whole, shapes, st.booleans(), st.integers(0, 9))
def test_first_fit_resumes_exactly_after_every_step_with_lanes_shared_out_anew(lengths, shape, repeat, seed):
    options = {**shape, "packing": "first_fit", "repeat": repeat, "seed": seed}
    size = shape["global_batch_size"]
    straight = take(pipeline(lengths, **options), 6)
    for step, (_, cursors) in enumerate(straight[:-1]):
        assert cursors.dtype == np.int64 and (cursors >= 0).all()
        for lanes in (list(range(0, size, 2)), list(range(1, size, 2))):
            if lanes:
                resumed = take(pipeline(lengths, **options, lanes=lanes, cursors=cursors[lanes]), 5 - step)
                for (rows, after), (got, got_after) in zip(straight[step + 1 :], resumed, strict=False):
                    assert_same_rows({name: values[lanes] for name, values in rows.items()}, got)
                    assert np.array_equal(after[lanes], got_after)
                for rows, _ in straight[step + 1 + len(resumed) :]:
                    assert not rows["segment_ids"][lanes].any()


def test_a_position_with_the_whole_window_used_but_its_first_document_goes_on():
    lengths = [16] + [1] * 62 + [3, 5] + [16] * 20
    straight = take(pipeline(lengths, seq_len=16, global_batch_size=1, packing="first_fit", shuffle=False), 6)
    bits = (1 << 62) - 1
    first = next(pipeline(lengths, seq_len=16, global_batch_size=1, packing="first_fit", shuffle=False,
                          cursors=[[0, bits]]))  # fmt: skip
    assert [document for document, _, _ in pieces(first[0], 0)] == [0] and first[1].tolist() == [[63, 0]]
    assert [document for document, _, _ in pieces(straight[0][0], 0)] == [0]


def test_first_fit_refuses_a_document_that_no_row_holds_by_its_place():
    with pytest.raises(UserError, match=r'data\.packing: "first_fit" .* d\.jsonl:3 has 20 tokens, more than'):
        take(pipeline([5, 5, 20, 5], seq_len=16, global_batch_size=1, packing="first_fit", shuffle=False), 4)


def test_a_source_of_empty_documents_ends_in_an_error_with_first_fit_too():
    with pytest.raises(UserError, match="no tokens at all"):
        next(pipeline([0, 0, 0], global_batch_size=2, packing="first_fit"))


def test_first_fit_fills_rows_of_chat_like_lengths_to_98_percent():
    lengths = np.random.default_rng(0).lognormal(np.log(350), 0.9, 20_000).clip(4, 2048).astype(int)
    documents = Numbered(lengths)
    data = DataConfig(seq_len=2048, packing="first_fit")
    rows = take(Pipeline(documents, documents.render, data), 50)
    assert np.mean([row["segment_ids"] > 0 for row, _ in rows]) >= 0.98


# -------------------------------------------------------------------------------------------------- epochs and weights


@few
@given(st.lists(st.integers(1, 12), min_size=6, max_size=30), st.sampled_from(["concatenate", "first_fit", "none"]),
       st.integers(1, 6), st.integers(1, 3))  # fmt: skip
def test_epochs_end_the_data_after_every_token_came_so_many_times(lengths, packing, size, epochs):
    tokens = collections.Counter()
    for rows, _ in pipeline(lengths, seq_len=12, global_batch_size=size, packing=packing, epochs=epochs):
        tokens.update(rows["tokens"][rows["segment_ids"] > 0].tolist())
    assert tokens == {
        token: epochs for number, length in enumerate(lengths) for token in Numbered.tokens(number, length).tolist()
    }


def mixed(weights, counts, **options):
    begins = np.cumsum([0, *counts])
    sources = [(f"s{n}", int(begins[n]), count) for n, count in enumerate(counts)]
    data = DataConfig(path=[f"s{n}" for n in range(len(counts))], weights=weights, **options)
    return order_of(data, 3, Numbered([1] * int(begins[-1]), sources)), begins


mixtures = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=2, max_size=5)


@few
@given(mixtures, st.integers(1, 8))
def test_sources_are_drawn_by_their_weights_in_every_stretch_and_every_lane(mixture, size):
    weights, counts = [w / 7 for w, _ in mixture], [count for _, count in mixture]
    (order, length), begins = mixed(weights, counts, shuffle=False)
    assert length is None
    drawn = np.searchsorted(begins, [order[place] for place in range(3 * MIX_BLOCK)], side="right") - 1
    share = np.array(weights) / sum(weights)
    for blocks in (1, 2, 3):
        got = np.bincount(drawn[: blocks * MIX_BLOCK], minlength=len(counts))
        assert np.abs(got - blocks * MIX_BLOCK * share).max() <= len(counts)
    for lane in range(size):  # 5 sigma of a draw without pattern
        mine = np.bincount(drawn[lane::size], minlength=len(counts)) / len(drawn[lane::size])
        assert np.abs(mine - share).max() <= 5 * np.sqrt(0.25 * size / len(drawn)) + 0.01


@settings(max_examples=15, deadline=None)
@given(mixtures, st.booleans())
def test_each_source_keeps_its_own_epochs_and_order_and_any_place_is_computed_directly(mixture, shuffle):
    weights, counts = [float(w) for w, _ in mixture], [count for _, count in mixture]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "MIX_BLOCK", 256)  # several blocks of fewer places
        (order, _), begins = mixed(weights, counts, shuffle=shuffle)
        numbers = [order[place] for place in range(520)]
        again = mixed(weights, counts, shuffle=shuffle)[0][0]
        assert [again[place] for place in (519, 17, 256, 255, 0)] == [numbers[p] for p in (519, 17, 256, 255, 0)]
    for source, count in enumerate(counts):
        mine = [n - begins[source] for n in numbers if begins[source] <= n < begins[source + 1]]
        for epoch in range(len(mine) // count):
            part = mine[epoch * count : (epoch + 1) * count]
            assert sorted(part) == list(range(count)) and (shuffle or part == sorted(part))


@few
@given(mixtures, st.integers(1, 2))
def test_an_epoch_of_a_mixture_has_every_document_at_least_once_and_ends_on_all_lanes(mixture, epochs):
    weights, counts = [float(w) for w, _ in mixture], [count for _, count in mixture]
    (order, length), _ = mixed(weights, counts, epochs=epochs, shuffle=False)
    if length <= 20_000:
        seen = collections.Counter(order[place] for place in range(length))
        assert min(seen[number] for number in range(sum(counts))) == epochs, "not one place too many"
    share = [weight / sum(weights) for weight in weights]
    assert abs(length - max(epochs * count / part for count, part in zip(counts, share, strict=True))) <= MIX_BLOCK


def test_mixed_rows_resume_exactly_and_do_not_depend_on_how_lanes_are_shared_out():
    lengths = [1 + n % 11 for n in range(90)]
    sources = [("a", 0, 60), ("b", 60, 30)]
    for packing in ("concatenate", "first_fit"):
        options = dict(seq_len=16, global_batch_size=4, packing=packing, path=["a", "b"], weights=[1.0, 3.0], seed=5)
        straight = take(pipeline(lengths, sources, **options), 30)
        got = take(pipeline(lengths, sources, **options, lanes=[1, 3], cursors=straight[9][1][[1, 3]]), 20)
        for (rows, _), (mine, _) in zip(straight[10:], got, strict=True):
            assert_same_rows({name: values[[1, 3]] for name, values in rows.items()}, mine)


def test_a_source_without_a_document_cannot_be_drawn_from():
    with pytest.raises(UserError, match=r"data\.weights: there is no document to draw from s1"):
        mixed([1.0, 1.0], [3, 0])


# ------------------------------------------------------------------------------------------------ workers and the cache


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(Documents("{stdlib}/json/*.py"), 300, folder / "t", {})
    return folder / "t"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """70 short texts and two long ones; 40 pairs."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [{"text": f"row {n:03d} " + "word é " * (n % 9)} for n in range(70)] + [{"text": "long " * 200}] * 2
    write_lines(folder / "text.jsonl", texts)
    pairs = [{"prompt": f"what is {n}?", "completion": f" it is {n * n}." * (1 + n % 3)} for n in range(40)]
    write_lines(folder / "pairs.jsonl", pairs)
    return folder


def config(corpus, tokenizer, output="unused", evaluation=None, **data):
    kind = data.get("kind", "text")
    path = str(corpus / ("pairs.jsonl" if kind == "prompt" else "text.jsonl"))
    data = {"path": path, "tokenizer": str(tokenizer), "seq_len": 64, "global_batch_size": 8, **data}
    cfg = load_config(None, *TINY, "model.vocab_size=300", "seed=4", f"output_dir={output}")
    return cfg.model_copy(update={"data": DataConfig(**data), "evaluation": evaluation or EvaluationConfig()})


@pytest.mark.parametrize("kind, packing", [("text", "concatenate"), ("text", "none"), ("prompt", "first_fit")])
def test_sixty_steps_shared_out_anew_five_times_are_byte_identical(corpus, tokenizer, kind, packing):
    cfg = config(corpus, tokenizer, kind=kind, packing=packing)
    training = Training(cfg)
    straight = take(Pipeline(training.source, None, cfg.data, seed=cfg.seed), 60)
    rng = np.random.default_rng([len(kind), len(packing)])
    stops = [*sorted(rng.choice(np.arange(1, 60), 5, replace=False).tolist()), 60]
    cursors, begin = np.zeros((8, 2), np.int64), 0
    with_workers = Workers(training.source, 2)
    try:
        for life, stop in enumerate(stops):
            processes = (1, 4, 2, 4, 1, 2)[life]
            source = (training.source, with_workers)[life % 2]
            after = np.full((8, 2), -1, np.int64)
            for process in range(processes):
                lanes = np.arange(8).reshape(processes, -1)[process] if life % 3 else np.arange(8)[process::processes]
                mine = Pipeline(source, None, cfg.data, seed=cfg.seed, lanes=lanes, cursors=cursors[lanes])
                for rows, _ in straight[begin:stop]:
                    got, after[lanes] = next(mine)
                    assert_same_rows({name: values[lanes] for name, values in rows.items()}, got)
                mine.close()
            assert np.array_equal(after, straight[stop - 1][1])
            cursors, begin = after, stop
    finally:
        with_workers.close()


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=30), st.integers(1, 3), st.integers(1, 4), st.booleans(),
    st.sampled_from(["concatenate", "none"]),
)  # fmt: skip
def test_any_number_of_workers_makes_the_rows_that_none_makes(tokenizer, lengths, workers, size, shuffle, packing):
    """Random documents, rows and workers, real processes among them: every row, byte for byte, to the end of the data and twice over."""
    with tempfile.TemporaryDirectory() as folder:
        write_lines(
            pathlib.Path(folder) / "d.jsonl", [{"text": f"{n} word " * length} for n, length in enumerate(lengths)]
        )
        data = {"path": f"{folder}/d.jsonl", "tokenizer": str(tokenizer), "seq_len": 32, "epochs": 2}
        data |= {"global_batch_size": size, "shuffle": shuffle, "packing": packing}
        cfg = load_config(None, *TINY, "model.vocab_size=300", f"output_dir={folder}/unused")
        rows = {}
        for count in (0, workers):
            training = Training(cfg.model_copy(update={"data": DataConfig(**data, workers=count)}))
            try:
                rows[count] = [
                    row for row, _ in take(Pipeline(training.source, None, cfg.data.model_copy(update=data)), 5000)
                ]
            finally:
                training.close()
        assert len(rows[0]) == len(rows[workers]) < 5000
        for a, b in zip(*rows.values(), strict=True):
            assert_same_rows(a, b)


def test_a_run_with_workers_has_the_same_rows_and_ends_them(corpus, tokenizer):
    rows = {}
    for workers in (0, 1, 3):
        batches = make_batches(config(corpus, tokenizer, workers=workers), mesh())
        rows[workers] = [np.asarray(next(batches).tokens) for _ in range(5)]
        processes = getattr(batches._training.source, "processes", [])
        assert len(processes) == workers and all(process.poll() is None for process in processes)
        batches.close()
        assert all(process.poll() is not None for process in processes)
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[3])


def test_a_workers_error_arrives_as_it_is_and_a_killed_worker_is_named(corpus, tokenizer, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes((corpus / "text.jsonl").read_bytes())
    source = Rendering(Documents(str(path)), TextRenderer(Tokenizer.load(tokenizer), DataConfig()))
    workers = Workers(source, 1)
    assert [len(document.tokens) for document in workers.rendered([1, 0])] == [
        len(document.tokens) for document in source.rendered([1, 0])
    ]
    path.write_text("")
    with pytest.raises(UserError, match=r"text\.jsonl:3 has changed since the run began") as raised:
        workers.rendered([2])
    assert any("in a data worker" in note for note in raised.value.__notes__)
    os.kill(workers.processes[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"a data worker was ended by SIGKILL; .* lower data\.workers"):
        workers.rendered([0])
    with pytest.raises(RuntimeError):
        workers.rendered([0])
    workers.close()


def test_workers_leave_ctrl_c_to_the_training_process(corpus, tokenizer):
    source = Rendering(Documents(str(corpus / "text.jsonl")), TextRenderer(Tokenizer.load(tokenizer), DataConfig()))
    workers = Workers(source, 1)
    workers.rendered([0])
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(workers.processes[0].pid, number)
    assert len(workers.rendered([1])) == 1
    process = workers.processes[0]
    del workers
    assert process.poll() is not None, "dropping them ends them"


SCRIPT = """
import sys, time, jax
from jaxllm.config import load_config
from jaxllm.data import make_batches
from jaxllm.sharding import make_mesh
jax.devices()
cfg = load_config(None, f"data.path={PATH}", f"data.tokenizer={TOKENIZER}", "data.seq_len=64", "data.workers=2")
batches = make_batches(cfg, make_mesh(cfg.mesh))
next(batches)
print("pids", *[process.pid for process in batches._training.source.processes], flush=True)
time.sleep(60 if "wait" in sys.argv else 0)
"""


def runs(pid):
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("how", ["script", "stdin", "killed"])
def test_workers_start_without_a_main_guard_and_end_with_the_parent(corpus, tokenizer, tmp_path, how):
    code = SCRIPT.replace("PATH", repr(str(corpus / "text.jsonl"))).replace("TOKENIZER", repr(str(tokenizer)))
    (tmp_path / "script.py").write_text(code)
    arguments = ["-"] if how == "stdin" else [str(tmp_path / "script.py"), *(["wait"] if how == "killed" else [])]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    process = subprocess.Popen(
        [sys.executable, "-W", "error::DeprecationWarning:os", *arguments], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        if how == "killed":
            line = process.stdout.readline()
            process.kill()
            process.communicate()
        else:
            line, errors = process.communicate(code if how == "stdin" else None, timeout=60)
            assert process.returncode == 0 and "fork" not in errors, errors
    finally:
        process.kill()
    pids = [int(pid) for pid in line.split()[1:]]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def token_caches(folder):
    return [path for path in folder.iterdir() if path.is_dir()]


@pytest.mark.parametrize("kind", ["text", "prompt"])
def test_rows_from_the_cache_are_those_without_and_it_is_built_once(corpus, tokenizer, tmp_path, kind, monkeypatch):
    plain = Training(config(corpus, tokenizer, kind=kind))
    want = take(Pipeline(plain.source, None, plain.source.render.data), 20)
    for workers, part in ((2, cache.PART), (0, 16)):  # the second writes each document in several parts
        monkeypatch.setattr(cache, "PART", part)
        cfg = config(corpus, tokenizer, kind=kind, cache=str(tmp_path / f"cache{workers}"), workers=workers)
        training = Training(cfg)
        for (rows, cursors), (got, reached) in zip(
            want, take(Pipeline(training.source, None, cfg.data), 20), strict=True
        ):
            assert_same_rows(rows, got)
            assert np.array_equal(cursors, reached)
    folders = [folder for workers in (0, 2) for folder in token_caches(tmp_path / f"cache{workers}")]
    assert len(folders) == 2
    for name in sorted(os.listdir(folders[0])):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    monkeypatch.setattr(cache, "build", None)
    monkeypatch.setattr(Documents, "_read", None)
    assert Training(cfg).summary == training.summary


def test_a_cut_or_foreign_cache_is_told_left_alone_and_not_used(corpus, tokenizer, tmp_path, capsys):
    folder = tmp_path / "cache"
    cfg = config(corpus, tokenizer, cache=str(folder))
    want = take(Pipeline(Training(cfg).source, None, cfg.data), 5)
    (first,) = token_caches(folder)
    for name in ("tokens.i32", "weights.bits", "lengths.i32", "last.i32", "cache.json"):
        whole_file = (first / name).read_bytes()
        (first / name).write_bytes(whole_file[:-3])
        before = len(token_caches(folder))
        capsys.readouterr()
        training = Training(cfg)
        assert training.source.folder != first and "it is not used, and left as it is" in capsys.readouterr().err
        for (rows, _), (got, _) in zip(want, take(Pipeline(training.source, None, cfg.data), 5), strict=True):
            assert_same_rows(rows, got)
        assert (first / name).read_bytes() == whole_file[:-3]
        assert len(token_caches(folder)) == (before + 1 if name == "tokens.i32" else before), "the second one serves"
        (first / name).write_bytes(whole_file)
    contents = json.loads((first / "cache.json").read_text())
    (first / "cache.json").write_text(json.dumps({**contents, "key": "0" * 32}))
    documents = Training(cfg).documents
    key = key_of(documents, Training(cfg).render, cfg.data)
    told = []
    assert find(folder, key, documents, told.append).folder != first and "something else" in told[0]


def test_another_tokenizer_template_choice_or_content_has_another_cache(corpus, tokenizer, tmp_path):
    train_tokenizer(Documents("{stdlib}/json/*.py"), 310, tmp_path / "other", {})
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "else " * 9}) + "\n" + json.dumps({"text": "b"}) + "\n")
    cfg = config(corpus, tokenizer)
    variants = [
        cfg.data,
        cfg.data.model_copy(update={"tokenizer": str(tmp_path / "other")}),
        cfg.data.model_copy(update={"add_eos": False}),
        cfg.data.model_copy(update={"path": str(tmp_path / "text.jsonl")}),
    ]
    keys = set()
    for data in variants:
        documents = Documents(data.path)
        keys.add(key_of(documents, TextRenderer(Tokenizer.load(data.tokenizer), data), data))
    assert len(keys) == 4
    same = variants[0].model_copy(update={"shuffle": False, "seq_len": 32, "global_batch_size": 2, "workers": 3})
    assert key_of(Documents(same.path), TextRenderer(Tokenizer.load(tokenizer), same), same) in keys


def test_other_code_or_another_version_of_a_library_has_another_cache(corpus, tokenizer, tmp_path, monkeypatch):
    documents, render = Documents(str(corpus / "text.jsonl")), TextRenderer(Tokenizer.load(tokenizer), DataConfig())
    keys, chat = [], SimpleNamespace(kind="chat")
    add = lambda *kinds: keys.extend(key_of(documents, render, kind) for kind in kinds)
    add(DataConfig(), chat)
    for module in ("formats", "sources", "render", "chat"):
        (tmp_path / module).mkdir()
        for path in cache.HERE.glob("*.py"):
            (tmp_path / module / path.name).write_bytes(path.read_bytes() + b"#" * (path.stem == module))
        with monkeypatch.context() as patch:
            patch.setattr(cache, "HERE", tmp_path / module)
            add(chat)
    version = cache.importlib.metadata.version
    for library in ("tokenizers", "jinja2", "mistral-common"):
        with monkeypatch.context() as patch:
            patch.setattr(
                cache.importlib.metadata, "version", lambda name, of=library: "0" if name == of else version(name)
            )
            add(chat)
    assert len(set(keys)) == len(keys) == 9
    keys.clear()
    with monkeypatch.context() as patch:
        add(DataConfig())
        patch.setattr(cache, "HERE", tmp_path / "chat")
        add(DataConfig())
    assert len(set(keys)) == 1, "a text does not depend on chat.py"


BUILDER = """
import json, os, pathlib, sys, time
from jaxllm.data import cache
from jaxllm.data.pipeline import Rendering
from jaxllm.data.render import Rendered
_, number, folder, *killed = sys.argv[1:]
folder = pathlib.Path(folder)

class Documents(list):
    size = [10] * 200

def render(records):
    if killed:
        (folder / f"ready{number}").touch()
        time.sleep(100)
    return [Rendered.all_trained(cache.np.arange(1, 4 + record % 5, dtype="i4")) for record in records]

source = Rendering(Documents(range(200)), render)
write = cache._write
def ready(*arguments):  # so that all have finished before one may give its cache the name
    write(*arguments)
    (folder / f"ready{number}").touch()
    while len(list(folder.glob("ready*"))) < 3:
        time.sleep(0.005)
if not killed:
    cache._write = ready
path = cache.build(folder / "cache", "k", source)
(folder / f"out{number}.json").write_text(json.dumps(str(path)))
"""


def test_builders_of_one_cache_at_once_all_end_with_the_same_whole_one(tmp_path):
    with together(BUILDER, 3, tmp_path) as processes:
        finish(processes)
    paths = {json.loads((tmp_path / f"out{number}.json").read_text()) for number in range(3)}
    assert paths == {str(tmp_path / "cache" / "k")} and os.listdir(tmp_path / "cache") == ["k"]
    found = find(tmp_path / "cache", "k", range(200))
    assert [len(document.tokens) for document in found.rendered(range(200))] == [3 + n % 5 for n in range(200)]


def test_what_a_killed_builder_leaves_is_removed_by_the_next_but_no_other_workshop(tmp_path, capsys):
    folder, documents = tmp_path / "cache", Numbered([4, 5, 6])
    with together(BUILDER, 2, tmp_path, "killed") as (killed, working):
        while not (tmp_path / "ready0").exists() or not (tmp_path / "ready1").exists():
            assert killed.poll() is None and working.poll() is None, killed.stderr.read()
            time.sleep(0.01)
        before = set(os.listdir(folder))
        assert len(before) == 2
        killed.kill()
        killed.wait()
        (folder / ".building-0ther123-x").mkdir()
        build(folder, "a", Rendering(documents, documents.render))
        assert len(before & set(os.listdir(folder))) == 1 and (folder / ".building-0ther123-x").exists()
        assert "cache/.building-0ther123-x is being built by another machine, or was left" in capsys.readouterr().err
    build(folder, "b", Rendering(documents, documents.render))
    assert sorted(os.listdir(folder)) == [".building-0ther123-x", "a", "b"]


def test_where_linux_names_no_boot_another_systems_id_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(workshops, "BOOT_ID", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert workshops._machine() is None
    (tmp_path / "sysctl").write_text('#!/bin/sh\n[ "$*" = "-n kern.bootsessionuuid" ] && echo 0F1E2D3C-4B5A\n')
    (tmp_path / "sysctl").chmod(0o755)
    assert workshops._machine() == "0F1E2D3C"


@pytest.mark.parametrize("when", ["before the lock", "after it is made"])
def test_a_workshop_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch, when):
    made, opened, swept = tempfile.mkdtemp, open, []

    def sweep_after(action):
        def acts(*arguments, **options):
            result = action(*arguments, **options)
            if len(swept) < 2:
                swept.append(result)
                workshops._sweep(tmp_path, workshops._machine(), print)
            return result

        return acts

    with monkeypatch.context() as patch:
        if when == "after it is made":
            patch.setattr(tempfile, "mkdtemp", sweep_after(made))
        else:
            patch.setattr(workshops, "open", sweep_after(opened), raising=False)
        with workshop(tmp_path) as place:
            assert swept and (place / "builder").exists()
            workshops._sweep(tmp_path, workshops._machine(), print)
            assert place.is_dir(), "one at work is left alone"
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_finished_leaves_nothing_behind(tmp_path):
    documents = Numbered([4, 5, 6])

    def failing(records):
        raise UserError("d.jsonl:2: bad")

    with pytest.raises(UserError, match="bad"):
        build(tmp_path / "cache", "k", Rendering(documents, failing))
    assert list((tmp_path / "cache").iterdir()) == []
    for field, value in (("targets", 7), ("loss_weights", 0.5)):
        odd = lambda records, field=field, value=value: [
            document._replace(**{field: np.full_like(document.tokens, value, np.float32)})
            for document in documents.render(records)
        ]
        with pytest.raises(ValueError, match="whose targets are their next tokens, with weights 0 and 1"):
            build(tmp_path / "cache", "k", Rendering(documents, odd))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache: cannot write to"):
        build(tmp_path / "file", "k", Rendering(documents, documents.render))


# ------------------------------------------------------------------------------- summary, evaluation sets, the command


def test_the_summary_counts_what_is_there_and_says_when_it_estimates(corpus, tokenizer, tmp_path):
    training = Training(config(corpus, tokenizer, cache=str(tmp_path / "cache")))
    documents = training.render([training.documents[n] for n in range(72)])
    lengths = [len(document.tokens) for document in documents]
    trained = (sum(lengths) - 72) / sum(lengths)
    line = training.summary.splitlines()[-1]
    assert line.startswith(f"72 documents, {sum(lengths):,} tokens, the longest {max(lengths):,}; {trained:.1%} of")
    assert f"; {sum(n > 64 for n in lengths)} are longer than a row of 64 and split, no token dropped" in line
    assert line.endswith("rows 100.0% full") and "estimated" not in line
    estimated = Training(config(corpus, tokenizer)).summary.splitlines()[-1]
    assert estimated.endswith("estimated from 72 documents")
    ending = Training(config(corpus, tokenizer, epochs=3)).summary
    assert f"rows {3 * sum(lengths) / (3 * sum(lengths) + 8 * 64 / 2):.1%} full" in ending
    pairs = Training(config(corpus, tokenizer, kind="prompt", seq_len=30, on_long="skip")).summary.splitlines()[-1]
    assert (
        "left out as longer than data.seq_len: " in pairs and "pairs.jsonl:" in pairs and "% full (first_fit" in pairs
    )
    source = Training(config(corpus, tokenizer, kind="prompt", on_long="truncate", seq_len=30))
    workers = Workers(Rendering(source.documents, source.render), 2)
    try:
        counted = summary.count_all(workers)
    finally:
        workers.close()
    assert counted.counts["truncated"] == source.render.truncated and counted.counts["truncated"]["documents"] > 0


def test_named_sets_are_evaluated_each_on_its_own_files(corpus, tokenizer, tmp_path):
    paths = {name: write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(9)])
             for name in ("one", "two")}  # fmt: skip
    cfg = config(corpus, tokenizer, evaluation=EvaluationConfig(every=1, holdout=0.2, sets=paths, batch_size=2))
    batches = make_batches(cfg, mesh())
    sets = evaluation_sets(cfg, batches, mesh())
    assert list(sets) == ["", "one", "two"]
    for name in ("one", "two"):
        tokens = np.concatenate([np.asarray(b.tokens)[np.asarray(b.segment_ids) > 0] for b in sets[name]])
        text = batches.tokenizer.decode(tokens, skip_special_tokens=True)
        assert text == "".join(f"{name} {n}" for n in range(9))
    batches.close()
    cfg = config(corpus, tokenizer, evaluation=EvaluationConfig(every=1, sets={"gone": str(tmp_path / "none.jsonl")}))
    with pytest.raises(UserError, match=r"evaluation\.sets\.gone: "):
        evaluation_sets(cfg, SimpleNamespace(held_out=None, render=None), mesh())


def test_a_run_logs_every_set_by_its_name(corpus, tokenizer, tmp_path):
    path = write_lines(tmp_path / "one.jsonl", [{"text": f"one {n}"} for n in range(9)])
    overrides = [
        *TINY, "model.vocab_size=300", f"data.path={corpus / 'text.jsonl'}", f"data.tokenizer={tokenizer}", "steps=2",
        f"output_dir={tmp_path / 'run'}", "evaluation.every=2", "evaluation.holdout=0.2", "evaluation.batch_size=8",
        f'evaluation.sets={{one = "{path}"}}', "data.workers=2",
    ]  # fmt: skip
    (tmp_path / "empty.toml").write_text("")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": os.environ["JAXLLM_TEST_CACHE"]}
    arguments = [sys.executable, "-m", "jaxllm.train", "--config", str(tmp_path / "empty.toml"), *overrides]
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluating on one: 9 records" in done.stdout and "estimated from" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sets = [(row["step"], row.get("eval_set"), row["eval_tokens"]) for row in rows if "eval_loss" in row]
    assert [entry[:2] for entry in sets] == [(0, None), (0, "one"), (2, None), (2, "one")]
    assert sets[1][2] != sets[0][2] and "validation loss of one " in done.stdout


def shown(tmp_path, corpus, tokenizer, *arguments, path="text.jsonl"):
    (tmp_path / "c.toml").write_text(
        f'seed = 4\n[data]\npath = "{corpus / path}"\ntokenizer = "{tokenizer}"\nseq_len = 64\nglobal_batch_size = 8\n'
    )
    return command.main(["--config", str(tmp_path / "c.toml"), *arguments])


def test_the_command_shows_the_rows_of_a_step_and_the_summary(corpus, tokenizer, tmp_path, capsys):
    cfg = config(corpus, tokenizer)
    want = take(Pipeline(Training(cfg).source, None, cfg.data, seed=4), 3)
    assert shown(tmp_path, corpus, tokenizer, "--rows", "11", "--at-step", "2") == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["step"], line["row"]) for line in lines] == [(2, row) for row in range(8)] + [(3, 0), (3, 1), (3, 2)]
    names = {"tokens": "input_ids", "targets": "targets", "loss_weights": "loss_mask", "positions": "positions"}
    for line in lines:
        rows = want[line["step"] - 1][0]
        for name, key in (names | {"segment_ids": "segment_ids"}).items():
            assert line[key] == rows[name][line["row"]].tolist()
    assert "row 0" in lines[0]["text"] or "long" in lines[0]["text"]
    assert "72 records" in err and "tokens trained" in err


def test_the_command_shows_a_whole_epoch_and_refuses_in_one_line(corpus, tokenizer, tmp_path, capsys):
    assert shown(tmp_path, corpus, tokenizer, "--rows", "all", "data.packing=none") == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert sorted(int(text.split("row ")[1][:3]) for text in texts if "row " in text) == list(range(70))
    assert shown(tmp_path, corpus, tokenizer, "--at-step", "99", "data.repeat=false") == 0
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("--at-step 99: no rows, the data ends before that step\n72 records")
    assert shown(tmp_path, corpus, tokenizer, "data.path=nowhere.jsonl") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: data.path: 'nowhere.jsonl' matches 0 files") and err.count("\n") == 1


def test_on_a_terminal_what_is_trained_is_green(corpus, tokenizer):
    cfg = config(corpus, tokenizer, kind="prompt", shuffle=False)
    training = Training(cfg)
    rows, _ = next(Pipeline(training.source, None, cfg.data))
    out = io.StringIO()
    out.isatty = lambda: True
    command._print_row(training.tokenizer, rows, 0, {}, out)
    text = out.getvalue().split("\n", 1)[1]
    assert f"{command.SEEN}<|bos|>what is 0?{command.PLAIN}{command.TRAINED} it is 0.<|eos|>{command.PLAIN}" in text


def test_help_needs_neither_jax_nor_a_tokenizer_library():
    code = "import sys, runpy; sys.argv = ['x', '--help']\ntry: runpy.run_module('jaxllm.data', run_name='__main__')\n"
    code += "except SystemExit: print([m for m in ('jax', 'grain', 'tokenizers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
    done = subprocess.run([sys.executable, "-m", "jaxllm", "data", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "--at-step" in done.stdout


# ----------------------------------------------------------------------------------------------- two processes, the loss

PROCESS = """
import sys, jax, numpy as np
port, process, folder, tokenizer, path = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jaxllm.config import load_config
from jaxllm.data import make_batches
from jaxllm.sharding import make_mesh
cfg = load_config(None, f"data.path={path}", f"data.tokenizer={tokenizer}", "data.seq_len=64", "data.global_batch_size=4", "seed=4",
                  "data.epochs=2", f"data.workers={2 * process}", "data.kind=prompt", f"data.cache={folder}/cache")
batches = make_batches(cfg, make_mesh(cfg.mesh))
tokens = [np.concatenate([np.asarray(s.data)[0] for s in batch.tokens.addressable_shards]) for batch in batches]
np.savez(f"{folder}/out{process}.npz", tokens=np.array(tokens), lanes=batches._pipeline.lanes)
batches.close()
jax.distributed.shutdown()
"""


def test_two_processes_share_a_cache_and_end_their_epochs_together(corpus, tokenizer, tmp_path):
    cfg = config(corpus, tokenizer, kind="prompt", epochs=2, global_batch_size=4)
    want = np.array([rows["tokens"] for rows, _ in Pipeline(Training(cfg).source, None, cfg.data, seed=4)])
    with together(PROCESS, 2, tmp_path, tokenizer, corpus / "pairs.jsonl") as processes:
        finish(processes)
    assert len(token_caches(tmp_path / "cache")) == 1
    for number in range(2):
        out = np.load(tmp_path / f"out{number}.npz")
        assert np.array_equal(out["tokens"], want[:, out["lanes"]])


APART = """
import sys, jax, pathlib, time
from types import SimpleNamespace
port, process, folder, tokenizer = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jaxllm.config import load_config
from jaxllm.data.batch import evaluation_sets, make_batches
from jaxllm.section import UserError
from jaxllm.sharding import make_mesh
def attempt(name, overrides=(), evaluate=False):
    cfg = load_config(None, f"data.path={folder}/{process}/same.jsonl", f"data.tokenizer={tokenizer}", "data.seq_len=64",
                      "data.global_batch_size=2", "evaluation.batch_size=2", *overrides)
    mesh, said, batches = make_mesh(cfg.mesh), "nothing", None
    try:
        batches = make_batches(cfg, mesh)
        if evaluate:
            evaluation_sets(cfg, batches, mesh)
        else:
            for number, _ in enumerate(batches):
                if number == 2 and process == 1:
                    (folder / "1" / "same.jsonl").write_text('{"text": "other"}\\n')
                assert number < 1000
    except UserError as error:
        said = str(error)
    finally:
        if batches is not None:
            batches.close()
    (folder / f"{name}{process}").write_text(said)
attempt("other", [f"data.path={folder}/{process}/other.jsonl"])
attempt("gone", [f"data.path={folder}/{process}/gone.jsonl"])
attempt("evaluated", ["evaluation.every=1", f"evaluation.path={folder}/{process}/other.jsonl"], evaluate=True)
attempt("set", ["evaluation.every=1", f"evaluation.sets.a={folder}/{process}/gone.jsonl"], evaluate=True)
attempt("tokenizer", [f"data.tokenizer={folder}/{process}/tokenizer"])
attempt("changed")
jax.distributed.shutdown()
"""


def test_processes_that_do_not_read_the_same_end_together_each_with_the_reason(tokenizer, tmp_path):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        write_lines(tmp_path / str(number) / "same.jsonl", [{"text": f"row {n} " * 20} for n in range(40)])
        write_lines(tmp_path / str(number) / "other.jsonl", [{"text": f"row {n}"} for n in range(40 - 7 * number)])
    write_lines(tmp_path / "0" / "gone.jsonl", [{"text": "here"}])
    Tokenizer.load(tokenizer).save(tmp_path / "0" / "tokenizer")
    with together(APART, 2, tmp_path, tokenizer) as processes:
        finish(processes)
    said = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    for number in range(2):
        for name, key in (("other", "data.path"), ("evaluated", "evaluation.path")):
            assert (
                said[f"{name}{number}"].startswith(f"{key}: process 1 on ")
                and "another set of doc" in said[f"{name}{number}"]
            )
    for name, key in (("gone", "data.path"), ("set", "evaluation.sets.a")):
        assert said[f"{name}0"].startswith(f"{key}: process 1 on ") and "its own message says why" in said[f"{name}0"]
        assert "gone.jsonl' matches 0 files" in said[f"{name}1"]
    assert said["tokenizer0"].startswith("data.tokenizer: process 1 on ") and "no tokenizer.json" in said["tokenizer1"]
    assert said["changed0"] == "data: process 1 could not go on reading; its own message says why"
    assert "same.jsonl:" in said["changed1"] and "has changed since the run began" in said["changed1"]


def sums_of_loss(sizes, lengths, packing, communication="auto"):
    """(loss_sum, weight_sum, rows with documents) of documents with these lengths, packed, on a mesh, by a tiny Llama."""
    from jaxllm import step

    cfg, on, rng = tiny(f"attention.communication={communication}"), mesh(**sizes), np.random.default_rng(0)
    tokens = [rng.integers(3, 256, length).astype(np.int32) for length in lengths]
    render = lambda records: [Rendered.all_trained(tokens[number]) for number, _ in records]
    data = DataConfig(seq_len=64, shuffle=False, repeat=False, global_batch_size=1, packing=packing)
    rows = [row for row, _ in Pipeline(Numbered(lengths), render, data)]
    rows += [empty_rows(1, 64)] * (len(rows) % 2)
    with jax.set_mesh(on):
        graphdef, state = step.init_state(cfg)
        run = step.make_eval_step(graphdef, cfg)
        pairs = [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(rows[::2], rows[1::2])]
        sums = [run(state, to_device(pair, 1, on)) for pair in pairs]
    loss, weight = (sum(float(each[name]) for each in sums) for name in ("loss_sum", "weight_sum"))
    return loss, weight, sum(row["segment_ids"].any() for row in rows)


LENGTHS = {  # concatenated: whole documents, so that each sees in its row what it sees alone
    "concatenate": np.array([24, 40] * 15),
    "first_fit": np.random.default_rng(0).integers(2, 60, 30),
}


@pytest.fixture(scope="module")
def alone():
    return {packing: sums_of_loss({}, lengths, "none") for packing, lengths in LENGTHS.items()}


@pytest.mark.parametrize("packing", LENGTHS)
@pytest.mark.parametrize(
    "sizes, communication",
    [({}, "auto"), ({"data": 2}, "auto"), ({"sequence": 4}, "ring"), ({"data": 2, "sequence": 2}, "allgather")],
    ids=str,
)
def test_the_loss_of_packed_rows_is_the_token_weighted_mean_of_the_documents_alone(
    alone, packing, sizes, communication
):
    loss, weight, num_rows = sums_of_loss(sizes, LENGTHS[packing], packing, communication)
    loss_alone, weight_alone, num_alone = alone[packing]
    assert num_alone == 30 and num_rows <= 21 and weight == weight_alone == sum(LENGTHS[packing]) - 30
    assert loss / weight == pytest.approx(loss_alone / weight_alone, rel=1e-6)

"""The benchmarks for GPUs, on a CPU: they count right, find what is wrong, and survive parts that fail, die or never end.

jax is imported where it is used: parts travel to processes that import this file.
"""

import itertools
import json
import os
import time
import types

import jax
import pytest

from benchmarks import attention, fp8_parity, gpu, moe, qlora, ring

pytestmark = pytest.mark.version


def raises(options, emit, left):
    emit({"item": "before", "status": gpu.PASSED})
    raise ValueError("no such thing\nwith details")


def dies(options, emit, left):
    os._exit(9)


def hangs(options, emit, left):
    time.sleep(60)


def passes(options, emit, left):
    emit({"item": "seconds", "status": gpu.PASSED, "left": left()})


def leaves_out(options, emit, left):
    emit({"item": "this", "status": "left out: it is not installed"})


# --- parts -----------------------------------------------------------------------------------------------------------


def test_a_part_that_raises_dies_or_hangs_is_recorded_and_the_next_one_runs():
    parts = [
        gpu.Part("raises", raises), gpu.Part("dies", dies), gpu.Part("hangs", hangs, quiet=1), gpu.Part("passes", passes),
        gpu.Part("leaves out", leaves_out), gpu.Part("late", passes, needs=1000),
    ]  # fmt: skip
    rows = []
    statuses = gpu.run_parts(parts, None, 100, lambda name, row: rows.append((name, row)))
    assert statuses["raises"] == "failed: ValueError: no such thing"
    assert statuses["dies"] == "failed: its process died (exit code 9)"
    assert statuses["hangs"].startswith("failed: stopped after 1 s")
    assert statuses["passes"] == "passed" and statuses["leaves out"] == "left out: it is not installed"
    assert statuses["late"] == "not run: budget"
    assert [(name, row.get("item")) for name, row in rows] == [
        ("raises", "before"), ("raises", None), ("dies", None), ("hangs", None), ("passes", "seconds"), ("passes", None),
        ("leaves out", "this"), ("leaves out", None), ("late", None),
    ]  # fmt: skip
    assert 0 < rows[4][1]["left"] < 100


def test_a_part_that_outlasts_the_budget_is_stopped_and_says_so(monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    begin = time.time()
    statuses = gpu.run_parts([gpu.Part("hangs", hangs, needs=0)], None, 1, lambda *_: None)
    assert statuses["hangs"].startswith("not run: budget (stopped after 1 s)") and time.time() - begin < 5


def test_without_a_gpu_there_is_one_line_and_exit_code_2(tmp_path, capfd):
    assert gpu.main(["--out", str(tmp_path)]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("benchmarks.gpu: no GPU here, JAX sees 'cpu'") and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_exit_code_is_that_of_the_required_parts_and_every_row_is_written(tmp_path, capfd):
    parts = (gpu.Part("wanted", passes, required=True), gpu.Part("besides", raises))
    arguments = ["--rehearse", "--out", str(tmp_path)]
    assert gpu.main(arguments, parts) == 0
    assert gpu.main(["--rehearse", "--out", str(tmp_path)], (gpu.Part("wanted", raises, required=True),)) == 1
    rows = [json.loads(line) for line in (tmp_path / "gpu_rehearsal.jsonl").read_text().splitlines()]
    assert [(row["part"], row.get("item")) for row in rows] == [
        ("device", "facts"), ("device", None), ("wanted", "seconds"), ("wanted", None), ("besides", "before"), ("besides", None),
        ("device", "facts"), ("device", None), ("wanted", "before"), ("wanted", None),
    ]  # fmt: skip
    assert {row["evidence"] for row in rows} == {"rehearsed"} and {row["device"] for row in rows} == {"cpu"}
    assert len({row["run"] for row in rows}) >= 1 and "besides" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--rehearse"])  # its rows are no results


@pytest.mark.parametrize(
    ("part", "backend"),
    [
        ("cudnn", "xla"),
        ("grouped correctness", "xla"),
        ("grouped order", "xla"),
        ("grouped order", "triton"),
        ("grouped", "xla"),
        ("linear fp8", "xla"),
    ],
)
def test_a_part_passes_where_it_is_rehearsed(part, backend):
    """With a backend of attention that has no grouped products, too."""
    (function,) = (known.function for known in gpu.PARTS if known.name == part)
    rows = []
    with jax.numpy_dtype_promotion("standard"):  # as the command runs: JAX's own attention promotes
        function(types.SimpleNamespace(rehearse=True, backends=[backend]), rows.append, lambda: 1000.0)
    assert rows and not [row for row in rows if row["status"] != "passed" and not row["status"].startswith("left out")]
    assert [row for row in rows if row["status"] == "passed"], rows


def test_the_parts_of_it_say_so_too(tmp_path, capfd):
    for module in (attention, ring):
        assert module.main(["--output", str(tmp_path / "rows.jsonl")]) == 2
        assert "no GPU here, JAX sees 'cpu'" in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_rows_are_written_beside_and_renamed(tmp_path):
    file = tmp_path / "rows.jsonl"
    attention.append(file, [{"a": 1}])
    attention.append(file, [{"a": 2}, {"a": 3}])
    with pytest.raises(TypeError):
        attention.append(file, [{"a": 4}, {"a": object()}])
    assert [json.loads(line)["a"] for line in file.read_text().splitlines()] == [1, 2, 3]


# --- correctness -----------------------------------------------------------------------------------------------------


KERNELS = gpu.kernels  # of the xla backend, compiled once


def changed(kernel, change):
    """What the checks call, with the results of one kernel changed: change(results, arguments)."""
    from jaxllm_kernels import attention_xla

    def kernels(backend, scale):
        run = KERNELS(attention_xla, scale)
        return run | {kernel: lambda *arrays: change(run[kernel](*arrays), arrays)}

    return kernels


WRONG = {
    "out of one query off by a tenth": ("forward", lambda got, _: (got[0].at[0, 70, 1].multiply(1.1), got[1]), "out"),
    "lse off by 1e-4": ("forward", lambda got, _: (got[0], got[1] * 1.0001), "lse"),
    "an lse where nothing is seen": ("forward", lambda got, _: (got[0], got[1].at[0, 0, -1].set(0.0)), "lse is not -inf"),
    "an out where nothing is seen": ("forward", lambda got, _: (got[0].at[:, -1].set(1e-6), got[1]), "out is not 0"),
    "NaN in dq": ("dq", lambda got, _: got.at[0, 3, 0, 0].set(float("nan")), "dq"),
    "one tile of dk missing": ("dkv", lambda got, _: (got[0].at[0, 64:96].set(0.0), got[1]), "dk"),
    "a dv where nobody sees": ("dkv", lambda got, _: (got[0], got[1].at[:, -1].set(1e-6)), "dv is not 0"),
    "a piece folded in twice": ("finish", lambda got, _: (got[0] * 2, got[1]), "out, in pieces"),
    "dq not added": ("dq into", lambda got, arrays: got - arrays[0], "dq, in pieces"),
    "dv added twice": ("dkv into", lambda got, arrays: (got[0], got[1] + arrays[0][1]), "dv, in pieces"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_a_kernel_that_is_wrong_anywhere_fails_the_check(monkeypatch, wrong):
    kernel, change, found = WRONG.get(wrong, ("forward", lambda got, _: got, None))
    monkeypatch.setattr(gpu, "kernels", changed(kernel, change))
    sizes = dict(B=2, T=128, H=4, K=2)
    row = gpu.check(
        None, "it", attention.inputs(D=64, **sizes), *gpu.intervals(2, 128, documents=3, padding=17, window=40)
    )
    assert (
        row["status"] == "passed" if found is None else row["status"].startswith("failed: ") and found in row["status"]
    )


WRONG_GROUPED = {
    "one y off by a tenth": ("forward", lambda y: y.at[70, 1].multiply(1.1), "forward is"),
    "a y behind the groups": ("forward", lambda y: y.at[-1].set(1e-6), "forward is not 0 behind"),
    "NaN behind the groups": ("dgrad", lambda dx: dx.at[-1, 3].set(float("nan")), "dgrad is inf off"),
    "one tile of dw missing": ("wgrad", lambda dw: dw.at[2, :64, :64].set(0.0), "wgrad is"),
    "dw rounded to bfloat16": ("wgrad", lambda dw: dw.astype("bfloat16").astype("float32"), "wgrad is"),
    "a dw without rows": ("wgrad", lambda dw: dw.at[1, 0, 0].set(1e-6), "wgrad is not 0 without"),
}


@pytest.mark.parametrize("wrong", [None, *WRONG_GROUPED])
def test_a_grouped_product_that_is_wrong_anywhere_fails_the_check(wrong):
    product, change, found = WRONG_GROUPED.get(wrong, ("forward", lambda got: got, None))
    usual = gpu.grouped_kernels("xla")
    run = usual | {product: lambda *arrays: change(usual[product](*arrays))}
    row = gpu.check_grouped(run, "it", gpu.grouped_inputs(250, 128, 128, 4), (100, 0, 67, 53))
    assert row["status"] == "passed" if found is None else row["status"].startswith(f"failed: {found}"), row


def test_groups_of_the_checks_are_what_they_are_named_for():
    for R in (512, 4096):
        filled = gpu.filled(R, 8)
        for sizes in filled.values():
            assert len(sizes) == 8 and min(sizes) >= 0 and sum(sizes) <= R
        assert min(filled["skewed"]) > 0 and any(size % 64 for size in filled["skewed"]) and 0 in filled["some empty"]
        assert max(filled["all in one"]) == R and sum(filled["all empty"]) == 0 and sum(filled["few rows"]) < R / 4
    assert len(moe.cases(moe.WHOLE)) == 3
    for groups in moe.cases(moe.WHOLE):
        assert (
            sum(groups.sizes) <= groups.rows == 32768
            and {groups.K, groups.N} == {4096, 14336}
            and any(n % 128 for n in groups.sizes)
        )
    assert groups.flops == pytest.approx(moe.WHOLE.flops / 3 / 8, rel=1e-3)


def test_repetitions_that_differ_in_one_bit_are_counted():
    import jax.numpy as jnp

    x, calls = (jnp.ones((4, 8), jnp.bfloat16), jnp.full(3, jnp.nan)), []

    def call():
        calls.append(0)
        return (x[0].at[1, 2].set(1.0078125), x[1]) if len(calls) in (5, 8) else x

    assert gpu._repeated(call, 9, [lambda: None]) == "failed: 2 of 9 repetitions differ, by up to 1 elements"
    assert gpu._repeated(call, 9, [lambda: None]) == "passed"


def test_masks_of_the_checks_have_what_they_are_named_for():
    import numpy as np

    for name, options in gpu.masks(512).items():
        start, end = gpu.intervals(2, 512, **options)
        real = end > start
        assert np.array_equal(end[real], np.broadcast_to(np.arange(512) + 1, (2, 512))[real])
        assert (len(np.unique(start)) > 3) == ("packed" in name) and real.all() == ("padded" not in name)
        assert ((end - start).max() == 51) == ("windowed" in name)


# --- speed -----------------------------------------------------------------------------------------------------------


def test_flops_are_two_products_of_every_pair_of_query_and_key():
    B, H, T, D = 2, 3, 64, 8
    pairs = {False: T * T, True: T * (T + 1) // 2}
    for causal, seen in pairs.items():
        multiplied = B * H * seen * D  # per product
        assert attention.forward_flops(B, H, T, T, D, causal) == pytest.approx(2 * 2 * multiplied, rel=1 / T)
        assert attention.Shape(B, T, H, 1, D, causal).flops == attention.forward_flops(B, H, T, T, D, causal)
    assert attention.forward_flops(1, 16, 16384, 16384, 128, True) / 1.73e-3 == pytest.approx(
        637e12, rel=0.01
    )  # as published


def test_contenders_that_fail_or_disagree_are_not_timed(monkeypatch):
    def contender(name, shape):
        if name == "hopper":
            raise RuntimeError("no such instruction")
        return lambda q, k, v, *_: (q + k + v) * (1.25 if name == "triton" else 1.0)

    monkeypatch.setattr(attention, "contender", contender)
    monkeypatch.setattr(attention, "missing", lambda name: "left out: not here" if name == "tokamax" else None)
    shape = attention.Shape(1, 16, 1, 1, 8)
    rows = {
        row["backend"]: row
        for row in attention.compare(shape, ("hopper", "triton", "xla", "cudnn", "tokamax"), rounds=1)
    }
    assert rows["hopper"]["status"] == "failed: RuntimeError: no such instruction"
    assert (
        rows["triton"]["status"].startswith("failed: differs by 2.5e-01 from cudnn")
        and "forward_ms" not in rows["triton"]
    )
    assert rows["tokamax"]["status"] == "left out: not here"
    assert rows["xla"]["status"] == "passed" and rows["xla"]["forward_best_other"] == "cudnn"
    assert rows["xla"]["forward_tflops"] is not None and rows["xla"]["both_ratio"] > 0
    late = attention.compare(shape, ("xla",), left=lambda: 1)
    assert [row["status"] for row in late] == ["not run: budget"]


def test_grouped_contenders_that_fail_or_disagree_are_not_timed(monkeypatch):
    import jax.numpy as jnp

    def contender(name, product, sizes):
        if name == "hopper":
            return [lambda *_: 1 / 0]
        if name == "ragged_dot_mgpu":  # one plan that does not fit, and one that does
            return [lambda *_: 1 / 0, lambda x, w, dy, n: jnp.full((8, 4), 2.0).at[5:].set(jnp.nan)]
        return [lambda x, w, dy, n: jnp.full((8, 4), 2.5 if name == "xla" else 2.0)]

    monkeypatch.setattr(moe, "contender", contender)
    monkeypatch.setattr(moe, "missing", lambda name: "left out: not here" if name == "tokamax" else None)
    monkeypatch.setattr(moe, "PRODUCTS", ("forward",))
    groups = moe.Groups("it", 8, 4, 4, (2, 3))
    rows = {row["backend"]: row for row in moe.compare(groups, (*moe.CONTENDERS, "xla"), rounds=1)}
    assert rows["hopper"]["status"] == "failed: ZeroDivisionError: division by zero" and "ms" not in rows["hopper"]
    assert rows["xla"]["status"] == "failed: differs by 2.5e-01 from loop" and "ms" not in rows["xla"]
    assert rows["tokamax"]["status"] == "left out: not here"
    assert rows["ragged_dot_mgpu"]["status"] == "passed" and rows["ragged_dot_mgpu"]["best_other"] == "loop"
    assert rows["loop"]["ratio"] > 0 and rows["ragged_dot_mgpu"]["times_the_loop"] > 0
    late = moe.compare(groups, ("loop",), left=lambda: 1)
    assert [row["status"] for row in late] == ["not run: budget"]


@pytest.mark.parametrize("sizes", [(3, 0, 9), (5,)], ids=str)
def test_grouped_contenders_of_one_device_compute_the_same(sizes):
    rows = list(moe.compare(moe.Groups("it", 16, 8, 4, sizes), ("xla", "loop"), rounds=1))
    assert [row["status"] for row in rows] == ["passed"] * 6 and all(row["difference"] < 0.01 for row in rows[::2])


def test_the_layer_agrees_with_transformers_and_is_timed_beside_it():
    pytest.importorskip("torch")
    row = moe.beside_transformers(moe.Layer(32, 16, 24, experts=4), threads=1, rounds=1, steps=1)
    assert row["status"] == "passed" and row["largest_difference"] < 1e-5 and row["cpu_ratio"] > 0 < row["wall_ratio"]


def test_the_sweep_tries_each_plan_once_and_leaves_the_tables_as_they_were(monkeypatch):
    import jax.numpy as jnp

    from jaxllm_kernels import attention_hopper as hopper

    before = dict(hopper.DQ)

    def dq(q, *_):
        plan = hopper.DQ[64]
        if plan.stages == 3:
            raise ValueError("does not fit")
        return q.astype(jnp.float32) * (1.0 if plan.streamed == before[64].streamed else 1.5)

    monkeypatch.setattr(hopper, "forward", lambda q, k, v, *_: (q, jnp.zeros(q.shape[:1] + q.shape[2:0:-1])))
    monkeypatch.setattr(hopper, "dq", dq)
    rows = list(itertools.islice(attention.sweep((64,), 128), 8))
    assert dict(hopper.DQ) == before and rows[0]["in_use"] and rows[0]["status"] == "passed"
    assert len({row["item"] for row in rows}) == 8 and {row["kernel"] for row in rows} == {"dq"}
    for row in rows:
        if row["plan"]["stages"] == 3:
            assert row["status"] == "failed: ValueError: does not fit"
        elif row["plan"]["streamed"] != before[64].streamed:
            assert row["status"].startswith("failed: differs by 5.0e-01") and "ms" not in row
        else:
            assert row["status"] == "passed" and row["ms"] > 0


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_virtual_hops_meet_every_pair_that_the_mask_has_exactly_once(layout, window, ranks):
    import numpy as np

    from jaxllm_kernels import token_order

    T = 48
    start, end = gpu.intervals(1, T, documents=3, padding=5, window=window)
    index = np.arange(T)
    mask = (index >= start[0][:, None]) & (index < end[0][:, None])
    met, order = np.zeros((T, T), int), token_order(layout, ranks, T).reshape(ranks, -1)
    for rank, queries in enumerate(order):
        for source, low, high in ring.hops(layout, ranks, rank, start, end, window):
            for query, a, b in zip(queries, np.asarray(low)[0], np.asarray(high)[0], strict=True):
                met[query, order[source][a:b]] += 1
    assert np.array_equal(met, mask)


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "without-the-last-hop"])
def test_virtual_ranks_compute_what_the_whole_row_computes(monkeypatch, broken):
    from jaxllm_kernels import attention_xla

    every = ring.hops
    if broken:
        monkeypatch.setattr(ring, "hops", lambda *args: list(every(*args))[:-1])
    row = ring.measure(attention_xla, 2, 16, heads=2, kv_heads=1, head_dim=8, timed_ranks=range(2), rounds=1)
    assert row["label"] == "virtual hops on one device, no communication" and set(row["differences"]) == {
        "out",
        "dq",
        "dk",
        "dv",
    }
    if broken:
        assert row["status"].startswith("failed: ") and "both_efficiency" not in row
    else:
        assert row["status"] == "passed" and row["both_efficiency"] > 0


def test_what_is_not_installed_is_left_out_by_name(monkeypatch):
    monkeypatch.setattr(attention, "PACKAGES", {"triton": "no_such_package", "tokamax": "json"})
    assert attention.missing("triton") == "left out: no_such_package is not installed"
    assert attention.missing("tokamax") is None and attention.missing("hopper") is None


def test_an_exception_is_said_in_one_line():
    assert (
        attention.said(RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmuch more"))
        == "failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    )
    assert attention.said(KeyError()) == "failed: KeyError: "
    assert "a (b 0.5)" in attention.shown({"item": "x", "status": "a", "b": 0.5, "errors": {"hidden": types}})


def test_fp8_passes_by_the_spread_of_its_controls_or_half_a_percent_and_nan_never_does():
    controls = (1.000, 1.004, 0.996)  # sigma 0.4 %, so 1.2 % are allowed; of the other loss 0, so 0.5 %

    def row(run, last, validation):
        return {"run": run, "last": last, "validation": validation}

    rows = [row(name, loss, 2.0) for name, loss in zip(fp8_parity.CONTROLS, controls, strict=True)]
    cases = {
        "a": (1.0119, 2.0, True),
        "b": (1.0121, 2.0, False),
        "c": (0.9881, 2.009, True),
        "d": (1.0, 2.011, False),
        "e": (1.0, float("nan"), False),
    }
    found = fp8_parity.judged([*rows, *(row(name, *losses) for name, (*losses, _) in cases.items())])
    assert {r["run"]: r["passed"] for r in found[3:]} == {name: passed for name, (*_, passed) in cases.items()}
    assert all("passed" not in r for r in found[:3])


# --- adapters --------------------------------------------------------------------------------------------------------


def test_each_question_is_asked_once_with_its_first_answer_and_every_eighth_is_held_out():
    talks = [[f"q{n}?", f"a{n}"] for n in range(17)]
    talks[3:3] = [
        "q99? - a99",
        ["Q2?", "another"],
        ["two", "turns", "more"],
        ["q98?", 1997],
        ["q3\n  again?", "a \n b"],
    ]
    trained, held_out = qlora.questions(talks)
    asked = {item["prompt"]: item["completion"] for item in trained + held_out}
    assert asked == {f"Question: q{n}?\nAnswer:": f" a{n}" for n in range(17)} | {
        "Question: q3 again?\nAnswer:": " a b"
    }
    assert len(trained) == 16 and [item["completion"] for item in held_out] == [" a6", " a14"]


def test_an_answer_is_exact_where_each_of_its_trained_tokens_is_the_likeliest():
    import numpy as np

    # two rows: documents of 3 and 4 places, and one of 5; the last places are padding
    rows = {
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]]),
        "loss_weights": np.array([[0, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]], np.float32),
        "targets": np.arange(16).reshape(2, 8),
    }
    trained = rows["loss_weights"] > 0
    best = np.where(trained, rows["targets"], -1)
    assert qlora.exact(rows, best) == (3, 3)
    for row, place in zip(*np.nonzero(trained), strict=True):
        wrong = best.copy()
        wrong[row, place] = -1
        assert qlora.exact(rows, wrong) == (2, 3)
    half = np.where(trained & (rows["segment_ids"] == 1), best, -1)
    found = qlora.score([(3.0, rows, best), (2.0, rows, half)])
    assert found == {"loss": 0.5, "exact": 5, "items": 6}


def test_the_two_sides_are_compared_step_by_step_and_by_their_last_ten():
    scores = {"": {"loss": 2.0, "exact": 1, "items": 39}}
    side = lambda losses: {"before": scores, "after": scores, "losses": losses}
    row = qlora.compared({"jaxllm": side([4.0] * 5 + [2.2] + [2.0] * 9), "peft": side([4.0] * 4 + [3.2] + [2.0] * 10)})
    assert row["gap_largest"] == pytest.approx(0.25) and row["gap_final"] == pytest.approx(0.01)
    assert row["status"] == "passed" and row["gap_first_step"] == 0 == row["gap_held_out"] == row["gap_median"]
    for wrong in (2.05, 1.95, float("nan")):
        row = qlora.compared({"jaxllm": side([wrong] * 15), "peft": side([2.0] * 15)})
        assert row["status"].startswith("failed: the final losses are ")


def test_the_step_with_a_base_in_nf4_is_not_timed_without_a_gpu(tmp_path, capfd):
    assert qlora.main(["--gpu", "--output", str(tmp_path / "rows.jsonl")]) == 2 and not list(tmp_path.iterdir())
    assert "no GPU here, JAX sees 'cpu'" in capfd.readouterr().err

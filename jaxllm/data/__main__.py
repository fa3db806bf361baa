"""`python -m jaxllm.data --config F --rows 4 [section.key=value ...]`: the rows that a training step would train on, as JSON
lines on stdout, and what the whole source amounts to on stderr.

No device is touched; rows come from the same code as the training's, so what is seen here is what is trained. A row's
lists all have data.seq_len entries; segment 0 is padding, and `targets` count where `loss_mask` is not 0. `text` is the decoded row; on a terminal it
is shown once more, with what is trained on in green.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import sys
import tempfile

from jaxllm.section import UserError

TRAINED, SEEN, PLAIN = "\033[32m", "\033[2m", "\033[0m"


def _shown_rows(text):
    if text != "all" and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"a number above 0, or all; got {text!r}")
    return None if text == "all" else int(text)


def _step(text):
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"a step, from 1; got {text!r}")
    return int(text)


def show(cfg, count, step, out):
    """Prints `count` rows (None: one epoch) from training step `step` (1: the first) on to `out`, the summary on
    stderr. Fewer where the data ends before; rows of nothing but padding are left out."""
    import numpy as np

    from jaxllm.data.batch import Training
    from jaxllm.data.pipeline import Packer, too_few

    data = cfg.data
    if count is None:
        data = data.model_copy(update={"repeat": False, "epochs": None})
    with contextlib.ExitStack() as stack:
        if (data.tokenizer or "").startswith("bpe:") and not (pathlib.Path(cfg.output_dir) / "tokenizer").exists():
            # a look leaves nothing in the folder of a run: the tokenizer that the run will train is trained elsewhere
            elsewhere = stack.enter_context(tempfile.TemporaryDirectory())
            cfg = cfg.model_copy(update={"output_dir": elsewhere})
        training = Training(cfg)
        stack.callback(training.close)
        lanes = np.arange(min(data.global_batch_size, count or data.global_batch_size))
        # Not a Pipeline, which refuses fewer documents than a batch has rows: what there is can be looked at.
        batches = Packer(training.source, data, cfg.seed, lanes, np.zeros((len(lanes), 2), np.int64))
        found = (
            (number, row, rows)
            for number, (rows, _) in itertools.islice(enumerate(batches, start=1), step - 1, None)
            for row in range(len(lanes))
            if rows["segment_ids"][row].any()
        )
        shown = False
        for number, row, rows in itertools.islice(found, count):
            shown = True
            _print_row(training.tokenizer, rows, row, {"step": number, "row": row}, out)
    if not shown:
        print(f"--at-step {step}: no rows, the data ends before that step", file=sys.stderr)
    print(training.summary, file=sys.stderr, flush=True)
    if wrong := too_few(training.source, cfg.data, cfg.seed):
        print(f"training will refuse this: {wrong}", file=sys.stderr, flush=True)


def _print_row(tokenizer, rows, row, line, out):
    weights = rows["loss_weights"][row]
    line["input_ids"], line["targets"] = rows["tokens"][row].tolist(), rows["targets"][row].tolist()
    line["loss_mask"] = [int(weight) if weight in (0, 1) else float(weight) for weight in weights]
    line["positions"], line["segment_ids"] = rows["positions"][row].tolist(), rows["segment_ids"][row].tolist()
    if tokenizer is not None:
        line["text"] = tokenizer.decode(rows["tokens"][row][rows["segment_ids"][row] > 0])
    print(json.dumps(line), file=out)
    if tokenizer is not None and out.isatty():
        for text, trained in _spans(tokenizer, rows, row):
            print(f"{TRAINED if trained else SEEN}{text}{PLAIN}", end="", file=out)
        print(file=out)


def _spans(tokenizer, rows, row):
    """(text, whether its tokens are targets in this row) of the row's stretches of one or the other, padding left out.

    The row is decoded as a whole, for a stretch by itself may lose the space that it begins with; where a stretch ends in
    that text is told by decoding up to there, and a character whose bytes are divided belongs to the later stretch."""
    tokens, segments, weights = (rows[name][row] for name in ("tokens", "segment_ids", "loss_weights"))
    trained = [False] + [
        bool(weight) and before == after for weight, before, after in zip(weights, segments, segments[1:], strict=False)
    ]
    places = [place for place in range(len(tokens)) if segments[place]]
    real, count, begin = tokens[places], 0, 0
    whole = tokenizer.decode(real)
    for (_, is_trained), group in itertools.groupby(places, key=lambda place: (segments[place], trained[place])):
        count += len(list(group))
        pairs = zip(tokenizer.decode(real[:count]), whole, strict=False)
        end = max(begin, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        yield whole[begin:end], is_trained
        begin = end


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.data",
        description="Print rows exactly as they would be trained on, as JSON lines, and a summary of the data on stderr.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file; see configs/")
    parser.add_argument(
        "--rows", type=_shown_rows, default=4, metavar="N", help='how many rows (default 4); "all": one epoch'
    )
    parser.add_argument(
        "--at-step", type=_step, default=1, metavar="N", help="begin with the rows of step N (default 1)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes on top, with TOML values")
    options = parser.parse_intermixed_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: looking at data needs no accelerator
    try:
        from jaxllm.config import load_config

        cfg = load_config(options.config, *options.overrides)
        show(cfg, options.rows, options.at_step, sys.stdout)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

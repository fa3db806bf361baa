"""Reads a compiled program's text: its collectives, whether they overlap, and its FLOPs, with loops multiplied out.

Knows the text of scheduled HLO and nothing else. `while` bodies count as often as their known trip count says; a loop without one counts once
and is reported. Attention and grouped-matmul kernels are custom calls whose FLOPs the text does not tell: they are listed with their arrays, and
whoever knows what they compute counts (plan.py).
"""

import collections
import dataclasses
import math
import re

_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
_COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """kind: "all-gather" ...; dtype: of its largest array; bytes: of its results (of its operands for reduce-scatter), on one device, each
    time; times: per execution of the program; asynchronous: scheduled with other work between its start and its end."""

    kind: str
    dtype: str
    bytes: int
    times: int
    asynchronous: bool
    name: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A custom call that is no matrix product. name: of its function, such as "attention_dq", "" where the text tells none; operands, results: (dtype,
    dims) of its arrays; times: per execution of the program."""

    target: str
    name: str
    operands: list[tuple[str, tuple[int, ...]]]
    results: list[tuple[str, tuple[int, ...]]]
    times: int


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product. dtypes: of its two operands; flops: per execution of the program and device; name: of the operation it was traced from, with the
    scopes around it, such as "jit(step)/mlp/dot_general"."""

    dtypes: tuple[str, str]
    flops: float
    name: str


@dataclasses.dataclass(frozen=True)
class Program:
    collectives: list[Collective]
    products: list[Product]
    kernels: list[Kernel]
    unknown_loops: int
    """Loops without a known trip count, counted once."""

    @property
    def flops(self) -> float:
        """Of all matrix products, per execution and device."""
        return sum(product.flops for product in self.products)

    @property
    def custom_calls(self) -> dict[str, int]:
        """Target -> calls per execution, matrix products left out."""
        calls = collections.Counter()
        for kernel in self.kernels:
            calls[kernel.target] += kernel.times
        return dict(calls)


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(t, tuple(int(n) for n in dims.split(",") if n)) for t, dims in _SHAPE.findall(text)]


def _size(shape) -> int:
    dtype, dims = shape
    return math.prod(dims) * (1 if dtype.startswith("f8") else _BYTES.get(dtype, 0))


@dataclasses.dataclass
class _Instruction:
    name: str
    result: str  # text of its type
    op: str
    rest: str  # operands and attributes


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations, current, entry = {}, None, ""
    for line in text.splitlines():
        if current is None:
            if header := re.match(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?.*\{$", line):
                current = header[2]
                computations[current] = []
                entry = current if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            computations[current].append(_Instruction(*found.groups()))
    return computations, entry


def _operands(instruction: _Instruction, count: int) -> list[str]:
    inside = instruction.rest.split(")", 1)[0]
    return re.findall(r"%([\w.-]+)", inside)[:count]


def _multiplicities(computations, entry) -> tuple[dict[str, int], int]:
    """How often each computation runs per execution of the program."""
    times, unknown = collections.defaultdict(int), 0
    times[entry] = 1
    edges = {name: [] for name in computations}
    for name, instructions in computations.items():
        for i in instructions:
            callees = re.findall(r"(?:calls|to_apply|body|condition|called_computations?)=\{?%?([\w.-]+)", i.rest)
            branches = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
            callees += re.findall(r"%([\w.-]+)", branches[1]) if branches else []
            factor = 1
            if i.op == "while":
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', i.rest)
                factor = int(known[1]) if known else 1
                unknown += known is None
            edges[name] += [(callee, factor) for callee in callees if callee in computations]
    order, seen = [], set()

    def visit(name):  # callees after callers once reversed
        if name not in seen:
            seen.add(name)
            for callee, _ in edges[name]:
                visit(callee)
            order.append(name)

    visit(entry)
    for name in reversed(order):
        for callee, factor in edges[name]:
            times[callee] += times[name] * factor
    return times, unknown


def _product(i: _Instruction, types: dict[str, str], times: int) -> Product:
    """FLOPs: 2 x result x contracted size."""
    contracting = re.search(r'"?lhs_contracting_(?:dims|dimensions)"?[=:]([{\[])(.*?)[}\]]', i.rest)
    (left, dims), (right, _) = (_shapes(types[operand])[0] for operand in _operands(i, 2))
    contracted = math.prod(dims[int(d)] for d in re.findall(r"\d+", contracting[2])) if contracting else 1
    name = re.search(r'op_name="([^"]*)"', i.rest)
    flops = 2.0 * math.prod(_shapes(i.result)[0][1]) * contracted * times
    return Product((left, right), flops, name[1] if name else "")


def read(text: str) -> Program:
    """The collectives and FLOPs of a compiled program from its `as_text()`."""
    computations, entry = _parse(text)
    times, unknown = _multiplicities(computations, entry)
    collectives, products, kernels = [], [], []
    for name, instructions in computations.items():
        if not times[name]:
            continue
        types = {i.name: i.result for i in instructions}
        for i in instructions:
            if i.op == "dot" or (i.op == "custom-call" and "__cublas" in i.rest):
                products.append(_product(i, types, times[name]))
            elif i.op == "custom-call" and (target := re.search(r'custom_call_target="([^"]+)"', i.rest)):
                called = re.search(r'op_name="(?:[^"]*/)?([^"/]+)/mpmd_map"', i.rest)  # Pallas
                operands = [shape for operand in _operands(i, 64) for shape in _shapes(types.get(operand, ""))]
                kernels.append(Kernel(target[1], called[1] if called else "", operands, _shapes(i.result), times[name]))
            kind = i.op.removesuffix("-start")
            if kind in _COLLECTIVES:
                collectives.append(_collective(kind, i, types, times[name], wrapped=name in _wrapped(computations)))
    return Program(collectives, products, kernels, unknown)


def _wrapped(computations) -> set[str]:
    """Computations started by async-start (newer XLA prints an asynchronous reduce-scatter that way)."""
    starts = (i for instructions in computations.values() for i in instructions if i.op == "async-start")
    return {callee for i in starts for callee in re.findall(r"calls=%?([\w.-]+)", i.rest)}


def _collective(kind, i, types, times, wrapped) -> Collective:
    if kind == "reduce-scatter":
        shapes = [shape for operand in _operands(i, 64) for shape in _shapes(types.get(operand, ""))]
    else:
        parts = _shapes(i.result)
        # a -start returns (operands, results); the results are its second half
        shapes = (
            parts[len(parts) // 2 :] if i.op.endswith("-start") and kind != "all-reduce" and len(parts) > 1 else parts
        )
    largest = max(shapes, key=_size, default=("", ()))
    asynchronous = wrapped or (i.op.endswith("-start") and '"is_sync":true' not in i.rest)
    return Collective(kind, largest[0], sum(map(_size, shapes)), times, asynchronous, i.name)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One computation's collectives of one kind, in the order of its schedule."""

    computation: str
    between: list[set[str]]
    """For each, what is scheduled between its start and its end: "kernel" (a custom call of ours, also inside a fusion), "product"."""
    synchronous: int
    kernels: int
    branches: int
    copies: list[str]
    """Types of the arrays that the computation copies or cuts out of others, in instructions of their own or fusions of nothing else."""

    @property
    def hops(self) -> int:
        return len(self.between)


_MOVEMENT = {"parameter", "constant", "slice", "dynamic-slice", "copy", "bitcast", "reshape", "transpose"}


def schedules(text: str, kind: str) -> list[Schedule]:
    """A Schedule for each computation of a compiled program that starts collectives of this kind."""
    computations, _ = _parse(text)
    ours = lambda i: i.op == "custom-call" and "__cublas" not in i.rest and "mosaic" in i.rest
    inside = {name for name, instructions in computations.items() if any(map(ours, instructions))}
    moves = {name for name, instructions in computations.items() if {i.op for i in instructions} <= _MOVEMENT}
    found = []
    for name, instructions in computations.items():
        running, between, kernels = {}, [], 0
        for i in instructions:
            callees = re.findall(r"calls=%?([\w.-]+)", i.rest)
            what = "kernel" if ours(i) or inside & {*callees} else "product" if "__cublas" in i.rest else None
            kernels += what == "kernel"
            if i.op == f"{kind}-start":
                running[i.name] = set()
            elif i.op == f"{kind}-done":
                between.append(running.pop(_operands(i, 1)[0]))
            elif what:
                for work in running.values():
                    work.add(what)
        if not between:
            continue
        starts = [i for i in instructions if i.op == f"{kind}-start"]
        found.append(
            Schedule(
                computation=name,
                between=between,
                synchronous=sum('"is_sync":true' in i.rest for i in starts),
                kernels=kernels,
                branches=sum(i.op == "conditional" for i in instructions),
                copies=[
                    i.result
                    for i in instructions
                    if i.op in ("copy", "copy-start", "slice", "dynamic-slice")
                    or (i.op == "fusion" and moves & {*re.findall(r"calls=%?([\w.-]+)", i.rest)})
                ],
            )
        )
    return found

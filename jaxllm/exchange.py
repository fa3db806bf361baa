"""How tokens meet their experts: from tokens in their rows to rows sorted by expert, and back, over the expert axis of the mesh.

Between `dispatch` and `combine` a layer's tokens are rows sorted by expert, one block of rows per device: rows [devices, R, D] and group sizes
[devices, experts held]. Everything that multiplies them by a weight is `grouped_linear.GroupedLinear`. R is the worst case unless `buffer_factor` bounds it, so
that nothing is dropped; the products' cost follows the group sizes, while what XLA computes between them (gathers, the gated product) and the zeros
behind the groups follow R. Padding goes to no expert.

Ways, with the same result up to the order in which devices are summed; N tokens per device, P places on the expert axis, E / P experts held:
  "none"       each device computes all experts on its own tokens; the experts' weights are gathered over the expert axis as well. R = N K.
  "allgather"  tokens are gathered over the expert axis, each device computes its own experts, and the sums are scattered back.
  "alltoall"   each device sends each other one a block of C rows, padded: those that its experts are asked for; what they make comes back.
  "ragged"     the same without the padding: XLA's ragged-all-to-all, which the CPU does not have.
Without a bound, R = P N min(K, E / P) in the last three and C = R / P.

A bound: R = buffer_factor x N K rows (1: what a perfectly balanced router fills). Assignments that do not fit are dropped: the weights of the token's other
experts are not changed for it (arXiv 2101.03961). Kept are the first R in the order of the tokens; with "alltoall" the first R / P of each pair of devices.

`multiple`: kernels that multiply in FP8 take groups of a multiple of 128 rows. Each group is then completed with rows of zeros, which are nobody's: they come
from no token, and what is made of them goes to none. R grows by the most that this can need, so the same assignments are dropped, if any.

Rows move by gathers in both directions (custom_vjps with the inverse map; only its numbers are scattered, one to a place), and a token's experts are
summed in float32 in a fixed order: nothing is added by scattering, and a repeated run gives the same bits.

Not here: the router (`moe`), and the choice between the ways.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllm.sharding import AXES, BATCH, axis_size

WAYS = ("none", "allgather", "alltoall", "ragged")
_TOKENS, _ROWS = P(BATCH, "sequence", None), P(AXES)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """way: one of WAYS. num_experts: of the layer. buffer_factor: None (nothing is dropped), or what bounds the rows that a device receives.
    multiple: of which every group's size is one."""

    way: str
    num_experts: int
    buffer_factor: float | None = None
    multiple: int = 1

    @property
    def everywhere(self) -> bool:
        """Whether each device computes all experts, which are gathered for it."""
        return self.way == "none"

    @property
    def places(self) -> int:
        return 1 if self.everywhere else axis_size("expert")

    @property
    def held(self) -> int:
        """Experts that a device computes."""
        return self.num_experts // self.places

    def room(self, num_tokens: int, per_token: int) -> int:
        """Assignments that a device takes, for N tokens per device; with "alltoall" a multiple of the places."""
        worst = self.places * num_tokens * min(per_token, self.held)
        if self.buffer_factor is None or self.everywhere:
            return worst
        bound = math.ceil(self.buffer_factor * num_tokens * per_token)
        if self.way == "alltoall":
            bound = -(-bound // self.places) * self.places
        return min(worst, bound)

    def num_rows(self, num_tokens: int, per_token: int) -> int:
        """R: the room, and what completes the groups, of which all may lack multiple - 1 rows. Their sum is a multiple too, so rounded down."""
        return (self.room(num_tokens, per_token) + self.held * (self.multiple - 1)) // self.multiple * self.multiple

    def completed(self, sizes):
        return -(-sizes // self.multiple) * self.multiple


def dispatch(x, ids, real, how: Exchange):
    """x [B, T, D], ids i32[B, T, K], real bool[B, T] -> (rows [devices, R, D] sorted by expert, sizes i32[devices, experts held], multiples of
    how.multiple, home: what `combine` needs to know, dropped i32[devices]: assignments that found no room). Rows that are nobody's, behind the groups or to
    complete them, are exactly 0, and so are their gradients in `combine`'s backward pass, whatever stands in padding."""
    local = _DISPATCH[how.way]
    specs = (_TOKENS, _TOKENS, P(*_TOKENS[:2]))

    def one_device(x, ids, real):
        ids = jnp.where(real[..., None], ids, how.num_experts)  # padding: an expert that nobody has
        flat = lambda a: a.reshape(-1, a.shape[-1])
        return jax.tree.map(lambda a: a[None], local(flat(x), flat(ids), how))

    return jax.shard_map(one_device, in_specs=specs, out_specs=_ROWS, check_vma=False)(x, ids, real)


def combine(rows, weights, home, how: Exchange, dtype):
    """rows [devices, R, D], weights f32[B, T, K] -> [B, T, D] in `dtype`: each token's weighted sum over its experts, float32 until the end."""
    local = _COMBINE[how.way]

    def one_device(rows, weights, home):
        rows, home = jax.tree.map(lambda a: a[0], (rows, home))
        out = local(rows, weights.reshape(-1, weights.shape[-1]), home, how)
        return out.astype(dtype).reshape(*weights.shape[:2], -1)

    specs = (_ROWS, _TOKENS, _ROWS)
    return jax.shard_map(one_device, in_specs=specs, out_specs=_TOKENS, check_vma=False)(rows, weights, home)


# --- "none" and "allgather": one sort --------------------------------------------------------------------------------


def _gathered(x, how):
    return jax.lax.all_gather(x, "expert", tiled=True) if how.places > 1 else x


def _dispatch_gathered(x, ids, how):
    room, num_rows = how.room(*ids.shape), how.num_rows(*ids.shape)
    ids = _gathered(ids, how)
    flat = ids.reshape(-1) - (jax.lax.axis_index("expert") * how.held if how.places > 1 else 0)
    mine = (flat >= 0) & (flat < how.held)
    kept = mine & (jnp.cumsum(mine) <= room)
    place, sizes = _sorted(jnp.where(kept, flat, how.held), how.held, how.completed)
    slots = jnp.where(kept, place, num_rows).reshape(ids.shape)
    rows = _take(x, _sources(slots, num_rows), slots, how.places > 1)
    return rows, sizes, slots, jnp.sum(mine & ~kept)


def _combine_gathered(rows, weights, slots, how):
    out = _weighted(rows, _gathered(weights, how), slots)
    return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True) if how.places > 1 else out


# --- "alltoall" and "ragged": sort by place, send, sort by expert ----------------------------------------------------


def _dispatch_sent(x, ids, how):
    num_places, held, total = how.places, how.held, how.room(*ids.shape)
    num_rows = how.num_rows(*ids.shape)
    ragged = how.way == "ragged"
    flat = ids.reshape(-1)
    to = flat // held  # num_places for padding
    goes = to[:, None] == jnp.arange(num_places, dtype=jnp.int32)[None]
    turn = jnp.cumsum(goes.astype(jnp.int32), axis=0)  # 1 for the first that goes there
    if ragged:
        # Each receiver takes the tokens of place 0, then those of place 1, and so on, until it is full.
        wanted = _to_all(turn[-1], how)  # i32[from, to]
        before = jnp.cumsum(wanted, axis=0) - wanted
        room = jnp.clip(total - before, 0, wanted)[_here(how)]
    else:
        room = jnp.full((num_places,), total // num_places, jnp.int32)
    kept = jnp.any(goes & (turn <= room[None]), axis=1)
    place, sizes = _sorted(jnp.where(kept, flat, how.num_experts), how.num_experts)
    sent = _to_all(sizes, how).reshape(num_places, num_places, held)  # i32[from, to, expert]
    counts = jnp.sum(sent, axis=2, dtype=jnp.int32)
    starts = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts  # in the sender's sorted assignments
    if ragged:
        slots, buffer = place, flat.shape[0]
        arrive = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts  # in the receiver's buffer
        way = (starts, counts, arrive)
    else:
        block = total // num_places
        slots, buffer = place + to * block - starts[_here(how)][jnp.minimum(to, num_places - 1)], total
        arrive = jnp.broadcast_to((jnp.arange(num_places, dtype=jnp.int32) * block)[:, None], counts.shape)
        way = None
    slots = jnp.where(kept, slots, buffer).reshape(ids.shape)
    outgoing = _take(x, _sources(slots, buffer), slots, False)
    arrived = _travel(outgoing, way, total, how)

    # What arrived is sorted by expert within each sender; here it is sorted by sender within each expert.
    theirs, first = sent[:, _here(how)], arrive[:, _here(how)]  # [from, expert], [from]
    by_sender = first[:, None] + jnp.cumsum(theirs, axis=1, dtype=jnp.int32) - theirs
    sizes = how.completed(jnp.sum(theirs, axis=0, dtype=jnp.int32))
    begin = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    by_expert = begin[:, None] + jnp.cumsum(theirs.T, axis=1, dtype=jnp.int32) - theirs.T
    come_from = _relocated(num_rows, by_expert, theirs.T, by_sender.T, total)
    gone_to = _relocated(total, by_sender, theirs, by_expert.T, num_rows)
    rows = _take(arrived, come_from, gone_to[:, None], False)
    home = {"slots": slots, "come_from": come_from, "gone_to": gone_to}
    if ragged:
        home |= {"way": way}
    return rows, sizes, home, jnp.sum((to < num_places) & ~kept)


def _combine_sent(rows, weights, home, how):
    arrived = _take(rows, home["gone_to"], home["come_from"][:, None], False)
    way, slots = home.get("way"), home["slots"]
    if way is not None:
        starts, counts, arrive = way
        way = (arrive.T, counts.T, starts.T)
    back = _travel(arrived, way, slots.size if way else arrived.shape[0], how)
    return _weighted(back, weights, slots)


def _here(how):
    return jax.lax.axis_index("expert") if how.places > 1 else 0


def _to_all(x, how):
    """[places, ...]: what each place of the expert axis has here."""
    return jax.lax.all_gather(x, "expert") if how.places > 1 else x[None]


def _relocated(num_rows, starts, sizes, targets, nowhere):
    """i32[num_rows]: where each row lies when segments [starts, starts + sizes), in ascending order, begin at `targets` instead; `nowhere` where there is
    no segment."""
    starts, sizes, targets = (a.reshape(-1) for a in (starts, sizes, targets))
    index = jnp.arange(num_rows, dtype=jnp.int32)
    segment = jnp.sum(index[:, None] >= (starts + sizes)[None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, starts.shape[0] - 1)
    offset = index - starts[segment]
    return jnp.where((offset >= 0) & (offset < sizes[segment]), targets[segment] + offset, nowhere)


def _travel(x, way, num_rows, how):
    """Rows to the places that they are for: equal blocks, or those that `way` says, (starts, counts, arrive) i32[from, to] each."""
    if how.places == 1:
        return x if way is None else _resized(x, num_rows)
    if way is None:
        blocks = x.reshape(how.places, -1, x.shape[-1])
        return jax.lax.all_to_all(blocks, "expert", 0, 0).reshape(x.shape)
    return _ragged(x, way, num_rows)


def _resized(x, num_rows):
    return jnp.pad(x[:num_rows], [(0, max(num_rows - x.shape[0], 0)), (0, 0)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ragged(x, way, num_rows):
    starts, counts, arrive = way
    here = jax.lax.axis_index("expert")
    into = jnp.zeros((num_rows, x.shape[1]), x.dtype)
    return jax.lax.ragged_all_to_all(
        x, into, starts[here], counts[here], arrive[here], counts[:, here], axis_name="expert"
    )


def _ragged_backward(num_rows, residuals, dy):
    (starts, counts, arrive), like = residuals
    return _ragged(dy, (arrive.T, counts.T, starts.T), like.shape[0]), None


_ragged.defvjp(
    lambda x, way, num_rows: (_ragged(x, way, num_rows), (way, jnp.zeros((x.shape[0], 0)))), _ragged_backward
)


# --- rows ------------------------------------------------------------------------------------------------------------


def _sorted(ids, num_groups, completed=lambda sizes: sizes):
    """ids i32[A], `num_groups` for those that go nowhere -> (place i32[A] in their stable order by id, sizes i32[num_groups], `completed`)."""
    chosen = ids[:, None] == jax.lax.broadcasted_iota(jnp.int32, (1, num_groups), 1)
    seen = jnp.cumsum(chosen.astype(jnp.int32), axis=0)  # counting sort
    sizes = completed(seen[-1])
    return jnp.sum(jnp.where(chosen, seen - 1 + (jnp.cumsum(sizes) - sizes)[None], 0), axis=1), sizes


def _assignments(slots, num_rows):
    """i32[num_rows]: which of the flat assignments each row is, slots.size where it is none."""
    flat, number = slots.reshape(-1), jnp.arange(slots.size, dtype=jnp.int32)
    unique = jnp.where(flat < num_rows, flat, num_rows + number)  # those outside are left out
    return jnp.full((num_rows,), slots.size, jnp.int32).at[unique].set(number, mode="drop", unique_indices=True)


def _sources(slots, num_rows):
    """i32[num_rows]: the token of each row, slots.shape[0] where it is none."""
    return _assignments(slots, num_rows) // slots.shape[1]


def _row(x, index):
    """x[index], zeros where index is x's length."""
    inside = index < x.shape[0]
    found = jnp.take(x, jnp.minimum(index, x.shape[0] - 1), axis=0)
    return jnp.where(inside[..., None], found, jnp.zeros((), x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _take(x, sources, slots, gathered):
    """Rows [R, D] of tokens [N, D], or of the tokens of all places; backward the sum over each token's slots, so that neither direction scatters."""
    return _row(jax.lax.all_gather(x, "expert", tiled=True) if gathered else x, sources)


def _take_backward(gathered, slots, dy):
    dx = jnp.sum(_row(dy, slots).astype(jnp.float32), axis=1)
    if gathered:
        # A token's gradient comes from at most as many places as it has experts: two numbers can be rounded first, their sum is the same.
        travelling = dx.astype(dy.dtype) if slots.shape[1] <= 2 else dx
        dx = jax.lax.psum_scatter(travelling, "expert", scatter_dimension=0, tiled=True)
    return dx.astype(dy.dtype), None, None


_take.defvjp(lambda x, sources, slots, gathered: (_take(x, sources, slots, gathered), slots), _take_backward)


@jax.custom_vjp
def _weighted(rows, weights, slots):
    """f32[N, D]: sum over k of weights[n, k] x rows[slots[n, k]]."""
    return jnp.sum(weights[..., None] * _row(rows, slots).astype(jnp.float32), axis=1)


def _weighted_backward(residuals, dout):
    rows, weights, slots = residuals
    assignment = _assignments(slots, rows.shape[0])
    weight = _row(weights.reshape(-1, 1), assignment)
    drows = _row(dout, assignment // slots.shape[1]) * weight
    dweights = jnp.sum(_row(rows, slots).astype(jnp.float32) * dout[:, None], axis=-1)
    return drows.astype(rows.dtype), dweights, None


_weighted.defvjp(lambda *a: (_weighted(*a), a), _weighted_backward)


_DISPATCH = {"none": _dispatch_gathered, "allgather": _dispatch_gathered, "alltoall": _dispatch_sent, "ragged": _dispatch_sent}  # fmt: skip
_COMBINE = {"none": _combine_gathered, "allgather": _combine_gathered, "alltoall": _combine_sent, "ragged": _combine_sent}  # fmt: skip

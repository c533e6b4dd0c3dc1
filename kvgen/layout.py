"""The resolved layout: what a YAML file means, checked and without a trace of its spelling.

A buffer is a tensor. Its ``Place`` says what the tensor repeats over (one ``Dim`` per tensor dimension,
slowest first) and what stands there: values of a leaf, or a ``Record`` of places laid one after the other.
A record is the tensor's last dimension; strides outside it are read from the tensor at launch, offsets and
strides inside it are constants, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgen.axes import Axis, Digit, product
from kvgen.stages import Fuse


@dataclass(frozen=True, slots=True)
class Leaf:
    """Something stored: the values of a stream, one for each combination of its ``axes``.

    ``axes`` starts with ``block`` and ``slot`` and goes on with those of the stream, in logical order; codes of which
    every bit lies for itself have ``bit`` before ``dim``. ``dtypes`` are the accepted element types, all ``itemsize``
    bytes wide.
    """

    name: str
    stream: str
    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...]
    itemsize: int

    def extent(self, axis: str) -> int | None:
        return next(a.extent for a in self.axes if a.name == axis)


@dataclass(frozen=True, slots=True)
class Scale:
    """What codes are multiplied by to give values: decoded = code · scale.

    ``axes`` are those it varies over, in logical order (none: one for the whole tensor). A ``stored`` scale is a leaf
    of that ``name`` (``key.scale``): every dynamic one is, and a static one that varies over block or slot. Others are
    arguments of the generated functions, called ``argument`` (``key_scale``): a dimension per axis, ``[1]`` for none.

    A dynamic scale is amax / ``code_range``, floored (``floor`` on ``amax`` or on the ``scale``; None: no floor), put
    on its grid (``any`` or ``pow2``, the exponent by ``ceil`` or ``floor``) and rounded to ``dtype``. ``arithmetic``:
    codes are x / scale, or x · (1 / scale). ``given``: an argument is the scale, or its inverse. ``encode``: codes are
    made with the scale as ``stored``, or with the ``exact`` one. ``scale`` is a static one that this one is counted in:
    decoded = code · scale · scale.scale.
    """

    name: str
    axes: tuple[Axis, ...]
    dynamic: bool
    dtype: str  # float32, float16, bfloat16, float8_e4m3fn, float8_e8m0fnu
    stored: bool
    grid: Literal["any", "pow2"] = "any"
    exponent: Literal["ceil", "floor"] = "ceil"
    code_range: float = 448.0
    floor_on: Literal["amax", "scale"] | None = None
    floor: float = 0.0
    arithmetic: Literal["divide", "multiply"] = "divide"
    given: Literal["scale", "inverse"] = "scale"
    encode: Literal["stored", "exact"] = "stored"
    scale: Scale | None = (
        None  # a static one, handed in, that this one is counted in: decoded = code · scale · scale.scale
    )
    prefix: str = ""  # what the argument's name begins with, on one side of a transfer

    @property
    def argument(self) -> str:
        return self.prefix + self.name.replace(".", "_")


@dataclass(frozen=True, slots=True)
class Zero:
    """What lies under the codes: the ``minimum`` of the group, added to code · scale, or the ``point`` that codes 0.

    It varies over the axes of the scale and is stored as a leaf of that ``name`` (``key.zero``). ``clamped`` is the
    variant that clamps the zero point without extending the range to 0, as some engines do.
    """

    name: str
    kind: Literal["minimum", "point"]
    dtype: str
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the values of a stream become codes.

    ``mode`` is ``cast`` (to the codes' own type, no scale) or a mode of ``kvgen.quant``; ``code`` is the element type
    of the codes; integers are rounded as ``rounding`` says and clamped to ``clamp``. ``rotation``: what values are
    turned by before all of that, a Walsh-Hadamard transform along ``dim``.
    """

    mode: str
    code: str
    rounding: Literal["even", "away"] = "even"
    clamp: tuple[int, int] | None = None
    scale: Scale | None = None
    zero: Zero | None = None
    rotation: Literal["hadamard"] | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """What is handed in for a token: ``[T, *axes]``, of one of ``dtypes``; stored as it is, or encoded.

    ``itemsize`` is that of the widest: those of what is encoded may differ in size.
    """

    name: str
    axes: tuple[Axis, ...]  # head and dim, or dim alone
    dtypes: tuple[str, ...]
    itemsize: int
    encoding: Encoding | None = None

    @property
    def scale(self) -> Scale | None:
        return self.encoding.scale if self.encoding else None

    @property
    def group(self) -> int | None:
        """Dims that share a scale, where ``dim`` falls into several such groups."""
        axes = self.scale.axes if self.scale else ()
        return next((a.step for a in axes if a.name == "dim" and a.step > 1 and a.count != 1), None)


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a tensor, or one level of repetition inside a record.

    Its digits are in mixed radix, slowest first; none at all is a dimension of size one.
    """

    digits: tuple[Digit, ...]

    @property
    def size(self) -> int | None:
        return product(d.size for d in self.digits)


@dataclass(frozen=True, slots=True)
class Holds:
    """Values of one leaf, or of two that take turns over the ``kv`` axis (0 being the first).

    Codes narrower than a byte lie ``pack.size`` together in ``itemsize`` bytes, a little-endian stream of bits:
    ``pack`` is the digit that counts them there, and the dims of the place count what is left of its axis. Where the
    dims of the place count ``bit`` too, the codes of such a group are of one bit.
    """

    leaves: tuple[str, ...]
    itemsize: int
    pack: Digit | None = None

    @property
    def bits(self) -> int:
        """Of a value, or of a code where several share bytes."""
        return 8 * self.itemsize // (self.pack.size if self.pack else 1)


@dataclass(frozen=True, slots=True)
class Pad:
    """``size`` bytes; never written, or written with ``fill`` together with their token."""

    size: int
    fill: int | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A place or padding at ``offset`` bytes from the start of the record around it."""

    offset: int
    content: Place | Pad


@dataclass(frozen=True, slots=True)
class Record:
    """Places laid one after the other; ``size`` bytes from the first to the end of the last."""

    fields: tuple[Field, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """What it repeats over, slowest first, and what stands there each time.

    ``align`` is in bytes, 1 where nothing is asked for. A record that repeats takes ``pitch`` bytes each
    time: its size rounded up to ``align``; values take their item size.
    """

    dims: tuple[Dim, ...]
    content: Holds | Record
    align: int = 1

    @property
    def pitch(self) -> int:
        if isinstance(self.content, Holds):
            return self.content.itemsize
        return -(-self.content.size // self.align) * self.align

    @property
    def size(self) -> int | None:
        """Bytes of the whole place, None when a dimension is only known at launch."""
        return product([*(d.size for d in self.dims), self.pitch])


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of the pool: a dimension per ``place.dims``, then the record if there is one.

    ``unit`` is the size in bytes of the tensor's elements: the item size where everything in it has one type,
    else 1 (uint8). ``dtypes`` are the accepted element types of the tensor.
    """

    name: str
    place: Place
    unit: int
    dtypes: tuple[str, ...]

    @property
    def ndim(self) -> int:
        return len(self.place.dims) + isinstance(self.place.content, Record)


@dataclass(frozen=True, slots=True)
class Shard:
    """Context parallel: which tokens of ``world`` ranks, dealt ``interleave`` at a time, lie here."""

    world: int
    interleave: int


@dataclass(frozen=True, slots=True)
class Slots:
    """How slot numbers are written and which are skipped.

    Order at launch: skip rule, bound by the remap table's length, look-up, negative skips, bound by the pool.
    """

    dtype: Literal["int32", "int64"] = "int64"
    skip: int | None = None
    remap: str | None = None
    shard: Shard | None = None

    @property
    def selective(self) -> bool:
        """Whether most tokens of a prompt are skipped: those of other ranks.

        Behind a remap table few are: what is appended is the newest of its window.
        """
        return self.shard is not None


@dataclass(frozen=True, slots=True)
class FewHints:
    """What is different in a call of ``up_to`` tokens; None is as in a call of many."""

    up_to: int
    tokens: int | None = None
    num_warps: int | None = None


@dataclass(frozen=True, slots=True)
class KernelHints:
    """What a layout says of how one kernel is divided among programs; None is left to kvgen."""

    tokens: int | None = None
    heads: int | Literal["all"] | None = None
    num_warps: int | None = None
    few: FewHints | None = None


@dataclass(frozen=True, slots=True)
class ScheduleHints:
    append: KernelHints = KernelHints()
    gather: KernelHints = KernelHints()


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole layout. ``block_size`` and extents of None are dynamic.

    ``contiguous`` is a cache of one block per request: the same thing under the names ``request`` and ``position``.
    ``layers`` is the ``layer`` axis, or None where the layout has none; ``regions`` is that axis where every layer is
    an allocation of its own, of which functions take one. ``prefix`` is ``src_`` or ``dst_`` where it is
    one side of a transfer: its buffers are called so already, and so is what generated code says of it.
    ``of_leaves``: its streams are the leaves of another layout, as they are stored (``kvgen.stored``). ``query`` is
    what a fused append takes beside the streams; it is a stream in all but that nothing of it is stored.
    ``functions`` are those that its module has, all where none is named.
    """

    name: str
    summary: str
    block_size: int | None
    contiguous: bool
    layers: Axis | None
    streams: tuple[Stream, ...]
    leaves: tuple[Leaf, ...]
    buffers: tuple[Buffer, ...]
    slots: Slots
    schedule: ScheduleHints = ScheduleHints()
    prefix: str = ""
    of_leaves: bool = False
    regions: Axis | None = None
    fuse: Fuse | None = None
    query: Stream | None = None
    functions: tuple[str, ...] = ()

    @property
    def mla(self) -> bool:
        """Whether all heads share a ``latent`` and a ``rope`` stream: multi-head latent attention."""
        shared = {s.name for s in self.streams if all(axis.name != "head" for axis in s.axes)}
        return {"latent", "rope"} <= shared

    def stream(self, name: str) -> Stream:
        if self.query is not None and name == self.query.name:
            return self.query
        return next(s for s in self.streams if s.name == name)

    def leaf(self, name: str) -> Leaf:
        return next(x for x in self.leaves if x.name == name)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)


def leaves_of(place: Place | Pad) -> tuple[str, ...]:
    """Names of all leaves under a place, in storage order."""
    if isinstance(place, Pad):
        return ()
    if isinstance(place.content, Holds):
        return place.content.leaves
    return tuple(name for field in place.content.fields for name in leaves_of(field.content))


def holders(place: Place | Pad) -> tuple[Holds, ...]:
    """Every place of leaves under a place, in storage order."""
    if isinstance(place, Pad):
        return ()
    if isinstance(place.content, Holds):
        return (place.content,)
    return tuple(held for field in place.content.fields for held in holders(field.content))

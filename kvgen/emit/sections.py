"""The sections of a copying kernel, as its template is handed them: one per stream, with every decision taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.emit.packing import PackContext


@dataclass(frozen=True, slots=True)
class Piece:
    """One access, but the first, of a value that is reached in pieces: its index and its shift in bits."""

    index: int
    shift: int


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a copy: a pointer in tensor elements, and what is added once it points to values.

    Where the tensor holds bytes the pointer is cast to ``value_type``, or values are reached in ``pieces`` of
    ``piece_type`` that make up ``bits_type``. ``run`` is the pointer where the tokens are a run of slots in one block.
    ``made``: what is written was computed, not moved. Before it is cut in pieces it goes through an operation on
    integers then that no compiler leaves out: ptxas 12.8 stores the lowest piece of a float as its value.
    ``field``: nothing is stored, but left as words of that name: ``word_pack`` puts them together of what
    ``word_bits`` makes integers, in ``word_shape``. ``alone`` is the side where a program has a single token.
    """

    elements: str
    values: str = ""
    value_type: str = ""
    cast: bool = False
    in_pieces: bool = False
    pieces: tuple[Piece, ...] = ()
    piece_type: str = ""
    bits_type: str = ""
    made: bool = False
    rows: str = ""  # how many there are, where they are written one to a thread in the order of their index,
    even: str = ""  # and whether that is at even addresses
    runs: bool = False
    run: str = ""
    whole: str = "whole"  # the variable that says whether they are
    field: str = ""
    word_bits: str = ""
    word_pack: str = ""
    word_shape: str = ""
    alone: Side | None = None

    @property
    def as_words(self) -> bool:
        return bool(self.field)

    @property
    def in_rows(self) -> bool:
        return bool(self.rows)

    @property
    def by_count(self) -> bool:
        return self.alone is not None


@dataclass(frozen=True, slots=True)
class Masks:
    """Conditions of what is read, what is written, and of either in a run, which leaves the tokens out.

    ``other`` is there where nothing is read. The properties are arguments, ready to follow a pointer.
    """

    read: str = ""
    write: str = ""
    run: str = ""
    other: str = "0"
    hint: str = ""

    @property
    def load(self) -> str:
        return self._argument(self.read, reads=True)

    @property
    def store(self) -> str:
        return self._argument(self.write)

    @property
    def run_load(self) -> str:
        return self._argument(self.run, reads=True)

    @property
    def run_store(self) -> str:
        return self._argument(self.run)

    def _argument(self, condition: str, reads: bool = False) -> str:
        other = f", other={self.other}" if reads else ""
        return (f", mask={condition}{other}" if condition else "") + self.hint


@dataclass(frozen=True, slots=True)
class ScaleContext:
    """The scale of an encoded stream.

    ``magnitude`` reduces the values of the tile to the largest magnitude under each scale.
    """

    side: Side
    masks: Masks
    dynamic: bool
    magnitude: str
    steps: str  # the code that amax meets
    floor: str
    floor_on_amax: bool
    floor_on_scale: bool
    pow2: bool
    power: str  # the power of two that a scale becomes on such a grid
    apart: bool  # whether a scale is computed before it is rounded to its own type, and not at once
    quotient: str  # amax over steps
    stored: str  # the scale rounded to its own type
    cast_limits: str  # what casts take beside a scale
    rounds: bool  # whether the stored scale is not the exact one
    bounded: bool  # whether the exact scale can be infinite where it is used
    keeps_exact: bool  # whether the scale off its grid is used later
    exact: str  # its name then
    as_stored: bool  # whether it is the stored one that encodes
    decode: str  # the function that reads a stored scale
    counted: bool  # whether the scale is counted in one that is handed in
    lifted: bool  # whether the power of two that brings that near 1 is at hand
    outer: Side
    outer_masks: Masks
    inverse: bool  # whether the inverse is handed in
    handed: str  # the scale itself, and
    divisor: str  # what values are divided by, where that is found before they are worked on
    groups: str  # where it is the norm of a group: how many a tile has,
    stretch: str  # what each is multiplied by,
    by_norm: str  # the function that makes scales by norm,
    table: str  # what codes are found by,
    eights: str  # and what puts them in words is told of them
    kept: str  # the name of the scale as it is stored,
    own: str  # as it is loaded,
    given: str  # and of what is handed in: that one, or the one that it is counted in
    early: bool  # whether it is loaded with the values,
    placed: bool  # behind them, since it depends on the slot,
    late: bool  # or where it is used


@dataclass(frozen=True, slots=True)
class ZeroContext:
    """The zero of an encoded stream: the minimum of its group, or the code that stands for 0."""

    side: Side
    masks: Masks
    extremes: str  # the lowest and highest value of each group,
    by_twos: bool  # found of values as they come, two in a word
    point: bool
    extended: bool  # whether the range is made to include 0
    last: str  # the largest code
    stored_as: str
    decode: str
    own: str  # its name as it is loaded

    @property
    def one_by_one(self) -> bool:
        return not self.by_twos


@dataclass(frozen=True, slots=True)
class PairContext:
    """Scales and zeros of a row that lie side by side: read as one row of both and told apart, or written as one.

    ``names`` are theirs in the order in which they lie. ``shape`` is that of the tile with an axis of both at its end,
    or of the rows that are written.
    """

    side: Side
    masks: Masks
    names: str
    shape: str


@dataclass(frozen=True, slots=True)
class PositionContext:
    """A position of a token: its name, what is added to the pointer to all positions, and its row of the table.

    That is the first row where the position is past the table: it is read, and what comes of it is not written.
    """

    name: str
    offset: str
    row: str


@dataclass(frozen=True, slots=True)
class ScaledContext:
    """A value that a norm scales: its name, and what multiplies it besides, as it is ``loaded``."""

    name: str
    weight: str = ""
    loaded: str = ""


@dataclass(frozen=True, slots=True)
class WideContext:
    """Values in the type in which their squares are summed."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class NormContext:
    """A norm. ``total`` sums the squares over a row, of the ``widened`` where that is another type."""

    comment: str
    inverse: str
    widened: tuple[WideContext, ...]
    total: str
    share: str  # one over the values of a row
    eps: str
    scaled: tuple[ScaledContext, ...]


@dataclass(frozen=True, slots=True)
class FactorContext:
    """What a frequency is multiplied by where the number of its pair has the bit."""

    bit: int
    value: str


@dataclass(frozen=True, slots=True)
class TableContext:
    """Cosines or sines by name, and where they lie: of one position, or of three."""

    name: str
    at: str
    height_at: str = ""
    width_at: str = ""


@dataclass(frozen=True, slots=True)
class RopeContext:
    """A rotation: what is worked out of the index of a value, and where its cosine and sine come from.

    ``beside``: the other value of each pair is loaded beside it, see ``kvgen.emit.pairs``; ``first_at`` is whether a
    value is the first of its pair, as the tile has it. ``split``: the rows are split into ``pairs`` to turn, and put
    together as ``rows``.
    """

    comment: str
    value: str
    partner: str
    names: dict[str, str]  # of the section's own variables
    beside: bool
    pair: str
    first: str
    other: str
    first_at: str
    several: bool  # whether pairs take one of three positions
    by_turn: bool  # whether that depends on the number of the pair modulo 3
    height: str
    width: str
    positions: tuple[str, ...]
    computed: bool
    factors: tuple[FactorContext, ...]
    position_at: str
    frequency_at: str
    tables: tuple[TableContext, ...]
    split: bool
    pairs: str
    rows: str
    partial: bool
    rotated: str


@dataclass(frozen=True, slots=True)
class StageContext:
    """A norm or a rotation, and the values that are rounded to the type of the source after it: name, expression."""

    norms: tuple[NormContext, ...]
    ropes: tuple[RopeContext, ...]
    rounded: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StagesContext:
    """The stages of a section.

    ``two``: a second tile, the ``partner``, is loaded from ``partner_at``, see ``kvgen.emit.pairs``. ``rejoined``: rows
    are put together of their ``halves`` as ``rows`` once they are through.
    """

    value: str
    value_type: str
    partner: str
    two: bool
    partner_at: str
    widened: str  # the values as float32, and those of the second tile
    partner_widened: str
    rejoined: bool
    rows: str
    halves: str
    stages: tuple[StageContext, ...]


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """Where a bit of the codes lies, but the lowest, which are packed like those; and its name as it is read."""

    bit: int
    name: str
    side: Side
    masks: Masks

    @property
    def shift(self) -> int:
        """Where its byte lies in a word that has one of each."""
        return 8 * self.bit


@dataclass(frozen=True, slots=True)
class PartContext:
    """Values that become codes: their name, themselves as float32, those over their scale, and the codes."""

    name: str
    widened: str
    divided: str
    codes: str


@dataclass(frozen=True, slots=True)
class BandContext:
    """Some dims of tokens that are no run of slots: where they are loaded again, what they become, where they go."""

    index: str
    dims: str
    extent: str
    size: int
    source: str
    load_mask: str
    part: PartContext
    target: str
    store_mask: str


@dataclass(frozen=True, slots=True)
class CopyContext:
    """One stream's section of a kernel."""

    stream: str
    comment: str
    value_type: str
    dense: Side
    cache: Side
    mask_definition: str
    masks: Masks
    cache_masks: Masks
    encoded: bool
    encode: str
    parts: tuple[PartContext, ...]  # all values, or both halves of their rows
    divides: bool  # whether values are divided by their scale before
    divided: str  # all values over their scale
    decode: str
    decode_limits: str
    rotated: bool
    rotation: str
    valid: str  # which tokens are not skipped, in the shape of the tile
    by_norm: bool  # whether the scale is the norm of a group over that of its codes
    scaled: bool
    scale: ScaleContext | None
    zeroed: bool
    zero: ZeroContext | None
    packed: bool
    pack: PackContext | None
    planed: bool  # whether every bit of the codes lies for itself; the side is that of the lowest then
    transposed: bool  # whether all of them are packed at once, each in a byte of a word
    planes: tuple[PlaneContext, ...]
    staged: bool
    stages: StagesContext | None
    rounds: bool  # whether what stages leave is stored as it comes, rounded to its type
    loads: bool  # whether its values are not at hand from the section before
    halved: bool = False  # whether rows are stored in two halves, the second in ``second``
    rejoined: bool = False  # whether they are whole in between
    second: Side | None = None
    together: str = ""  # what puts parts of rows together, as which they are loaded
    pairs: str = ""  # the bytes that pairs of codes share, or the words of planes, where they are made at once
    in_twos: bool = False  # whether packs of several bytes are written by twos
    params: PairContext | None = None  # scale and zero, where they are read at once
    staged_first: bool = False  # whether values have gone through their stages before any section
    measured: bool = False  # whether values are float32 and their largest magnitude known before the section
    band: BandContext | None = None  # what is stored at a time of tokens that are no run, where that is not all

    @property
    def widens(self) -> bool:
        return not self.measured

    @property
    def ready(self) -> bool:
        """Whether what values are divided by is at hand before the section."""
        return self.scale is not None and bool(self.scale.divisor)

    @property
    def worked_on(self) -> bool:
        """Whether the section has the stages of its values."""
        return self.staged and not self.staged_first

    @property
    def in_pairs(self) -> bool:
        return bool(self.pairs)

    @property
    def packs(self) -> bool:
        """Whether what is at hand is to become bytes: codes, or words of planes."""
        return self.packed and (self.transposed or not self.in_pairs)

    @property
    def in_codes(self) -> bool:
        """Whether that is codes, one by one."""
        return not self.in_pairs

    @property
    def measured_by_twos(self) -> bool:
        """Whether its extremes are found of values as they come."""
        return self.zero is not None and self.zero.by_twos

    @property
    def stores_scale(self) -> bool:
        """Whether its scale is stored by itself."""
        return self.params is None

    @property
    def banded(self) -> bool:
        return self.band is not None

    @property
    def paired(self) -> bool:
        return self.params is not None

    @property
    def apart(self) -> bool:
        """Whether bits that lie for themselves are put together code by code, not all at once."""
        return self.planed and not self.transposed

    @property
    def together_in_bytes(self) -> str:
        """What codes are taken out of: the bytes that they share, of all their bits at once."""
        return ", ".join([self.stream, *(plane.name for plane in self.planes if self.transposed)])

    def again(self) -> CopyContext:
        """The section where its values or codes are at hand from the one before."""
        return replace(self, loads=False, encoded=False)


@dataclass(frozen=True, slots=True)
class FillContext:
    """Padding that is written with its token."""

    comment: str
    pointers: str
    side: int
    value: int
    subscript: str
    mask: str

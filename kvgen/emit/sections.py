"""The sections of a copying kernel, as its template is handed them: one per stream, with every decision taken."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    elements: str
    values: str = ""
    value_type: str = ""
    cast: bool = False
    in_pieces: bool = False
    pieces: tuple[Piece, ...] = ()
    piece_type: str = ""
    bits_type: str = ""
    runs: bool = False
    run: str = ""
    whole: str = "whole"  # the variable that says whether they are


@dataclass(frozen=True, slots=True)
class Masks:
    """Mask arguments, ready to follow a pointer; those of a run leave the tokens out."""

    load: str
    store: str
    run_load: str
    run_store: str


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
    grid: str  # the function that puts a scale on its grid of powers of two
    stored_as: str  # the function that rounds a scale to its own type
    cast_limits: str  # what that takes beside the scale
    rounds: bool  # whether the stored scale is not the exact one
    bounded: bool  # whether the exact scale can be infinite where it is used
    keeps_exact: bool  # whether the scale off its grid is used later
    exact: str  # its name then
    as_stored: bool  # whether it is the stored one that encodes
    decode: str  # the function that reads a stored scale
    divide: str  # the values over their scale
    counted: bool  # whether the scale is counted in one that is handed in
    outer: Side
    outer_masks: Masks
    inverse: bool  # whether the inverse is handed in
    groups: str  # where it is the norm of a group: how many a tile has
    ratio: str  # and a number for each, in the shape of the scales


@dataclass(frozen=True, slots=True)
class ZeroContext:
    """The zero of an encoded stream: the minimum of its group, or the code that stands for 0."""

    side: Side
    masks: Masks
    lowest: str
    highest: str
    point: bool
    extended: bool  # whether the range is made to include 0
    last: str  # the largest code
    stored_as: str
    decode: str


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
    encode_limits: str
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


@dataclass(frozen=True, slots=True)
class FillContext:
    """Padding that is written with its token."""

    comment: str
    pointers: str
    side: int
    value: int
    subscript: str
    mask: str

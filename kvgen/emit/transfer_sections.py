"""The kernel of a transfer as its template is handed it: two sides of a cache, and what is moved between them."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.emit.args import Arg
from kvgen.emit.sections import CopyContext, FillContext, Masks, Side
from kvgen.plan import Plan
from kvgen.schedule_transfer import TransferSchedule


@dataclass(frozen=True, slots=True)
class Move:
    """One view to another. ``decoded`` and ``encoded`` hold one context each where codes are read or made.

    ``inside``: the lanes that have a value, where others would count in a scale. ``together``: what puts parts of rows
    together, as which they are read.
    """

    name: str
    comment: str
    read: Side
    read_masks: Masks
    write: Side
    write_masks: Masks
    raw: bool
    mask_definition: str = ""
    decoded: tuple[CopyContext, ...] = ()
    encoded: tuple[CopyContext, ...] = ()
    inside: str = ""
    together: str = ""
    rounded: str = ""
    unpacked: tuple[CopyContext, ...] = ()
    packed: tuple[CopyContext, ...] = ()

    @property
    def scaled(self) -> tuple[CopyContext, ...]:
        """What is decoded by a scale."""
        return tuple(context for context in self.decoded if context.scaled)


@dataclass(frozen=True, slots=True)
class KernelSide:
    """How one side finds its tokens: names of arguments and variables begin with ``prefix``.

    ``group_*``: where the first token of a tile lies, and with it what its tokens share.
    """

    prefix: str
    block_size: str
    num_blocks: str
    layer: bool
    block: bool
    slot: bool
    slot_number: bool
    scalar_block: bool
    runs: bool
    run_slot: bool
    run_number: bool
    aligned: bool
    tables: tuple[str, ...]
    first_slot: str  # of a tile that lies in one block
    group_block: bool = False
    group_slot: bool = False
    group_number: bool = False
    whole_blocks: bool = False  # whether a tile has several blocks, all of each

    @property
    def each_block(self) -> bool:
        """Whether each token's block is looked up for itself."""
        return not (self.scalar_block or self.whole_blocks)

    @property
    def blocks(self) -> str:
        """How many blocks a tile has then."""
        return f"TOKENS // {self.block_size}"


@dataclass(frozen=True, slots=True)
class TransferKernel:
    """One kernel, ready to print, and what it does with a tile. ``definitions`` are index variables.

    ``raw`` are the moves of bytes, all of which are read before any is written, so that more is under way; so are those
    ``coded`` ones, where registers allow.
    """

    name: str
    summary: str
    plan: Plan
    schedule: TransferSchedule
    args: tuple[Arg, ...]
    constants: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    sides: tuple[KernelSide, ...]
    moves: tuple[Move, ...]
    head_tile: str
    step: str  # tokens from one tile to the next
    end: str  # where the tokens of a tile end
    fills: tuple[FillContext, ...]
    present: str
    valid: str
    stride_units: tuple[int, int]
    uses: dict[str, bool]

    @property
    def unspecialized(self) -> str:
        return ", ".join(f'"{arg.name}"' for arg in self.args if arg.role in ("count", "index"))

    @property
    def tile_summary(self) -> str:
        heads = "all heads"
        if self.schedule.heads:
            heads = "one head" if self.head_tile == "1" else f"{self.head_tile} heads"
        return f"Move {' and '.join(self.plan.streams)} of a tile: TOKENS tokens, {heads}."

    @property
    def head_tiles(self) -> str:
        """How many tiles all heads make up."""
        return "HEADS" if self.head_tile == "1" else f"(HEADS + {self.head_tile} - 1) // {self.head_tile}"

    @property
    def times_heads(self) -> str:
        return "" if self.head_tile == "1" else f" * {self.head_tile}"

    @property
    def tile_name(self) -> str:
        return f"_{self.plan.name}_tile"

    @property
    def tile_args(self) -> tuple[Arg, ...]:
        """What moving one tile takes, behind the tile's number."""
        return tuple(arg for arg in self.args if arg.role != "stages")

    @property
    def tile_arguments(self) -> str:
        return ", ".join(["item", *(arg.name for arg in self.tile_args)])

    @property
    def raw(self) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.raw)

    @property
    def coded(self) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if not move.raw)

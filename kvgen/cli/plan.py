"""``kvgen plan``: the runs of bytes that take tokens from one layout to another."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.common import check_layers, layout_path, one_layout
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.layout import Layout

if TYPE_CHECKING:
    from kvgen.descriptors import Chunk, Heads, Move

VERDICTS = {
    "descriptors": "a list of descriptors does it",
    "repack": "a kernel should repack",
    "convert": "a kernel must convert",
}


def plan(
    source: Annotated[
        str, typer.Argument(help="The layout that tokens lie in: a file, or a shipped layout's name. Or a transfer.")
    ],
    destination: Annotated[
        str | None, typer.Argument(help="The layout that they go to; a transfer has one of its own.")
    ] = None,
    src_tp: Annotated[int, typer.Option(min=1, help="Ranks that the source's heads are dealt to.")] = 1,
    dst_tp: Annotated[int, typer.Option(min=1, help="Ranks that the destination's heads are dealt to.")] = 1,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of an allocation, where the layout has any.")
    ] = None,
    short: Annotated[int, typer.Option(min=1, help="Bytes below which a run is called short.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the contiguous runs of bytes that move whole blocks, as an RDMA or copy engine needs them.

    Layouts have the heads of the whole model; a rank holds an even part of them, or one head that several ranks share.
    """
    ours, theirs = _sides(source, destination)
    if layers is not None:
        check_layers(ours, layers)
        check_layers(theirs, layers)
        ours, theirs = (_resized(layout, "layer", layers) for layout in (ours, theirs))
    _check(ours, theirs)
    found = _chunks(ours, theirs, src_tp, dst_tp)
    facts = _facts(ours, theirs, found, short)
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(_text(facts)))


def _sides(source: str, destination: str | None) -> tuple[Layout, Layout]:
    """Two layouts, or those of a transfer."""
    if destination is not None:
        ours, theirs = (one_layout(name, "name two layouts, or the transfer alone") for name in (source, destination))
        return ours, theirs
    from kvgen.documents import load
    from kvgen.transfer import Transfer

    found = load(layout_path(source))
    if not isinstance(found, Transfer):
        raise KvgenError(Diagnostic("KV701", f"{found.name} is one layout", hint="name another, or a transfer alone"))
    return found.sides


def _check(ours: Layout, theirs: Layout) -> None:
    """Both sides must be known to the last number, and hold the same."""
    for layout in (ours, theirs):
        axes = [axis for stream in layout.streams for axis in stream.axes]
        if layout.block_size is None or any(axis.extent is None for axis in axes):
            _refuse(f"{layout.name} has sizes that only the launch knows", "give `block_size` and `axes` numbers")
    names = [sorted(stream.name for stream in layout.streams) for layout in (ours, theirs)]
    if names[0] != names[1]:
        _refuse(f"{ours.name} holds {', '.join(names[0])}, and {theirs.name} {', '.join(names[1])}")
    for stream in ours.streams:
        other = theirs.stream(stream.name)
        if stream.axes != other.axes:
            sizes = [" ".join(f"{axis.name} {axis.extent}" for axis in s.axes) for s in (stream, other)]
            hint = "name layouts with the heads of the model; `--src-tp` and `--dst-tp` deal them to ranks"
            _refuse(f"{stream.name} is {sizes[0]} at the source, and {sizes[1]} at the destination", hint)
    layers = [layout.layers and layout.layers.extent for layout in (ours, theirs)]
    if all(layers) and layers[0] != layers[1]:
        _refuse(f"{ours.name} has {layers[0]} layers, and {theirs.name} {layers[1]}")


def _refuse(message: str, hint: str | None = None) -> None:
    raise KvgenError(Diagnostic("KV716", message, hint=hint))


def _chunks(ours: Layout, theirs: Layout, src_tp: int, dst_tp: int) -> list[Chunk]:
    """A chunk for each pair of ranks that has something to move."""
    from kvgen.descriptors import chunk, heads_of_rank, shards

    heads = next((axis.extent for s in ours.streams for axis in s.axes if axis.name == "head"), None)
    try:
        pairs = shards(heads, src_tp, dst_tp)
    except ValueError as error:
        _refuse(str(error), "as many ranks as divide the heads, or as the heads divide")
    if heads is not None:
        counts = heads_of_rank(heads, src_tp), heads_of_rank(heads, dst_tp)
        ours, theirs = _resized(ours, "head", counts[0]), _resized(theirs, "head", counts[1])
    try:
        return [chunk(ours, theirs, pair) for pair in pairs]
    except ValueError as error:
        sizes = f"{ours.block_size} and {theirs.block_size}"
        _refuse(str(error), f"blocks of {sizes} tokens: give both sizes of which one is a multiple of the other")


def _resized(layout: Layout, axis: str, extent: int) -> Layout:
    """The layout with another extent of an axis that it has. A split that does not divide it is told as of a file."""
    from kvgen.canonical import canonical
    from kvgen.resolve import load_text

    text = re.sub(rf"^(axes: \{{.*?\b{axis}: )\w+", rf"\g<1>{extent}", canonical(layout), flags=re.M)
    return load_text(text, f"{layout.name} with {axis} {extent}")


def _facts(ours: Layout, theirs: Layout, found: list[Chunk], short: int) -> dict[str, Any]:
    first = found[0]
    runs = [move.nbytes for chunk in found for move in chunk.moves]
    verdict = "descriptors"
    if any(nbytes < short for nbytes in runs):
        verdict = "repack"
    if any(chunk.problems for chunk in found):
        verdict = "convert" if not runs else "repack"
    return {
        "source": {"layout": ours.name, "blocks": first.source_blocks},
        "destination": {"layout": theirs.name, "blocks": first.destination_blocks},
        "tokens": first.tokens,
        "layers": _layers(ours, theirs),
        "short": short,
        "verdict": verdict,
        "problems": list(dict.fromkeys(problem for chunk in found for problem in chunk.problems)),
        "ranks": [_rank(chunk.heads) | {"moves": [_move(m, short) for m in chunk.moves]} for chunk in found],
        "fills": [_fill(value, move) for value, move in first.fills],
    }


def _layers(ours: Layout, theirs: Layout) -> str:
    sides = [name for name, layout in (("source", ours), ("destination", theirs)) if layout.layers]
    return {0: "one", 1: f"one, of the {sides[0]}'s" if sides else "", 2: "all"}[len(sides)]


def _rank(heads: Heads) -> dict[str, Any]:
    ranks = {"source_rank": heads.source_rank, "destination_rank": heads.destination_rank}
    return ranks | {"src_head": heads.source, "dst_head": heads.destination, "heads": heads.count}


def _move(move: Move, short: int) -> dict[str, Any]:
    source, destination = move.addresses
    return {
        "fields": list(move.fields),
        "bytes": move.nbytes,
        "count": move.count.plain,
        "short": move.nbytes < short,
        "source": _end(move.source) | {"address": source},
        "destination": _end(move.destination) | {"address": destination},
        "loops": [
            {
                "index": loop.index,
                "count": "num_layers" if loop.count is None else loop.count,
                "source": _step(loop.source),
                "destination": _step(loop.destination),
            }
            for loop in move.loops
        ],
    }


def _fill(value: int, move: Move) -> dict[str, Any]:
    facts = _move(move, 1)
    loops = [{key: loop[key] for key in ("index", "count", "destination")} for loop in facts["loops"]]
    named = {key: facts[key] for key in ("bytes", "count", "destination")}
    return {"value": value} | named | {"loops": loops}


def _end(end) -> dict[str, Any]:
    return {"tensor": end.tensor, "offset": end.offset.plain, "block": end.block.plain}


def _step(step) -> dict[str, Any]:
    """Bytes from one index to the next, or offsets of each where they are uneven, and the block that each is in."""
    even = {} if step.stride is None else {"stride": step.stride.plain}
    uneven = {"offsets": [offset.plain for offset in step.offsets]} if step.stride is None else {}
    return even | uneven | ({"blocks": list(step.blocks)} if step.blocks else {})


def _text(facts: dict[str, Any]) -> list[str]:
    sides = [f"{facts[side]['blocks']} of {facts[side]['layout']}" for side in ("source", "destination")]
    tokens = "1 token" if facts["tokens"] == 1 else f"{facts['tokens']} tokens"
    lines = [
        f"{tokens}, blocks: {sides[0]} to {sides[1]}; layers: {facts['layers']}",
        VERDICTS[facts["verdict"]] + _why(facts),
        *(f"  {problem}" for problem in facts["problems"]),
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for rank in facts["ranks"]:
        groups.setdefault(json.dumps(rank["moves"]), []).append(rank)
    for ranks in groups.values():
        lines += ["", *(_rank_line(rank) for rank in ranks)] if len(facts["ranks"]) > 1 else [""]
        for move in ranks[0]["moves"]:
            lines += _move_lines(move)
    if facts["fills"] and len(facts["ranks"]) > 1:
        lines += ["", "every rank of the destination"]
    for fill in facts["fills"]:
        lines.append(f"  padding: {_runs(fill)}, set to {fill['value']}")
        lines.append(f"    at   {fill['destination']['address']}")
    if any(rank["moves"] for rank in facts["ranks"]):
        lines += [
            "",
            "stride(i) is that of dimension i in bytes, as small as the layout allows: larger ones end a run.",
        ]
    return lines


def _why(facts: dict[str, Any]) -> str:
    moves = [move for rank in facts["ranks"] for move in rank["moves"]]
    if facts["problems"] or not any(move["short"] for move in moves):
        return ""
    least = min(move["bytes"] for move in moves)
    return f": runs of {least} bytes are shorter than {facts['short']}"


def _rank_line(rank: dict[str, Any]) -> str:
    ends = f"rank {rank['source_rank']} to rank {rank['destination_rank']}"
    if rank["heads"] is None:
        return ends
    spans = [f"{rank[name]} to {rank[name] + rank['heads']}" for name in ("src_head", "dst_head")]
    return f"{ends}: heads {spans[0]} become {spans[1]}"


def _move_lines(move: dict[str, Any]) -> list[str]:
    return [
        f"  {', '.join(move['fields'])}: {_runs(move)}",
        f"    from {move['source']['address']}",
        f"    to   {move['destination']['address']}",
    ]


def _runs(facts: dict[str, Any]) -> str:
    """How many runs of a move or a fill, how long, and over what they go."""
    loops = ", ".join(f"{loop['index']} < {loop['count']}" for loop in facts["loops"])
    plural = "" if facts["count"] == 1 else "s"
    return f"{facts['count']} run{plural} of {facts['bytes']} bytes" + (f", for {loops}" if loops else "")

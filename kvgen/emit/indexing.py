"""Index variables of a kernel, and the addresses, masks and strides that are made of them."""

from __future__ import annotations

from kvgen.axes import Axis
from kvgen.emit.args import Arg, smallest_stride, stride_factors, stride_unit, widest_unit
from kvgen.emit.encoding import regroup
from kvgen.emit.index import Variable, address, dim_name, subscript
from kvgen.emit.names import extent_name, extents_of, index_name
from kvgen.emit.packing import word_type
from kvgen.emit.sections import Masks, Piece, Side
from kvgen.layout import Layout, Scale, leaves_of
from kvgen.lower import SLOT_NUMBER, coalesce
from kvgen.plan import Plan, Step, View
from kvgen.schedule import Schedule, kv_parts
from kvgen.tiles import Tile


def _leaves_32_bits(step: Step) -> bool:
    """Whether a digit times its constant factor can pass the largest int32; a size known at launch may be anything."""
    return step.factor * (step.digit.size or 2**31) >= 2**31 and step.factor > 1


class Indexing:
    """Collects constants, index variables, strides and bounds of one kernel as its sections ask for them."""

    def __init__(self, layout: Layout, plan: Plan, sched: Schedule) -> None:
        self.layout, self.plan, self.sched = layout, plan, sched
        self.tiled = sched.tokens > 1 or plan.kind == "gather"
        self.strides: dict[str, Arg] = {}
        self.bounds: dict[tuple[str, str], str] = {}
        self.extents: dict[str, Arg] = {}
        self.tiles: dict[str, Arg] = {}
        self.constants: dict[str, str] = {}
        self.stride_unit, self.unit_name = stride_unit(layout, plan), f"{layout.prefix.upper()}STRIDE_UNIT"
        # Which tokens a program has, and which heads where they are divided. Those that have other heads of its tokens
        # run beside it, since what they read and write lies side by side; but those of a query stand behind all.
        parts = kv_parts(layout, plan, sched)
        apart = plan.query is not None or parts == 1
        self.program = "tl.program_id(0)" if apart else f"(tl.program_id(0) // {parts})"
        self.part = "tl.program_id(1)" if apart else f"(tl.program_id(0) % {parts})"
        self.definitions: dict[str, str] = {}
        self.native = False  # whether a section has instructions of its own for some processors
        views = [view for copy in plan.copies for view in copy.views]
        views += [fill.view for fill in plan.fills]
        steps = [step for view in views for step in coalesce(layout, view.steps)]
        self.axes = {step.digit.axis for step in steps}
        # Variables that strides of tensors multiply, or constants that could leave 32 bits, are widened before that.
        self.wide = {step.digit.axis for step in steps if step.dim is not None or _leaves_32_bits(step)}

    def _variables(
        self, stream: str, tile: Tile, axes: list[Axis] | None = None
    ) -> tuple[dict[str, Variable], list[str]]:
        """Variables of every axis for one tile, and the masks of its padded sides."""
        rank = len(tile.order)
        token = tile.order.index("token") if "token" in tile.order else None
        own = self.layout.prefix
        variables = {name: Variable(own + name, token) for name in ("block", "slot", SLOT_NUMBER)}
        variables |= {"token": Variable("token", token), "layer": Variable(own + "layer")}
        masks = []
        for axis in self.layout.stream(stream).axes if axes is None else axes:
            name = index_name(self.layout, stream, axis.name)
            if axis.name == "dim" and "group" in tile.order:
                variables[axis.name], found = self._grouped(stream, axis, name, tile)
                masks += found
                continue
            if axis.name == "dim" and "run" in tile.order:
                variables[axis.name], found = self._in_vectors(stream, axis, name, tile)
                masks += found
                continue
            place = tile.order.index(axis.name) if axis.name in tile.order else None
            variables[axis.name] = Variable(name, place)
            bound = self._define(stream, axis, name, 1 if place is None else tile.sides[place])
            if bound:
                self.bounds[stream, axis.name] = bound
                masks.append(f"({name} < {bound}){subscript(place, rank)}")
        return variables, masks

    def _group(self, stream: str) -> int | None:
        """Dims of a stream that the tile keeps together, since they share a scale."""
        return self.layout.stream(stream).group

    def _grouped(self, stream: str, axis: Axis, name: str, tile: Tile) -> tuple[Variable, list[str]]:
        """The index variable of an axis cut in groups, which takes two axes of the tile, and its masks."""
        rank, size = len(tile.order), self._group(stream)
        places = tile.order.index("group"), tile.order.index("group") + 1
        sides = tile.sides[places[0]], tile.sides[places[1]]
        wide = ".to(tl.int64)" if axis.name in self.wide else ""
        self.definitions[f"{name}_group"] = f"tl.arange(0, {sides[0]}){wide}"
        self.definitions[f"{name}_lane"] = f"tl.arange(0, {sides[1]})"
        self.definitions[name] = f"{name}_group[:, None] * {size} + {name}_lane[None, :]"
        constant, variable = extent_name(self.layout, stream, axis.name), Variable(name, places)
        masks = []
        if sides[0] * size != axis.extent:
            self.constants[constant] = str(axis.extent)
            masks.append(f"({name} < {constant}){subscript(places, rank)}")
        if sides[1] != size:
            masks.append(f"({name}_lane < {size}){subscript(places[1], rank)}")
        return variable, masks

    def _in_vectors(self, stream: str, axis: Axis, name: str, tile: Tile) -> tuple[Variable, list[str]]:
        """The index variable of dims in runs that lie side by side: two axes of the tile, with others between them."""
        known, name = dict(zip(tile.order, tile.sides, strict=True)), f"{name}_vector"
        places = tile.order.index("run"), tile.order.index("dim")
        wide = ".to(tl.int64)" if axis.name in self.wide else ""
        runs, lanes = f"tl.arange(0, {known['run']}){wide}", f"tl.arange(0, {known['dim']})"
        self.definitions[name] = f"{runs}[:, None] * {known['dim']} + {lanes}[None, :]"
        if known["run"] * known["dim"] == axis.extent:
            return Variable(name, places), []
        constant = extent_name(self.layout, stream, axis.name)
        self.constants[constant] = str(axis.extent)
        return Variable(name, places), [f"({name} < {constant}){subscript(places, len(tile.order))}"]

    def _define(self, stream: str, axis: Axis, name: str, side: int | None) -> str | None:
        """Define the index variable of an axis; returns the bound to mask it with where its side is padded."""
        if axis.extent == 1:
            return None
        constant = extent_name(self.layout, stream, axis.name)
        wide = ".to(tl.int64)" if axis.name in self.wide else ""
        if axis.extent is None:
            tile, extent = f"{constant}_TILE", constant.lower()
            self.tiles[tile] = Arg(tile, "constexpr", f"triton.next_power_of_2({extent})", "tile")
            self.extents[extent] = Arg(extent, "i32", extent, "extent")
            self.definitions[name] = f"tl.arange(0, {tile}){wide}"
            return extent
        if axis.name == "head" and self.sched.heads is not None:
            program, count = f"{self.part}{wide}", f"{constant}_TILE" if side is None else side
            self.definitions[name] = program if side == 1 else f"{program} * {count} + tl.arange(0, {count})"
            exact = side is None or axis.extent % side == 0
        else:
            exact = side == axis.extent
            self.definitions[name] = f"tl.arange(0, {constant if exact else side}){wide}"
        if not exact or self.sched.heads is None or axis.name != "head":
            self.constants[constant] = str(axis.extent)
        return None if exact else constant

    def _masks(
        self, stream: str, load: list[str], store: list[str], bounds: list[str], named: bool = True
    ) -> tuple[str, Masks]:
        """The definition of a mask that is long and used twice, and the masks of loads and stores."""
        loads, stores, runs = (" & ".join([*guards, *bounds]) for guards in (load, store, []))
        shared = named and loads == stores and " & " in loads
        definition = f"{stream}_mask = {loads}" if shared else ""
        if shared:
            loads = stores = f"{stream}_mask"
        return definition, Masks(loads, stores, runs)

    def _side(
        self,
        view: View,
        stream: str,
        variables: dict[str, Variable],
        rank: int,
        value_type: str,
        scale: Scale | None = None,
        dims: int | None = None,
        grouped: bool = True,
    ) -> Side:
        """``grouped``: the index of ``dim`` that a scale is found by counts the scale's own groups."""
        extents, steps = extents_of(self.layout, stream), coalesce(self.layout, view.steps)
        if dims is not None:
            extents = extents | {"dim": dims}
        if scale and grouped:
            view, extents = regroup(view, scale, extents)
            steps = coalesce(self.layout, view.steps)
        names = {s.dim: self._stride(view, stream, s.dim, scale) for s in steps if s.dim is not None}
        found = address(self.layout, view, variables, extents, names, rank)
        in_pieces = view.access < view.itemsize
        return Side(
            elements=" + ".join([f"{view.tensor}_ptr", *found.elements]),
            values="".join(f" + {term}" for term in found.values),
            value_type=value_type,
            cast=view.unit != view.itemsize and not in_pieces,
            in_pieces=in_pieces,
            pieces=tuple(Piece(i, 8 * i * view.access) for i in range(1, view.itemsize // view.access)),
            piece_type=f"tl.uint{8 * view.access}",
            bits_type=word_type(view.itemsize),
        )

    def _stride(self, view: View, stream: str, dim: int, scale: Scale | None = None) -> str:
        """The name of a tensor's stride, registered as an argument."""
        buffer = next((b for b in self.layout.buffers if b.name == view.tensor), None)
        if any(step.digit.axis == "position" for step in view.steps):  # a table of cosines and sines
            name, rope = f"{view.tensor}_stride_position", self.plan.rotary.rope
            width = rope.pairs if rope.cos_sin == "split" else rope.rotary_dim
            self.strides[name] = Arg(name, "i32", f"{view.tensor}.stride({dim})", "stride", width % 16 == 0)
            return name
        if buffer is not None:
            leaf = stream
            if self.layout.of_leaves:  # a leaf of the buffer's own counts dims as its order does
                leaf = next((name for name in leaves_of(buffer.place) if "." in name), stream)
            name = f"{view.tensor}_stride_{dim_name(buffer.place.dims[dim], extents_of(self.layout, leaf))}"
        elif scale is not None:
            name = f"{view.tensor}_stride_{scale.axes[dim].name}"
        else:
            name = f"{view.tensor}_stride_{'head' if dim else 'token'}"
        if scale is not None and name not in self.strides:
            known = stride_factors(self.layout, view, stream, dim) if buffer is not None else [1]
            divisible = all(factor % 16 == 0 for factor in known)
            last = buffer is None and dim == len(scale.axes) - 1
            one = 1 if last or smallest_stride(self.layout, buffer, dim) == 1 else None
            self.strides[name] = Arg(name, "i32", f"{view.tensor}.stride({dim})", "stride", divisible, one)
            return name
        if name in self.strides:
            return name if self.strides[name].value.endswith(")") else f"{name} * {self.unit_name}"
        factors = stride_factors(self.layout, view, stream, dim)
        divisible = all(factor % 16 == 0 for factor in factors)
        unit = self.stride_unit if all(factor % self.stride_unit == 0 for factor in factors) else 1
        if divisible and unit < widest_unit(self.plan):
            unit = 1  # the compiler knows more of it as it is
        value = f"{view.tensor}.stride({dim})" + (f" // {self.unit_name.lower()}" if unit > 1 else "")
        divisible = all(factor % (16 * unit) == 0 for factor in factors)
        one = 1 if smallest_stride(self.layout, buffer, dim) == unit else None
        self.strides[name] = Arg(name, "i32", value, "stride", divisible, one)
        return f"{name} * {self.unit_name}" if unit > 1 else name

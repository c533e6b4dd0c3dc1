"""Buffers and the places in them: orders to dimensions, offsets of records, and that every leaf is covered once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvgen.axes import Axis, Digit
from kvgen.coverage import coverage
from kvgen.diagnostics import Diagnostic, Span
from kvgen.layout import Buffer, Dim, Field, Holds, Leaf, Pad, Place, Record, leaves_of
from kvgen.names import AXES, KEYS
from kvgen.orders import Group, OrderError, Term, digits, parse_order
from kvgen.packing import Pack, PackingError, packed
from kvgen.source import Location, Source
from kvgen.spec import PadSpec, PlaceSpec
from kvgen.suggest import known_here, suggestion
from kvgen.values import LARGEST

_CONTIGUOUS = {"request": "block", "position": "slot"}
_PAGED = {"block": "request", "slot": "position"}
_KV = Axis("kv", 2)


@dataclass(frozen=True, slots=True)
class Known:
    """What places refer to. Broken streams and params were reported before: what uses them is passed over.

    ``coded`` are the leaves that are codes, scales or zeros, ``packs`` says how the codes of a leaf share bytes,
    ``arguments`` are the scales that are no leaves.
    """

    leaves: Mapping[str, Leaf]
    coded: frozenset[str]
    packs: Mapping[str, Pack]
    arguments: frozenset[str]
    broken: frozenset[str]
    layers: Axis
    params: Mapping[str, int]
    broken_params: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Use:
    """A digit that an order covers, and the term that says so."""

    digit: Digit
    term: Term
    span: Span


_Uses = tuple[_Use, ...]


class _Unresolved(Exception):
    """This place cannot be resolved; why was reported."""


@dataclass(slots=True)
class Places:
    """Resolves the buffers of one layout; ``problems`` collects what is wrong with them.

    ``stored`` says where each leaf lies, ``layered`` at which places it repeats over ``layer``, ``slot_alone`` whether
    a tensor dimension is ``slot`` alone, ``misnamed`` whether a place holds an unknown stream, and ``vocabulary`` where
    block and slot were first called request and position (True) and where not (False).
    """

    source: Source
    known: Known
    problems: list[Diagnostic] = field(default_factory=list)
    stored: dict[str, list[Location]] = field(default_factory=dict)
    layered: dict[tuple[str, Location], bool] = field(default_factory=dict)
    vocabulary: dict[bool, Span] = field(default_factory=dict)
    slot_alone: bool = False
    misnamed: bool = False

    def buffer(self, name: str, spec: PlaceSpec, of: str, half: int = 0) -> Buffer | None:
        """The tensor of that name, or None where something is wrong with it; ``half`` is that of the buffer ``of``."""
        location = ("buffers", of)
        self._check_regions(spec, location)
        for holds, place in _holders(spec, location):
            for index, leaf in enumerate(holds):
                self._check_leaf_name(leaf, (*place, "holds", half + index))
        try:
            place = self._place(spec, location, (), in_record=False)
        except _Unresolved:
            return None
        leaves = [self.known.leaves[leaf] for leaf in leaves_of(place)]
        unit, dtypes = leaves[0].itemsize, leaves[0].dtypes
        if any(set(leaf.dtypes) != set(dtypes) for leaf in leaves) or any(size % unit for size in _sizes(place)):
            unit, dtypes = 1, ("uint8",)
        elif dtypes[0].startswith("float8") and all(leaf.name in self.known.coded for leaf in leaves):
            dtypes = (*dtypes, "uint8")
        return Buffer(name, place, unit, dtypes)

    def _check_regions(self, spec: PlaceSpec, location: Location) -> None:
        """Regions belong to a buffer, and their axis to no order below."""
        for place, where in _places(spec, location):
            if place.regions and where != location:
                message = "`regions` belong to a buffer, not to a place inside it"
                self._report("KV408", message, self.source.at_key((*where, "regions")))
            for axis in ("layer", "kv"):
                if axis in spec.regions and orders_over(place, axis):
                    message = f"`{axis}` is in an order, and `regions` has an allocation for each"
                    self._report("KV408", message, self.source.at((*where, "order")), "leave it out of the order")

    def _report(self, code: str, message: str, span: Span, hint: str | None = None) -> None:
        self.problems.append(Diagnostic(code, message, span, hint))

    def _check_leaf_name(self, name: str, location: Location) -> None:
        stream = name.partition(".")[0]
        if name in self.known.leaves:
            self.stored.setdefault(name, []).append(location)
        elif stream in self.known.broken:
            return
        elif not self.known.leaves:  # no stream at all, which is said elsewhere
            self.misnamed = True
        elif name in self.known.arguments:
            hint = "in a buffer lie scales that vary over block and slot; leave it out here"
            message = f"`{name}` is static, an argument of the generated functions and nothing that is stored"
            self._report("KV407", message, self.source.at(location), hint)
        elif stream in self.known.leaves:
            stored = [leaf.name for leaf in self.known.leaves.values() if leaf.stream == stream]
            hint = known_here(stored) if len(stored) > 1 else "`.scale` and `.zero` belong to streams with `quant`"
            self._report("KV206", f"stream `{stream}` has no `{name}`", self.source.at(location), hint)
        else:
            self.misnamed = True
            hint = suggestion(name, [*self.known.leaves, *KEYS])
            self._report("KV206", f"unknown stream `{name}`", self.source.at(location), hint)

    def _place(self, spec: PlaceSpec, location: Location, above: _Uses, in_record: bool) -> Place:
        holders = [holds for holds, _ in _holders(spec, location)]
        if not holders:
            hint = "name a stream, or leave it out; padding inside a record is `{pad: n}`"
            self._report("KV403", "no stream is stored here", self.source.at_key(location), hint)
            raise _Unresolved
        if any(name not in self.known.leaves for holds in holders for name in holds):
            raise _Unresolved
        if spec.holds is not None:
            self._check_pair([self.known.leaves[name] for name in spec.holds], location)
        dims, uses = self._dims(spec, location, holders, in_record)
        if spec.holds is None:
            return Place(dims, self._record(spec, location, above + uses), spec.align)
        dims += self._leaf(spec, location, above + uses, in_record)
        if spec.holds[0] in self.known.packs:
            return self._packed(spec, location, dims, in_record)
        return Place(dims, Holds(spec.holds, self.known.leaves[spec.holds[0]].itemsize), spec.align)

    def _packed(self, spec: PlaceSpec, location: Location, dims: tuple[Dim, ...], in_record: bool) -> Place:
        """The place of codes that share bytes.

        Where these are several, the last dimension of a tensor counts bytes, as it does of a record: the place is
        ``fields`` of one.
        """
        share = self.known.packs[spec.holds[0]]
        try:
            dims, pack = packed(self.known.leaves[spec.holds[0]], dims, share)
            if share.itemsize > 1 and not in_record and dims[-1].size is None:
                raise PackingError(f"the last dimension counts bytes, {share.itemsize} of each {share.codes} codes")
        except PackingError as error:
            where = (*location, "order") if spec.order is not None else (*location, "holds")
            self._report("KV314", error.message, self.source.at(where), error.hint)
            raise _Unresolved from None
        held = Holds(spec.holds, share.itemsize, pack)
        if share.itemsize == 1 or in_record:
            return Place(dims, held, spec.align)
        inner = Place(dims[-1:], held, spec.align)
        return Place(dims[:-1], Record((Field(0, inner),), inner.size))

    def _record(self, spec: PlaceSpec, location: Location, above: _Uses) -> Record:
        fields, end, failed = [], 0, False
        for index, item in enumerate(spec.fields):
            where = (*location, "fields", index)
            if isinstance(item, PadSpec):
                if item.fill is not None:
                    self._check_fill(where, above)
                fields.append(Field(end, Pad(item.pad, item.fill)))
                end += item.pad
                continue
            try:
                place = self._place(item, where, above, in_record=True)
            except _Unresolved:
                failed = True  # and on to the next field, which may be wrong too
                continue
            offset = -(-end // place.align) * place.align
            fields.append(Field(offset, place))
            end = offset + place.size
        if failed:
            raise _Unresolved
        if end > LARGEST:
            self._report("KV406", f"a record of {end} bytes; the most is {LARGEST}", self.source.at_key(location))
            raise _Unresolved
        return Record(tuple(fields), end)

    def _check_fill(self, location: Location, above: _Uses) -> None:
        slots = Axis("slot", next(iter(self.known.leaves.values())).extent("slot"))
        used = [use.digit for use in above if use.digit.axis == "slot"]
        if coverage(slots, used).missing:
            hint = "leave `fill` out, or move the padding into a record that repeats over `slot`"
            message = "padding with a fill in a record of several tokens: which of them would write it?"
            self._report("KV404", message, self.source.at(location), hint)

    def _dims(
        self, spec: PlaceSpec, location: Location, holders: list[tuple[str, ...]], in_record: bool
    ) -> tuple[tuple[Dim, ...], _Uses]:
        """The dimensions of an order and what they use; raises _Unresolved after reporting every bad term."""
        dims: list[Dim] = []
        uses: list[_Use] = []
        before = len(self.problems)
        resolved = True
        for group, where in self._groups(spec, location):
            group_uses: list[_Use] = []
            for term in group.terms:
                found = self._digits(term, where, holders)
                resolved = resolved and found is not None
                span = self.source.inside(where, term.start, term.end)
                group_uses += [_Use(digit, term, span) for digit in found or ()]
            self._check_unknown_extents(group_uses, in_record)
            dims.append(Dim(tuple(use.digit for use in group_uses)))
            uses += group_uses
        if not resolved or len(self.problems) > before:
            raise _Unresolved
        return tuple(dims), tuple(uses)

    def _groups(self, spec: PlaceSpec, location: Location) -> Iterator[tuple[Group, Location]]:
        """The dimensions an order spells, and the text each stands in."""
        order = (*location, "order")
        is_list = isinstance(spec.order, tuple)
        for index, text in enumerate(spec.order if is_list else [spec.order or ""]):
            where = (*order, index) if is_list else order
            try:
                groups = parse_order(text)
            except OrderError as error:
                self._report_order(error, where)
                continue
            if is_list and len(groups) != 1:
                hint = "terms that share a dimension stand in parentheses: `(block slot)`"
                message = f"an item of a list is one dimension, not {len(groups)}"
                self._report("KV301", message, self.source.at(where), hint)
            yield from ((group, where) for group in groups)

    def _report_order(self, error: OrderError, where: Location) -> None:
        self._report(error.code, error.message, self.source.inside(where, error.start, error.end), error.hint)

    def _digits(self, term: Term, where: Location, holders: list[tuple[str, ...]]) -> tuple[Digit, ...] | None:
        """The digits of a term, the same for every leaf below; None where there are none, after reporting why."""
        if term.axis not in AXES:
            at = term.start, term.start + len(term.axis)
            self._report_order(
                OrderError("KV302", f"unknown axis `{term.axis}`", *at, suggestion(term.axis, AXES)), where
            )
            return None
        if any(operation.operand in self.known.broken_params for operation in term.operations):
            return None
        axis = _CONTIGUOUS.get(term.axis, term.axis)
        span = self.source.inside(where, term.start, term.end)
        if term.axis in _CONTIGUOUS or term.axis in _PAGED:
            self.vocabulary.setdefault(term.axis in _CONTIGUOUS, span)
        alone = next((holds[0] for holds in holders if len(holds) == 1), None)
        if axis == "kv" and alone is not None:
            hint = "`kv` belongs to `holds: [a, b]`; streams that differ are laid out with `fields`"
            self._report("KV307", f"`kv` above `{alone}`, which is one stream and no pair", span, hint)
            return None
        found: dict[tuple[Digit, ...], Leaf] = {}
        for leaf in {name: self.known.leaves[name] for holds in holders for name in holds}.values():
            axes = {a.name: a for a in (*leaf.axes, _KV, self.known.layers)}
            if {"block", "slot"} <= axes.keys():
                axes["token"] = axes["slot"]
            if axis not in axes:
                hint = f"place it outside, or name `{axis}` in its `per`" if leaf.name != leaf.stream else None
                hint = "codes narrower than a byte have their bits apart" if axis == "bit" else hint
                self._report("KV306", f"`{term.axis}` above `{leaf.name}`, which does not vary over it", span, hint)
                return None
            extents, step = {name: a.reach for name, a in axes.items()}, axes[axis].step
            try:
                result = digits(term, axis, extents, self.known.params)
            except OrderError as error:
                self._report_order(error, where)
                return None
            if result[-1].div % step:
                message = f"`{term}` above `{leaf.name}`, which varies over `{axis}//{step}` only"
                self._report("KV306", message, span)
                return None
            found.setdefault(result, leaf)
        if len(found) > 1:
            sizes = " and ".join(f"{leaf.extent(axis)} for `{leaf.name}`" for leaf in found.values())
            hint = "give each stream an order of its own"
            self._report("KV310", f"`{term}` differs: `{axis}` is {sizes}", span, hint)
            return None
        return next(iter(found))

    def _check_unknown_extents(self, uses: list[_Use], in_record: bool) -> None:
        """Extents only the launch knows are read from a tensor dimension, whole or as the slowest digit of it."""
        for index, use in enumerate(uses):
            axis, name = use.digit.axis, use.term.axis
            if use.digit.size is not None:
                continue
            if in_record:
                message = f"`{name}` inside a record: extents there must be constants"
                self._report("KV405", message, use.span, "move it to the order of the buffer")
            elif axis == "slot":
                self.slot_alone |= len(uses) == 1
                if len(uses) > 1 and not (index == 1 and uses[0].digit.axis == "block"):
                    message = "a dynamic `block_size` shares a dimension with `block` only, as `(block slot)`"
                    self._report("KV308", message, use.span)
            elif axis == "block" and index > 0:
                message = f"`{name}` must come first in its parentheses: how many there are is the pool's"
                self._report("KV308", message, use.span)
            elif axis != "block" and len(uses) > 1:
                message = f"a dynamic `{name}` is read from a dimension that is `{name}` alone"
                self._report("KV308", message, use.span, "take it out of the parentheses, or give it an extent")

    def _leaf(self, spec: PlaceSpec, location: Location, uses: _Uses, in_record: bool) -> tuple[Dim, ...]:
        """Check that the leaves of a place are covered once. Without an order, the dimension of what is left."""
        leaves = [self.known.leaves[name] for name in spec.holds]
        missing: list[Digit] = []
        layered = any(use.digit.axis == "layer" for use in uses)
        axes = [*leaves[0].axes, *([_KV] if len(leaves) == 2 else []), *([self.known.layers] if layered else [])]
        self.layered |= {(leaf.name, location): layered for leaf in leaves}
        clashes = False
        for axis in axes:
            used = [use for use in uses if use.digit.axis == axis.name]
            result = coverage(axis, [use.digit for use in used])
            clash = result.clash or _twice(used)
            if clash is not None:
                self._report_clash(clash, used, leaves[0].name)
                clashes = True
            elif axis.extent != axis.reach and (
                split := next((u for u in used if u.digit.size not in (1, axis.count)), None)
            ):
                message = f"the last group of `{axis.name}//{axis.step}` is short: its groups cannot be split further"
                self._report("KV303", message, split.span)
                clashes = True
            missing += result.missing
        if clashes:
            raise _Unresolved
        if not missing:
            return ()
        if spec.order is not None or len(missing) > 1:
            self._report_missing(spec, location, missing, axes)
            raise _Unresolved
        if in_record and missing[0].size is None:
            message = f"`{missing[0].axis}` inside a record: extents there must be constants"
            self._report("KV405", message, self.source.at(location))
            raise _Unresolved
        return (Dim((missing[0],)),)

    def _report_missing(self, spec: PlaceSpec, location: Location, missing: list[Digit], axes: list[Axis]) -> None:
        extents = {axis.name: axis.reach for axis in axes}
        terms = _listed([f"`{_spoken(d.term(extents[d.axis]), self.contiguous)}`" for d in missing])
        names = _listed([f"`{name}`" for name in spec.holds])
        if spec.order is None:
            message = f"the order of {names} must be written: {terms} are left for it"
            self._report("KV309", message, self.source.at((*location, "holds")))
        elif [digit.axis for digit in missing] == ["kv"]:
            message = f"{names} are a pair, and `kv` is in no order above them"
            self._report("KV307", message, self.source.at((*location, "order")), "say with `kv` where they take turns")
        else:
            message = f"{terms} of {names} {'is' if len(missing) == 1 else 'are'} not covered by the orders above"
            self._report("KV304", message, self.source.at((*location, "order")))

    @property
    def contiguous(self) -> bool:
        """Whether orders say ``request`` and ``position``."""
        return True in self.vocabulary

    def _check_pair(self, leaves: list[Leaf], location: Location) -> None:
        first, last = leaves[0], leaves[-1]
        if len(leaves) == 1:
            return
        span = self.source.at((*location, "holds"))
        hint = "lay streams that differ out with `fields`"
        if first.axes != last.axes:
            self._report("KV307", f"`{first.name}` and `{last.name}` are no pair: their axes differ", span, hint)
        elif set(first.dtypes) != set(last.dtypes):
            self._report("KV307", f"`{first.name}` and `{last.name}` are no pair: their dtypes differ", span, hint)
        elif first.name == last.name:
            self._report("KV307", f"`{first.name}` twice is no pair", span, hint)
        else:
            return
        raise _Unresolved

    def _report_clash(self, clash: tuple[Digit, Digit], used: list[_Use], leaf: str) -> None:
        first = next(use for use in used if use.digit == clash[0])
        second = [use for use in used if use.digit == clash[1]][-1]
        if used.index(second) < used.index(first):
            first, second = second, first
        if first.digit == second.digit:
            message = f"`{second.term}` of `{leaf}` is covered twice"
        else:
            message = f"`{first.term}` and `{second.term}` of `{leaf}` overlap"
        where = f"the other is on line {first.span.line}, column {first.span.column}"
        self._report("KV305", message, second.span, where)


def _twice(used: list[_Use]) -> tuple[Digit, Digit] | None:
    """Two unsplit terms of one axis: told apart by no extent, yet a mistake even where the extent is one."""
    whole = [use.digit for use in used if not use.term.operations]
    return (whole[0], whole[1]) if len(whole) > 1 else None


def bits_apart(buffers: Iterable[PlaceSpec]) -> frozenset[str]:
    """The streams whose codes have their bits apart: those with ``bit`` in an order above them."""
    return frozenset(
        leaf
        for buffer in buffers
        for place, _ in _places(buffer, ())
        if orders_over(place, "bit")
        for holds, _ in _holders(place, ())
        for leaf in holds
    )


def _holders(spec: PlaceSpec, location: Location) -> Iterator[tuple[tuple[str, ...], Location]]:
    """What each leaf place at or under a place holds, and where that place stands."""
    if spec.holds is not None:
        yield spec.holds, location
    for index, item in enumerate(spec.fields or ()):
        if isinstance(item, PlaceSpec):
            yield from _holders(item, (*location, "fields", index))


def _places(spec: PlaceSpec, location: Location) -> Iterator[tuple[PlaceSpec, Location]]:
    """A place and those inside it, and where each stands."""
    yield spec, location
    for index, item in enumerate(spec.fields or ()):
        if isinstance(item, PlaceSpec):
            yield from _places(item, (*location, "fields", index))


def orders_over(spec: PlaceSpec, axis: str) -> bool:
    """Whether the order of a place names an axis."""
    return any(re.search(rf"\b{axis}\b", text) for text in _texts(spec))


def _texts(spec: PlaceSpec) -> tuple[str, ...]:
    return spec.order if isinstance(spec.order, tuple) else (spec.order or "",)


def _sizes(place: Place) -> Iterator[int]:
    """Every offset, pitch and padding of a place, in bytes."""
    yield place.pitch
    if isinstance(place.content, Record):
        for entry in place.content.fields:
            yield entry.offset
            if isinstance(entry.content, Pad):
                yield entry.content.size
            else:
                yield from _sizes(entry.content)


def _spoken(term: str, contiguous: bool) -> str:
    """A term in the words of the layout."""
    if contiguous:
        for paged, other in _PAGED.items():
            term = term.replace(paged, other)
    return term


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]

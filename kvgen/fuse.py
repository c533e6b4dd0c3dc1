"""What ``fuse`` of a layout file means: the stages of its streams, checked against what the streams are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvgen.axes import Axis
from kvgen.diagnostics import Diagnostic
from kvgen.encodings import stream_refusal
from kvgen.fuse_spec import KEYS, FuseSpec, RmsNormSpec, RopeSpec, StageSpec
from kvgen.layout import Stream
from kvgen.source import Location, Source
from kvgen.stages import Fuse, Mrope, RmsNorm, Rope, Step
from kvgen.suggest import suggestion

SOURCES = ("float32", "float16", "bfloat16")
"""The types that stages work on."""

MAX_DIM = 8192
"""Values of a row, at most, that one program can sum up."""

QUERY = "query"


@dataclass(slots=True)
class Fusing:
    """Resolves ``fuse``; ``problems`` collects what is wrong with it.

    ``streams`` are those that are right; ``known`` names all of the file.
    """

    source: Source
    spec: FuseSpec
    streams: Mapping[str, Stream]
    known: tuple[str, ...]
    problems: list[Diagnostic] = field(default_factory=list)

    def resolve(self) -> tuple[Fuse, Stream | None]:
        """The fused append and the query it works on; what they are says nothing where there are problems."""
        spec = self.spec
        for name in self.known:
            if name in KEYS:
                message = f"the stream name `{name}` is taken: it is a key of `fuse`"
                self._report("KV205", message, ("streams", name), key=True)
        steps = {name: tuple(self._steps(name, stages, ("fuse", name))) for name, stages in spec.stages.items()}
        query, like = self._query(steps)
        order = (*self.streams, QUERY)
        kept = tuple((name, steps[name]) for name in order if steps.get(name))
        if not kept and not self.problems and self._whole():
            hint = "give a stream stages: `key: [rms_norm, rope]`"
            self._report("KV222", "`fuse` has no stages: there is nothing to fuse", ("fuse",), hint, key=True)
        if not self.problems:
            self._tables(kept)
        fuse = Fuse(
            packed=self._packed(query),
            steps=kept,
            query_like=like,
            mrope=self._mrope(kept),
            rounding=spec.rounding,
            norm_sum=spec.norm.sum,
        )
        if (
            spec.norm.sum != "float64"
            and self._whole()
            and not any(isinstance(s, RmsNorm) for _, found in kept for s in found)
        ):
            self._report("KV222", "`norm` means nothing here: no stage is a norm", ("fuse", "norm"), key=True)
        return fuse, query

    def _whole(self) -> bool:
        """Whether all streams that have stages are right: of others nothing is said that may come of what is wrong."""
        return all(name in self.streams for name in self.spec.stages if name in self.known)

    def _report(
        self, code: str, message: str, location: Location, hint: str | None = None, *, key: bool = False
    ) -> None:
        span = self.source.at_key(location) if key else self.source.at(location)
        self.problems.append(Diagnostic(code, message, span, hint))

    def _steps(self, name: str, stages: list[StageSpec], where: Location) -> Iterator[Step]:
        """The stages of a stream, each checked."""
        if name not in self.streams:
            if name not in self.known:
                hint = suggestion(name, [*self.known, *KEYS])
                self._report("KV206", f"unknown stream `{name}`", where, hint, key=True)
            return
        stream = self.streams[name]
        yield from self._checked(stream, stages, where)

    def _checked(self, stream: Stream, stages: list[StageSpec], where: Location) -> Iterator[Step]:
        dim, name = stream.axes[-1], stream.name
        if dim.extent is None:
            message = f"stages of `{name}` need a constant `dim`: pairs and means are made of it"
            self._report("KV221", message, where, "give the extent of `dim` a number", key=True)
            return
        if others := [dtype for dtype in stream.dtypes if dtype not in SOURCES]:
            message = f"`{others[0]}` values have no stages: sources are float32, float16 or bfloat16"
            self._report("KV221", message, where, key=True)
        if reason := stream_refusal(stream):
            self._report("KV221", f"`{name}` has stages and cannot be appended: {reason}", where, key=True)
        seen: set[str] = set()
        for index, stage in enumerate(stages):
            word = "rope" if stage.rms_norm is None else "rms_norm"
            if word in seen:
                self._report("KV221", f"`{word}` happens twice to `{name}`", (*where, index), "keep one of the two")
            seen.add(word)
            at = (*where, index, word)
            yield self._norm(stream, stage.rms_norm, at) if stage.rms_norm else self._rope(stream, stage.rope, at)

    def _norm(self, stream: Stream, spec: RmsNormSpec, where: Location) -> RmsNorm:
        if stream.axes[-1].extent > MAX_DIM:
            message = f"a norm over {stream.axes[-1].extent} values: one program sums up {MAX_DIM} at the most"
            self._report("KV221", message, where)
        return RmsNorm(spec.eps, spec.weight)

    def _rope(self, stream: Stream, spec: RopeSpec, where: Location) -> Rope:
        dim = stream.axes[-1].extent
        turned = dim if spec.rotary_dim is None else spec.rotary_dim
        at = where if spec.rotary_dim is None else (*where, "rotary_dim")
        if turned % 2:
            self._report("KV220", f"a rotary_dim of {turned}: values are turned in pairs", at, "an even number")
        if turned > dim:
            message = f"a rotary_dim of {turned}, and `{stream.name}` has {dim} values a row"
            self._report("KV220", message, at, f"at most {dim}")
        start = dim - turned if spec.rotary == "last" else 0
        if isinstance(spec.cos_sin, str):
            return Rope(spec.style, turned, start, spec.cos_sin)
        return Rope(spec.style, turned, start, "theta", spec.cos_sin.theta)

    def _query(self, steps: dict[str, tuple[Step, ...]]) -> tuple[Stream | None, str | None]:
        """The query as a stream of its own, and the one it is like; its stages join ``steps``."""
        spec, where = self.spec.query, ("fuse", "query")
        if spec is None or not self.streams:
            return None, None
        like = spec.stages if isinstance(spec.stages, str) else None
        if like is not None and like not in self.streams:
            if like not in self.known:
                self._report("KV206", f"unknown stream `{like}`", (*where, "stages"), suggestion(like, self.known))
            return None, None
        model = self.streams[like] if like else next(iter(self.streams.values()))
        query = Stream(QUERY, (Axis("head", spec.heads), model.axes[-1]), model.dtypes, model.itemsize)
        if like is not None:
            steps[QUERY] = steps.get(like, ())
            if not steps[QUERY] and not self.problems:
                message = f"the query is to go through the stages of `{like}`, which has none"
                self._report("KV222", message, (*where, "stages"))
        elif spec.stages is not None:
            steps[QUERY] = tuple(self._checked(query, spec.stages, (*where, "stages")))
        elif self.spec.input == "separate":
            hint = "`stages: key`; heads alone say how wide a packed tensor is"
            self._report("KV222", "a query without stages: nothing happens to it", where, hint, key=True)
        return query, like

    def _packed(self, query: Stream | None) -> bool:
        """Whether all comes in one tensor, whose columns must be known then."""
        where = ("fuse", "input")
        if self.spec.input == "separate":
            return False
        if self.spec.query is None:
            hint = "`query: {heads: 64}`, with `stages` if the query is worked on too"
            self._report("KV222", "`packed_qkv` begins with the query: how many heads has it?", where, hint)
            return True
        for stream in (*self.streams.values(), *([query] if query else [])):
            if len(stream.axes) == 1 or any(axis.extent is None for axis in stream.axes):
                message = f"`packed_qkv` has a constant number of heads and values of each, and `{stream.name}` has not"
                self._report("KV222", message, where, "`input: separate`")
                break
        if len({stream.dtypes for stream in self.streams.values()}) > 1:
            message = "`packed_qkv` is one tensor of one type, and the streams differ in their dtypes"
            self._report("KV222", message, where, "`input: separate`")
        return True

    def _tables(self, steps: tuple[tuple[str, tuple[Step, ...]], ...]) -> None:
        """One table serves all streams that take angles from one."""
        first: Rope | None = None
        for name, found in steps:
            for rope in (step for step in found if isinstance(step, Rope) and step.theta is None):
                first = first or rope
                if (rope.cos_sin, rope.rotary_dim) != (first.cos_sin, first.rotary_dim):
                    message = f"`{name}` takes its angles from another table than the streams before: there is one"
                    where = ("fuse", "query", "stages") if name == QUERY else ("fuse", name)
                    self._report("KV222", message, where, "one `cos_sin` and one `rotary_dim` for all", key=True)

    def _mrope(self, steps: tuple[tuple[str, tuple[Step, ...]], ...]) -> Mrope | None:
        spec = self.spec.positions
        if spec is None:
            return None
        where = ("fuse", "positions", "mrope")
        ropes = [step for _, found in steps for step in found if isinstance(step, Rope)]
        if not ropes and not self.problems and self._whole():
            message = "`positions` mean nothing here: no stage is a rotary embedding"
            self._report("KV222", message, ("fuse", "positions"), key=True)
        for rope in ropes:
            if sum(spec.mrope) != rope.pairs:
                message = f"sections of {sum(spec.mrope)} pairs in all, and {rope.rotary_dim} values make {rope.pairs}"
                self._report("KV220", message, where)
                break
        return Mrope(spec.mrope, spec.assign)

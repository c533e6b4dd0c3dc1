"""A module under test that is made of the reference: what a generated module answers, without its kernels.

It lets the harness be tried on planted faults of every kind before and beside any generated text.
"""

from __future__ import annotations

from typing import Any

import torch

from kvgen import reference, reference_pages
from kvgen.harness.values import scale_arguments
from kvgen.layout import Layout, leaves_of


class FakeModule:
    """The documented functions of a layout, with the documented refusals; subclasses break one thing each."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.streams = [s.name for s in layout.streams]
        self.buffers = [b.name for b in layout.buffers]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("append_") and name.removeprefix("append_") in self.streams:
            stream = name.removeprefix("append_")
            return lambda *args, **options: self._append([stream], *args, **options)
        raise AttributeError(name)

    def _take(self, args: tuple, names: list[str]) -> tuple[dict[str, Any], list[Any]]:
        return dict(zip(names, args, strict=False)), list(args[len(names) :])

    def _append(self, streams: list[str], *args: Any, **options: Any) -> None:
        sources, rest = self._take(args, streams)
        names = [b for b in self.buffers if set(self._held(b)) & set(streams)]
        buffers, rest = self._take(tuple(rest), names)
        slots, *rest = rest
        self.write(sources, buffers, slots, **self._tables(streams, rest, options))

    def _held(self, buffer: str) -> tuple[str, ...]:
        """The streams that have something in a buffer."""
        return tuple(self.layout.leaf(leaf).stream for leaf in leaves_of(self.layout.buffer(buffer).place))

    def _tables(self, streams: list[str], rest: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        """Options of the reference: the remap table and the static scales that stand behind the slots, or are named."""
        used = [scale for s in self.layout.streams if s.name in streams for scale in scale_arguments(s)]
        names = list(dict.fromkeys(scale.argument for scale in used))
        remap = [rest.pop(0)] if self.layout.slots.remap else [None]
        scales = dict(zip(names, rest, strict=False))
        given = {name: value for name, value in options.items() if name.endswith("_scale")}
        if surplus := [*rest[len(names) :], *(given.keys() - names), *(given.keys() & scales.keys())]:
            raise TypeError(f"unexpected {surplus}")
        scales |= given
        for name in names:
            shape = self._scale_shape(name)
            scale = scales.get(name)
            if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or scale.shape != shape:
                raise TypeError(f"{name}: expected float32 {tuple(shape)}, got {scale}")
            if scale.device.type == "meta":
                raise ValueError(f"{name}: on the wrong device")
        others = {name: value for name, value in options.items() if name not in given}
        return others | {"remap": remap[0], "scales": scales}

    def _scale_shape(self, argument: str) -> tuple[int, ...]:
        scales = [scale for stream in self.layout.streams for scale in scale_arguments(stream)]
        scale = next(s for s in scales if s.argument == argument)
        return tuple(-(-axis.extent // axis.step) for axis in scale.axes) or (1,)

    def write(self, sources, buffers, slots, **options: Any) -> None:
        sources = {s: self._flat(s, x) for s, x in sources.items()}
        reference.append(self.layout, sources, buffers, slots, **options)

    def _flat(self, stream: str, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) if len(self.layout.stream(stream).axes) == 1 else x

    def append(self, *args: Any, **options: Any) -> None:
        self._append(self.streams, *args, **options)

    def append_positions(self, *args: Any, **options: Any) -> None:
        sources, rest = self._take(args, self.streams)
        buffers, rest = self._take(tuple(rest), self.buffers)
        table, positions, *rest = rest
        options = self._tables(self.streams, rest, options)
        reference.append_positions(self.layout, sources, buffers, table, positions, **options)

    def _packed(self, rows: dict[str, torch.Tensor]) -> Any:
        values = tuple(rows.values())
        return values[0] if len(values) == 1 else values

    def _outputs(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("out") is not None:
            out = options["out"] if isinstance(options["out"], tuple) else (options["out"],)
            options["out"] = dict(zip(self.streams, out, strict=True))
        return options

    def gather(self, *args: Any, **options: Any) -> Any:
        buffers, rest = self._take(args, self.buffers)
        slots, *rest = rest
        options = self._outputs(self._tables(self.streams, rest, options))
        return self._packed(reference.gather(self.layout, buffers, slots, **options))

    def gather_codes(self, *args: Any, **options: Any) -> Any:
        buffers, rest = self._take(args, self.buffers)
        slots, *remap = rest
        if options.get("out") is not None:
            out = options["out"] if isinstance(options["out"], tuple) else (options["out"],)
            options["out"] = dict(zip([leaf.name for leaf in self.layout.leaves], out, strict=True))
        table = remap[0] if remap else None
        return self._packed(reference.gather_codes(self.layout, buffers, slots, remap=table, **options))

    def gather_codes_paged(self, *args: Any, **options: Any) -> Any:
        buffers, rest = self._take(args, self.buffers)
        table, lengths, bounds, *remap = rest
        if options.get("out") is not None:
            out = options["out"] if isinstance(options["out"], tuple) else (options["out"],)
            options["out"] = dict(zip([leaf.name for leaf in self.layout.leaves], out, strict=True))
        options["remap"] = remap[0] if remap else None
        return self._packed(reference.gather_codes_paged(self.layout, buffers, table, lengths, bounds, **options))

    def gather_paged(self, *args: Any, **options: Any) -> Any:
        buffers, rest = self._take(args, self.buffers)
        table, lengths, bounds, *rest = rest
        options = self._outputs(self._tables(self.streams, rest, options))
        return self._packed(reference.gather_paged(self.layout, buffers, table, lengths, bounds, **options))

    def concat_mla_key(self, *args: Any, **options: Any) -> torch.Tensor:
        return reference.concat_mla_key(*args, **options)

    def slot_mapping(self, *args: Any, **options: Any) -> torch.Tensor:
        return reference.slot_mapping(self.layout, *args, **options)

    def fill_slots(self, *args: Any, **options: Any) -> torch.Tensor:
        return reference.fill_slots(self.layout, *args, **options)

    def copy_blocks(self, *args: Any) -> None:
        buffers, (pairs,) = self._take(args, self.buffers)
        reference_pages.copy_blocks(self.layout, buffers, pairs)

    def zero_blocks(self, *args: Any) -> None:
        buffers, (blocks,) = self._take(args, self.buffers)
        reference_pages.zero_blocks(self.layout, buffers, blocks)

    def gather_page_table(self, *args: Any, **options: Any) -> torch.Tensor:
        return reference_pages.gather_page_table(self.layout, *args, **options)

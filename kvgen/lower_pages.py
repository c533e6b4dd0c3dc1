"""Layout to the plans of functions on whole pages: which bytes of each buffer belong to a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvgen.layout import Buffer, Layout, Pad
from kvgen.lower import sites
from kvgen.plan import PagePlan, Stretch


def page_plans(layout: Layout) -> tuple[PagePlan, ...]:
    """The functions on whole pages, in the order a module prints them."""
    found = tuple(stretch for buffer in layout.buffers for stretch in stretches(layout, buffer))
    return PagePlan("copy_blocks", "copy", found), PagePlan("zero_blocks", "zero", found)


def stretches(layout: Layout, buffer: Buffer) -> tuple[Stretch, ...]:
    """Every byte of a buffer that belongs to a block, in as few stretches as its constant strides allow.

    Codes, scales, zeros and filled padding of all layers; padding that is never written is none of it.
    """
    found = [
        Stretch(buffer.name, buffer.unit, site.offset, _size(site.content), site.steps)
        for site in sites(layout, buffer)
        if not (isinstance(site.content, Pad) and site.content.fill is None)
    ]
    joined = _joined(map(_folded, found))
    while joined != found:
        found, joined = joined, _joined(map(_folded, joined))
    return tuple(found)


def _size(content) -> int:
    return content.size if isinstance(content, Pad) else content.itemsize


def _folded(stretch: Stretch) -> Stretch:
    """The stretch with what it repeats over without a gap taken into it."""
    *rest, last = stretch.steps
    if last.dim is not None or last.digit.size is None or last.factor != stretch.nbytes:
        return stretch
    return _folded(replace(stretch, nbytes=stretch.nbytes * last.digit.size, steps=tuple(rest)))


def _joined(found: Iterable[Stretch]) -> list[Stretch]:
    """Neighbours that repeat alike, one right behind the other, as one."""
    result: list[Stretch] = []
    for stretch in found:
        last = result[-1] if result else None
        if last and last.steps == stretch.steps and last.offset + last.nbytes == stretch.offset:
            result[-1] = replace(last, nbytes=last.nbytes + stretch.nbytes)
        else:
            result.append(stretch)
    return result

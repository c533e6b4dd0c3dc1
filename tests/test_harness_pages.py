"""Functions on whole pages: faults that the harness must report, and what a page is made of."""

from __future__ import annotations

import pytest
import torch

from kvgen import harness, reference_pages, runtime, views
from kvgen.emit import pages, render_layout
from kvgen.lower_pages import page_plans, stretches
from kvgen.resolve import load_text
from tests.fake_module import FakeModule
from tests.generated import module_of, shipped

LAYERED = """
name: layered
axes: {head: 2, dim: 6, layer: 3}
block_size: 5
streams:
  key: {quant: {mode: int8, scale: {per: token head}}}
  value: {dtype: bfloat16}
buffers:
  key_cache: {holds: key, order: layer block slot head dim}
  rest:
    order: block layer slot
    fields: [{order: head, fields: [key.scale]}, {pad: 3}, {value: head dim}, {pad: 2, fill: 9}]
"""


@pytest.fixture(scope="module")
def layered():
    return load_text(LAYERED)


class Broken(FakeModule):
    """Copies what a wrong module would: ``pages`` are the places it knows of, ``shift`` moves what is overwritten."""

    shift = 0

    def known(self, places):
        return places

    def pages(self, buffers):
        return self.known(reference_pages.page_views(self.layout, buffers))

    def copy_blocks(self, *args):
        buffers, (pairs,) = self._take(args, self.buffers)
        for view in self.pages(buffers):
            count = 5
            for source, target in pairs.tolist():
                if 0 <= source < count and 0 <= target < count:
                    page = view.select("block", source).tensor.clone()
                    view.select("block", (target + self.shift) % count).tensor.copy_(page)

    def zero_blocks(self, *args):
        buffers, (blocks,) = self._take(args, self.buffers)
        for view in self.pages(buffers):
            for block in blocks.tolist():
                if 0 <= block < 5:
                    view.select("block", (block + self.shift) % 5).tensor.zero_()


class LeavesScales(Broken):
    def pages(self, buffers):
        kept = views.leaf_places(self.layout, buffers)
        return [view for leaf, places in kept.items() if "." not in leaf for view in places]


class NextBlock(Broken):
    shift = 1


class FirstLayerOnly(Broken):
    def known(self, places):
        return [view.select("layer", 0) for view in places]


class NoTail(Broken):
    def known(self, places):
        return [views.ByteView(view.tensor[..., :-1], view.digits, view.pack) for view in places]


class NoFilledPadding(Broken):
    def pages(self, buffers):
        return [view for places in views.leaf_places(self.layout, buffers).values() for view in places]


class NeverWritten(Broken):
    """Takes padding along that is never written."""

    def pages(self, buffers):
        every = [view for _, _, view in views.pad_views(self.layout, buffers)]
        return [*reference_pages.page_views(self.layout, buffers), *every]


def test_a_right_module_passes(layered) -> None:
    for module in (FakeModule(layered), Broken(layered)):
        names = [c.name for c in harness.cases(layered) if c.function in ("copy_blocks", "zero_blocks")]
        report = harness.run(layered, module, only=[name for name in names if "refuses" not in name])
        assert report.ok, str(report)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (LeavesScales, "key.scale"),
        (NextBlock, "block"),
        (FirstLayerOnly, "layer 1"),
        (NoTail, "byte"),
        (NoFilledPadding, "padding inside the record (filled with 9)"),
        (NeverWritten, "padding inside the record (never written)"),
    ],
)
@pytest.mark.parametrize("case", ["copy_blocks/n2", "copy_blocks/padded", "zero_blocks/n2"])
def test_faults_are_reported(layered, fault: type[Broken], words: str, case: str) -> None:
    (result,) = harness.run(layered, fault(layered), only=case).results
    assert result.outcome == "failed"
    assert words in result.message
    assert "raised" not in result.message


def test_dropped_scales_show_in_what_is_gathered(layered) -> None:
    class SaysNothing(LeavesScales):
        """The comparison of bytes aside: what a user would see."""

    (result,) = harness.run(layered, SaysNothing(layered), only="copy_blocks/then_gather").results
    assert result.outcome == "failed"


def test_a_record_without_gaps_is_one_stretch() -> None:
    (found,) = stretches(shipped("mla_fp8_record"), shipped("mla_fp8_record").buffer("cache"))
    assert (found.offset, found.nbytes) == (0, 656)
    assert [(s.digit.axis, s.dim) for s in found.steps] == [("block", 0), ("slot", 1)]
    (page,) = stretches(shipped("indexer_planar"), shipped("indexer_planar").buffer("index_cache"))
    assert (page.nbytes, len(page.steps)) == (64 * 128 + 64 * 4, 1)


def test_padding_that_is_never_written_parts_stretches(layered) -> None:
    found = stretches(layered, layered.buffer("rest"))
    assert [(s.offset, s.nbytes) for s in found] == [(0, 8), (11, 24 + 2)]
    (codes,) = stretches(layered, layered.buffer("key_cache"))
    assert [s.digit.axis for s in codes.steps] == ["layer", "block", "slot", "head"]


@pytest.mark.parametrize("name", ["paged_nhd", "paged_x_vector", "mla_fp8_record", "cross_layer_hnd", "nhd_int8_block"])
def test_kernels_are_compiled_for_what_launchers_work_out(name: str) -> None:
    """The numbers of dense tensors, by the module's own function and by that which compiles it."""
    layout = shipped(name)
    module = module_of(layout)
    open_sizes = {"num_layers": pages.DYNAMIC_EXTENT} if layout.layers and layout.layers.extent is None else {}
    made = module.allocate(pages.DYNAMIC_EXTENT, device="meta", **open_sizes)
    buffers = dict(zip((b.name for b in layout.buffers), made if isinstance(made, tuple) else (made,), strict=True))
    plan = page_plans(layout)[0]
    for part, stretch in zip(pages.build_parts(layout, plan), plan.stretches, strict=True):
        scope = vars(module) | buffers | open_sizes
        assert list(eval(f"_page({part.describe})", scope)) == pages.compact_numbers(layout, stretch)


def test_a_dense_page_is_moved_in_16_bytes() -> None:
    (stretch, _) = page_plans(shipped("paged_nhd"))[0].stretches
    programs, block, run, rows, *_, width, tile_rows, columns = pages.compact_numbers(shipped("paged_nhd"), stretch)
    assert (width, run, rows, block) == (16, 2048, 1, 2048)
    assert (programs, tile_rows, columns) == (8, 1, 256)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("  cache: {holds: [key, value], order: slot head dim kv block}", 4),
        ("  cache: {holds: [key, value], order: kv (block slot) head dim//2 dim%2}", 2),
        ("  cache: {order: block, align: 32, fields: [{key: head slot dim}, {pad: 5}, {value: slot dim head}]}", 3),
    ],
)
def test_any_order(text: str, values: int) -> None:
    """Blocks that are fastest, that share a dimension, and records with holes: the whole harness of pages."""
    layout = load_text(f"name: x\naxes: {{head: 3, dim: {2 * values}}}\nblock_size: 5\nbuffers:\n{text}\n")
    module = runtime.import_module("x", render_layout(layout))
    report = harness.run(layout, module, only=["copy_blocks", "zero_blocks"])
    assert report.ok, str(report)


def test_sizes_that_the_launch_knows() -> None:
    layout = load_text(
        "name: x\naxes: {head: dynamic, dim: dynamic, layer: dynamic}\nblock_size: dynamic\nbuffers:\n"
        "  a: {holds: key, order: layer (block slot) head dim}\n  b: {holds: value, order: block layer slot head dim}\n"
    )
    module = runtime.import_module("x", render_layout(layout))
    report = harness.run(layout, module, only=["copy_blocks", "zero_blocks", "gather_page_table"])
    assert report.ok, str(report)


def test_n0_launches_nothing(monkeypatch) -> None:
    module = module_of(shipped("paged_nhd"))
    monkeypatch.setattr(module, "_copy_blocks_kernel", None)
    buffers = module.allocate(2)
    module.copy_blocks(*buffers, torch.empty(0, 2, dtype=torch.int64))

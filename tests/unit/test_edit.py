"""One section of a layout file is changed, and nothing else of its text."""

import re
from pathlib import Path

import pytest

from kvgen.diagnostics import KvgenError
from kvgen.edit import schedule_lines, with_schedule
from kvgen.layout import FewHints, KernelHints
from kvgen.resolve import load_text

LAYOUTS = sorted((Path(__file__).resolve().parents[2] / "layouts").glob("*.yaml"))
HEAD = "# what this is\nname: x  # a name\nblock_size: 4\naxes: {head: 2, dim: 8}\n"
ORDER = "order: block slot head dim}\n"
TAIL = f"buffers: # two\n  k: {{holds: key, {ORDER}  # the other\n  v: {{holds: value, {ORDER}"
FLOW = "{name: x, block_size: 4, axes: {head: 2, dim: 8}, buffers: {k: {holds: key, order: block slot head dim}, "
APPEND = {"append": KernelHints(4, "all", 2, FewHints(256, 1))}
BOTH = {"append": KernelHints(1, 2), "gather": KernelHints(num_warps=8)}
SECTION = (
    "# kvgen tune: a GPU, torch 1\nschedule:\n"
    "  append: {tokens: 4, heads: all, num_warps: 2, few: {up_to: 256, tokens: 1}}\n"
)


def edited(text, hints=APPEND):
    return with_schedule(text, "x.yaml", hints, "a GPU, torch 1")


def test_a_section_is_put_at_the_end():
    assert edited(HEAD + TAIL) == HEAD + TAIL + SECTION
    assert edited((HEAD + TAIL).removesuffix("\n")) == HEAD + TAIL + SECTION
    assert edited(HEAD + "\n" + TAIL) == HEAD + "\n" + TAIL + "\n" + SECTION


@pytest.mark.parametrize(
    "old",
    [
        "schedule: {append: {tokens: 2}}\n",
        "schedule:\n  append: {tokens: 2}\n  gather:\n    heads: 1\n",
        '"schedule":\n  append: {\n    tokens: 2}\n',
        "schedule: {append: {tokens: 2}\n}\n",
        SECTION,
        SECTION.replace("torch 1", "torch 0").replace("256", "64"),
    ],
)
def test_a_section_is_replaced_where_it_stands(old):
    assert edited(HEAD + old + TAIL) == HEAD + SECTION + TAIL
    assert edited(HEAD + old + "\n# after\n" + TAIL) == HEAD + SECTION + "\n# after\n" + TAIL
    assert edited(HEAD + TAIL + old) == HEAD + TAIL + SECTION
    assert edited(HEAD + old + TAIL, {}) == HEAD + TAIL


def test_comments_inside_it_are_kept():
    old = "# above\nschedule:  # by hand\n  # slow otherwise\n  append: {tokens: 2}\n"
    assert edited(HEAD + old + TAIL) == HEAD + "# above\n# by hand\n# slow otherwise\n" + SECTION + TAIL


def test_both_kinds():
    assert schedule_lines(BOTH, "r")[2:] == ["  append: {tokens: 1, heads: 2}", "  gather: {num_warps: 8}"]
    found = load_text(edited(HEAD + TAIL, BOTH)).schedule
    assert (found.append, found.gather) == (BOTH["append"], BOTH["gather"])


def test_line_ends_and_the_mark_of_a_coding_stay():
    text = "\ufeff" + (HEAD + TAIL).replace("\n", "\r\n")
    assert edited(text) == text + SECTION.replace("\n", "\r\n")


@pytest.mark.parametrize(
    "text",
    [
        FLOW + "v: {holds: value, order: block slot head dim}}}\n",
        "\n".join("  " + line for line in (HEAD + TAIL).splitlines()) + "\n",
        HEAD + TAIL + "...\n",
    ],
)
def test_a_text_that_is_written_otherwise_is_left_alone(text):
    load_text(text)
    with pytest.raises(KvgenError) as caught:
        edited(text)
    (found,) = caught.value.diagnostics
    assert found.code == "KV746"
    assert found.hint.endswith("schedule: append: {tokens: 4, heads: all, num_warps: 2, few: {up_to: 256, tokens: 1}}")


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_shipped_layouts_keep_their_text(path):
    old = path.read_text()
    new = edited(old)
    assert load_text(new).schedule.append == APPEND["append"]
    assert new == re.sub(r"(?ms)^(?:# kvgen tune.*?^)?schedule:\n(?:  .*\n)+", "", old).rstrip("\n") + "\n" + SECTION
    assert edited(new) == new

"""Write docs/gallery.md and its pictures from the shipped layouts, docs/errors.md from the catalogue of diagnostics.

    python tools/make_docs.py           writes them
    python tools/make_docs.py --check   writes nothing; exits 1 and names what is out of date

Neither torch nor triton is needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvgen import show  # noqa: E402
from kvgen.catalog import Entry  # noqa: E402
from kvgen.cli import main as main_command  # noqa: E402
from kvgen.cli.codes import ENTRIES, ENVIRONMENT  # noqa: E402
from kvgen.diagnostics import KvgenError, render_text  # noqa: E402
from kvgen.documents import load as load_transfer  # noqa: E402
from kvgen.figure import figure, transfer_figure  # noqa: E402
from kvgen.layout import Layout, Record, leaves_of  # noqa: E402
from kvgen.resolve import load, load_text  # noqa: E402
from kvgen.transfer import Transfer  # noqa: E402

DOCS = ROOT / "docs"
LAYOUTS = ROOT / "layouts"

FOUND = {
    "aiter_shuffle": "AITER's paged attention, and vLLM on ROCm with its shuffled cache.",
    "aiter_shuffle_fp8": "AITER's paged attention over codes with a scale for each token and head.",
    "block_v1": "Engines that keep the two halves of a block next to each other, each of them head by head.",
    "context_parallel_nhd": "Ring and decode context parallel, a sequence's tokens dealt out over four ranks.",
    "contiguous_hnd": "Plain PyTorch serving; the static cache of Hugging Face transformers.",
    "contiguous_nhd": "Plain PyTorch serving that writes all heads of a token at once.",
    "cross_layer_hnd": "Engines that move one block of all layers at a time, between GPUs or to the host.",
    "cross_layer_nhd": "Engines that move one block of all layers at a time, between GPUs or to the host.",
    "cross_layer_nvfp4": "TensorRT-LLM's pool of blocks and pool of block scales.",
    "flat_mla_fp8_cast": "SGLang's MLA pool where the cache is fp8 and a model has no scales for it.",
    "flat_slots": "The token pools of SGLang and tokenspeed.",
    "host_layer_first": "SGLang HiCache, the host side of its token pools.",
    "host_page_direct": "SGLang HiCache, where pages are copied as they are.",
    "host_page_first": "SGLang HiCache, where pages go to storage.",
    "indexer_mxfp4": "DeepSeek V4's sparse indexer in vLLM, where its cache is four bits wide.",
    "lmcache_2ltd": "LMCache, which keeps chunks of 256 tokens in tensors of this kind.",
    "mla": "DeepSeek V2 and V3.",
    "mla_assembled": "Engines that keep a key pool and a value pool for MLA too.",
    "mla_assembled_fp8": "Engines that keep a key pool and a value pool for MLA too.",
    "mla_nz": "vllm-ascend's decode nodes with `enable_kv_nz`.",
    "mla_split": "FlashInfer's MLA kernels.",
    "mla_v4_planar": "DeepSeek V4: FlashMLA's sparse kernels, vLLM, SGLang.",
    "nhd_int4_group": "KIVI.",
    "nhd_mxfp4": "SGLang and tokenspeed.",
    "nhd_nvfp4": "FlashInfer and SGLang.",
    "packed_hnd": "vLLM since 0.26; the tensors it hands to kernels are views of this one.",
    "packed_nhd": "vLLM since 0.26; the tensors it hands to kernels are views of this one.",
    "paged_hnd": "FlashInfer's HND pages; the blocks of TensorRT-LLM.",
    "paged_nhd": "FlashAttention; FlashInfer's NHD pages.",
    "paged_nz": "vllm-ascend on Ascend 310P.",
    "paged_x_vector": "PagedAttention v1, and engines on ROCm that descend from it.",
    "pair_nhd": "FlashInfer's cache of five dimensions.",
    "planar_nvfp4": "vLLM on Blackwell, for the kernels that FlashInfer has from TensorRT-LLM.",
    "stacked_nhd": "Older vLLM.",
    "swa_nhd": "Hybrid models, some layers of which see a sliding window only.",
    "universal_tp": "Dynamo's block manager, between ranks of different tensor parallelism.",
}
"""Where a layout is in use. One that is not here has no such line."""

SAMPLE = {
    "name": "name: sample\n",
    "axes": "axes: {head: 8, dim: 128}\n",
    "block_size": "block_size: 16\n",
    "buffers": "buffers:\n  kv_cache: {holds: [key, value], order: block kv slot head dim}\n",
}
"""The rest of a layout around an example of the catalogue."""

GROUPS = {
    "KV1": "The file and its YAML",
    "KV2": "Keys, values and names",
    "KV3": "Orders and what they cover",
    "KV4": "Buffers and records",
    "KV5": "Transfers",
    "KV70": "Files and calls",
    "KV71": "Files and calls",
    "KV72": "Compiled kernels",
    "KV73": "The harness",
    "KV74": "Benchmarks",
}

ELSEWHERE = frozenset(
    {"KV712", "KV713", "KV714", "KV715", "KV721", "KV722", "KV723"}
    | {"KV731", "KV741", "KV742", "KV743", "KV744", "KV745", "KV746"}
)
"""Codes whose sessions need torch, a GPU or a compiler: they are shown without what is said."""

WRITTEN = "<!-- Written by `python tools/make_docs.py`; edit {source}, not this file. -->"


def gallery() -> str:
    """One section for each shipped layout."""
    lines = [
        WRITTEN.format(source="layouts/"),
        "",
        "# Gallery",
        "",
        "The layouts that come with kvgen: the YAML, the picture that `kvgen show NAME --svg` draws, and what",
        "`kvgen show NAME` prints above the canonical YAML. Sizes are examples; `kvgen new MINE --like NAME` starts",
        "from a copy. Numbers in a picture count bytes from the start of the tensor, with the smallest strides: the",
        "first byte of a box stands in its upper left corner, the last one in the lower right.",
        "",
    ]
    layouts = {path.stem: (path, load(path)) for path in _layouts()}
    lines += ["| layout | buffers | order | bytes a token and layer |", "|---|---|---|---|"]
    lines += [_row(layout) for _, layout in layouts.values()]
    lines += ["", "[Transfers](#transfers) from one layout to another are drawn at the end."]
    for name, (path, layout) in layouts.items():
        lines += ["", *_section(path, layout, FOUND.get(name))]
    lines += ["", "## Transfers", "", "What they are is in [transfers.md](transfers.md)."]
    for path in _transfers():
        lines += ["", *_transfer_section(path, load_transfer(path))]
    return "\n".join(lines) + "\n"


def _row(layout: Layout) -> str:
    facts = show.describe(layout)
    names = "<br>".join(f"`{buffer['name']}`" for buffer in facts["buffers"])
    orders = "<br>".join(f"`{_order(layout, buffer)}`" for buffer in facts["buffers"])
    return f"| [{layout.name}](#{layout.name}) | {names} | {orders} | {facts['bytes_per_token']} |"


def _order(layout: Layout, facts: dict) -> str:
    """The order of a buffer and, in brackets, what lies in its record."""
    place = layout.buffer(facts["name"]).place
    return f"{facts['order']} [{' '.join(leaves_of(place))}]" if isinstance(place.content, Record) else facts["order"]


def _section(path: Path, layout: Layout, found: str | None) -> list[str]:
    picture = show.text(layout).rstrip().splitlines()[2:]  # the first line is the summary
    where = ["", f"Where it is found: {found}"] if found else []
    head = [f"## {layout.name}", "", layout.summary, *where, ""]
    drawn = ["", f"![A page of {layout.name}, byte by byte](gallery/{layout.name}.svg)", ""]
    details = ["<details><summary>in characters</summary>", "", "```text", *picture, "```", "", "</details>"]
    return [*head, "```yaml", *_text(path), "```", *drawn, *details]


def _transfer_section(path: Path, what: Transfer) -> list[str]:
    sides = f"From [{what.source.name}](#{what.source.name}) to [{what.destination.name}](#{what.destination.name})."
    head = [f"### {what.name}", "", what.summary, sides, "", "```yaml", *_text(path), "```", ""]
    return [*head, f"![{what.name}: a page of either side](gallery/{what.name}.svg)"]


def _text(path: Path) -> list[str]:
    """The lines of a file, without the one for editors."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if "yaml-language-server" not in line]


def _transfers() -> list[Path]:
    return sorted((LAYOUTS / "transfers").glob("*.yaml"))


def _layouts() -> list[Path]:
    return sorted(LAYOUTS.glob("*.yaml"))


def errors() -> str:
    """One section for each code: cause, example, what is said of it, and cure."""
    lines = [
        WRITTEN.format(source="the catalogues in kvgen/catalog.py and kvgen/cli/codes.py"),
        "",
        "# Errors",
        "",
        "Every code that kvgen prints; `kvgen explain CODE` says the same in a terminal. A command tells all mistakes",
        "of all files in one run. It exits 1 if something was found, and 2 if all that was found is marked *status 2*:",
        "then the call or the machine is at fault. Examples show the lines with the mistake; line numbers in the",
        "messages are those of a whole file.",
    ]
    group = ""
    for code, entry in sorted(ENTRIES.items()):
        title = next(name for prefix, name in GROUPS.items() if code.startswith(prefix))
        if title != group:
            lines += ["", f"## {title}"]
            group = title
        lines += ["", *_entry(code, entry)]
    return "\n".join(lines) + "\n"


def _entry(code: str, entry: Entry) -> list[str]:
    status = " *Status 2.*" if code in ENVIRONMENT else ""
    lines = [f'<a id="{code.lower()}"></a>', "", f"### {code}: {entry.title}", "", entry.cause + status]
    if entry.example.startswith("$ "):
        said = [] if code in ELSEWHERE else session(entry.example)[1].splitlines()
        lines += ["", "```console", *entry.example.splitlines(), *said, "```"]
    else:
        mark = [f"<!-- refused: {code} -->"] if "name:" in entry.example else []
        lines += ["", *mark, "```yaml", *entry.example.splitlines(), "```"]
        lines += ["", "```text", *_said(code, entry.example), "```"]
    return [*lines, "", f"Cure: {entry.cure}"]


def session(lines: str) -> tuple[int, str]:
    """Exit status and output of the last line of a session, in a new folder: what a user is told there."""
    *before, last = (line.removeprefix("$ ") for line in lines.splitlines())
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for line in before:
                _run(line)
            return _run(last)
        finally:
            os.chdir(here)


def _run(line: str) -> tuple[int, str]:
    if not line.startswith("kvgen "):
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        return 0, done.stdout
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", shlex.split(line)),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            main_command()
        except SystemExit as exit_:
            return int(exit_.code or 0), output.getvalue()
    return 0, output.getvalue()


def _said(code: str, example: str) -> list[str]:
    """What a user is told of an example, in a layout whose other lines are right."""
    given = {line.split(":")[0] for line in example.splitlines()}
    if "transfer" in given:
        given = SAMPLE.keys() - {"name"}
    text = "".join(lines for key, lines in SAMPLE.items() if key not in given) + example + "\n"
    try:
        load_text(text, "sample.yaml")
    except KvgenError as error:
        found = [diagnostic for diagnostic in error.diagnostics if diagnostic.code == code]
        return [line.rstrip() for line in render_text(found).splitlines()]
    raise AssertionError(f"the example of {code} is no mistake")


PAGES: dict[str, Callable[[], str]] = {"gallery.md": gallery, "errors.md": errors}
PAGES |= {f"gallery/{path.stem}.svg": lambda path=path: figure(load(path)) for path in _layouts()}
PAGES |= {f"gallery/{path.stem}.svg": lambda path=path: transfer_figure(load_transfer(path)) for path in _transfers()}
"""The files below docs/ that are written, and what writes them."""


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = 0
    for name, write in PAGES.items():
        path, text = DOCS / name, write()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if arguments:
            print(f"docs/{name} is out of date: `python tools/make_docs.py` writes it", file=sys.stderr)
            stale = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote docs/{name}")
    for path in sorted(set((DOCS / "gallery").glob("*.svg")) - {DOCS / name for name in PAGES}):
        if arguments:
            print(
                f"docs/gallery/{path.name} belongs to no layout: `python tools/make_docs.py` removes it",
                file=sys.stderr,
            )
            stale = 1
        else:
            path.unlink()
            print(f"removed docs/gallery/{path.name}")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

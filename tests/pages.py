"""The code blocks of a page of the docs, and what is done with each so that none goes unchecked.

A page is a story: its blocks are run one after the other, in one folder that has what the repository has.

| block | what is done |
|---|---|
| ```yaml | with a `name:` it is a layout, which must load; else it says in `of` what it is part of |
| ```sh, ```console | its `kvgen` commands run, and succeed; a line that is no `kvgen` command needs `run by` |
| ```python | it runs, on the CPU |
| ```text | it is what a command prints, or a diagram |

HTML comments right before a block say what is special about it:

    <!-- refused: KV303 -->         a layout that gives this code
    <!-- of: paged_nhd -->          keys that replace those of a shipped layout
    <!-- file: PATH -->             part of a file of the repository, or a file that is written for later blocks
    <!-- setup: NAME -->            what SETUPS has runs before
    <!-- command: kvgen ... -->     a part of what this prints
    <!-- output -->                 a part of what the commands of the block before print
    <!-- diagram -->                text that is no output
    <!-- status: 1 -->              the last command of the block exits so
    <!-- run by: PATH::TEST -->     a test runs it; `run` and `output` may say to it how
    <!-- gpu: REASON -->            it cannot run without a GPU: only its syntax is checked
    <!-- slow: REASON -->           it runs with KVGEN_SLOW_DOCS=1 only
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from kvgen.diagnostics import KvgenError
from kvgen.documents import load_text
from tests.command import kvgen
from tests.generated import ROOT, shipped_text

FOLDERS = ("layouts", "schema", "generated")
SHELLS = ("bash", "sh", "console")
SETUPS: dict[str, str] = {
    "decode": """
import torch
from generated import paged_nhd as cache
key_cache, value_cache = cache.allocate(num_blocks=4)
block_table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
context_lens = torch.tensor([17, 5])
key, value = (torch.randn(2, 8, 128).bfloat16() for _ in range(2))
positions, query_start_loc = context_lens, torch.tensor([0, 1, 2])
""",
    "window": """
import torch
from generated import paged_nhd as cache, swa_nhd as window
key_cache, value_cache = cache.allocate(num_blocks=4)
window_key, window_value = window.allocate(num_blocks=2)
key, value = (torch.randn(2, 8, 128).bfloat16() for _ in range(2))
slots, swa_slots = torch.tensor([40, 3]), torch.arange(64) % 32
""",
}
"""What snippets need that are no whole programs."""


@dataclass(frozen=True)
class Block:
    """A fenced code block, and the comments right before it as ``{"refused": "KV303"}``."""

    language: str
    text: str
    marks: dict[str, str]

    @property
    def is_layout(self) -> bool:
        """Whether it is a whole layout, and not a part of one."""
        return self.language == "yaml" and re.search(r"^name:", self.text, re.M) is not None


def blocks(text: str) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    pattern = r"((?:^<!--[^\n]*-->\n)*)^```(\w*)\n(.*?)^```$"
    for comments, language, code in re.findall(pattern, text, re.M | re.S):
        marks = dict(re.findall(r"^<!-- ([\w ]+?)(?:: (.*?))? -->$", comments, re.M))
        yield Block(language, code, marks)


def commands(block: Block) -> list[list[str]]:
    """The arguments of every kvgen command line in a block of shell commands; ``console`` has a prompt before them."""
    if block.language not in SHELLS:
        return []
    prompt = r"\$ " if block.language == "console" else ""
    lines = re.findall(rf"^{prompt}(?:\S*/)?kvgen (.*)$", block.text, re.M)
    return [shlex.split(line, comments=True) for line in lines]


def unrunnable(block: Block) -> str | None:
    """Why nothing would be done with a block; None if something is."""
    marks = block.marks
    if unknown := marks.keys() - MARKS:
        return f"unknown marks: {', '.join(sorted(unknown))}"
    if any(marks.get(mark) == "" for mark in ("gpu", "slow", "run by")):
        return "a block that is not run here needs a reason"
    if marks.keys() & {"run by", "gpu", "slow"}:
        return None
    if block.language == "yaml":
        told = block.is_layout or bool(marks.keys() & {"of", "file"})
        return None if told else "a part of a layout that does not say of which"
    if block.language in SHELLS:
        prompt = "$ " if block.language == "console" else ""
        lines = [line for line in block.text.splitlines() if line.strip() and line.startswith(prompt)]
        return None if len(lines) == len(commands(block)) else "a line that is no kvgen command"
    if block.language == "python":
        return None
    if block.language in ("text", ""):
        return None if marks.keys() & {"command", "output", "diagram"} else "text that is neither output nor diagram"
    return f"blocks of {block.language} are not run"


MARKS = {"refused", "of", "file", "setup", "command", "output", "diagram", "status", "run by", "gpu", "slow"}


@dataclass
class Story:
    """The blocks of a page, done one after the other in ``folder``."""

    folder: Path
    printed: str = ""

    def __post_init__(self) -> None:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    def tell(self, block: Block) -> None:
        """Do what there is to do with a block."""
        if "file" in block.marks:
            self.file(block)
        elsewhere = block.marks.keys() & {"gpu", "run by"} and block.language in SHELLS
        if elsewhere or ("slow" in block.marks and not os.environ.get("KVGEN_SLOW_DOCS")):
            return
        try:
            self.run(block)
        finally:
            self.forget()

    def run(self, block: Block) -> None:
        if block.language == "yaml":
            load_layout(block)
        elif block.language in SHELLS:
            self.printed = run_commands(block)
        elif block.language == "python" and "file" not in block.marks:
            self.python(block)
        elif "command" in block.marks:
            assert block.text in kvgen(*shlex.split(block.marks["command"])[1:]).out
        elif "output" in block.marks:
            assert block.text in self.printed, self.printed

    def forget(self) -> None:
        """Unload modules of this folder: another page, or a later block, may have others of their names."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]

    def file(self, block: Block) -> None:
        path = block.marks["file"]
        if (ROOT / path).exists():
            assert block.text in (ROOT / path).read_text(encoding="utf-8"), path
            return
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(block.text, encoding="utf-8")

    def python(self, block: Block) -> None:
        code = compile(SETUPS.get(block.marks.get("setup"), "") + block.text, "docs.py", "exec")
        if block.marks.keys() & {"gpu", "run by"}:
            return
        sys.path.insert(0, str(self.folder))
        page = ModuleType("page_of_docs")
        sys.modules[page.__name__] = page  # torch.compile looks up a function's globals in its module
        try:
            exec(code, vars(page))
        finally:
            del sys.modules[page.__name__]
            sys.path.remove(str(self.folder))


def load_layout(block: Block) -> None:
    """Load a layout, which must give the code that it is refused with, if any; other YAML is only read."""
    text = whole(block.marks["of"], block.text) if "of" in block.marks else block.text
    if not re.search(r"^name:", text, re.M):
        yaml.safe_load(text)
    elif (refused := block.marks.get("refused")) is None:
        load_text(text, "docs.yaml")
    else:
        with pytest.raises(KvgenError) as caught:
            load_text(text, "docs.yaml")
        assert refused in [diagnostic.code for diagnostic in caught.value.diagnostics]


def whole(name: str, keys: str) -> str:
    """The text of a shipped layout with some of its keys replaced."""
    replaced = set(re.findall(r"^(\w+):", keys, re.M))
    parts = re.split(r"^(?=\w+:)", shipped_text(name), flags=re.M)
    return "".join(part for part in parts if part.partition(":")[0] not in replaced) + keys


def run_commands(block: Block) -> str:
    """Run a block's commands one after the other; what they print. Each must succeed but one that says otherwise."""
    lines, printed = commands(block), ""
    for arguments in lines:
        result = kvgen(*arguments)
        expected = int(block.marks.get("status", 0)) if arguments is lines[-1] else 0
        assert result.code == expected, f"kvgen {shlex.join(arguments)}\n{result.out}{result.err}"
        printed += result.out + result.err
    return printed

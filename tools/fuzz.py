"""Feed kvgen what is almost a layout: nothing may end in a traceback, hang, fill memory, or leave a file behind.

    python tools/fuzz.py --count 1000             a bounded run, the same each time
    python tools/fuzz.py --seconds 3600 --seed 7  a longer one

Texts are shipped layouts and the cases of tests/cases, changed: as trees (keys removed, renamed, moved, given values
that are nearly right, subtrees of other files), and as bytes. Each goes through `kvgen check` and, where that is
content, through `show`, `show --svg` and `build`. What fails is kept in --keep, and named; the exit status is 1 then.

Neither torch nor triton is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvgen.cli import main  # noqa: E402

MEMORY = 1 << 30
"""Bytes of address space that a run may take."""

PATIENCE = 5
"""Seconds of the processor that one command may take; most take a few milliseconds."""

ODD = [
    *(None, True, False, "", " ", "-", "~", "null", "dynamic", "none", "all", "same", "key", "value.scale", "key.zero"),
    *(0, 1, -1, 2, 3, 7, 16, 127, 255, 256, 1024, 2**31 - 1, 2**31, 2**63, 10**40, -(2**63)),
    *(0.0, -0.0, 1e-6, 0.5, 1e300, 1e-300, float("inf"), float("nan")),
    *([], {}, [[]], [None], {"": None}, {"key": {}}, ["key", "value"], ["key", "key"], [0, 1], [-128, 127]),
    *(
        "dim//0",
        "dim%0",
        "dim//-1",
        "dim//8%8",
        "dim//3",
        "dim%999999999999",
        "dim//8//2",
        "dim%",
        "//",
        "%",
        "(",
        ")",
        "()",
    ),
    *(
        "(block slot)",
        "((slot))",
        "block",
        "block block",
        "slot head dim",
        "token",
        "kv",
        "layer",
        "1",
        "1 1 1",
        "dim " * 999,
    ),
    *(
        "block slot head dim",
        "block head slot dim kv",
        "request position head dim",
        "token//32 head dim",
        "é",
        "\u202e",
        "\x00",
    ),
    *(
        "a" * 5000,
        "fp8_e4m3",
        "nvfp4",
        "turbo4",
        "int4_asymmetric",
        "pow2",
        "e8m0",
        "float32",
        "static",
        "exact",
        "away",
    ),
    *({"per": "token"}, {"mode": "int4", "scale": {"per": []}}, {"pad": 0}, {"pad": 2**31}, {"pad": 1, "fill": 256}),
]
"""Values that are wrong in most places and right in some."""


def documents(paths: Iterable[Path]) -> list[str]:
    """The texts that are changed."""
    texts = [path.read_bytes().decode(errors="replace") for path in sorted(paths)]
    return [text for text in texts if len(text) < 20_000]


def trees(texts: list[str]) -> list[Any]:
    """The texts that any reader of YAML takes for mappings."""
    found = []
    for text in texts:
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            if isinstance(tree := yaml.safe_load(text), dict) and not _shared(tree):
                found.append(tree)
    return found


def _shared(tree: Any, seen: set[int] | None = None) -> bool:
    """Whether parts of a tree occur in it twice, by aliases."""
    seen = set() if seen is None else seen
    if not isinstance(tree, dict | list):
        return False
    if id(tree) in seen:
        return True
    seen.add(id(tree))
    return any(_shared(child, seen) for child in (tree.values() if isinstance(tree, dict) else tree))


class Mutator:
    """Texts that are almost layouts, drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        right, wrong = documents((ROOT / "layouts").rglob("*.yaml")), documents((ROOT / "tests/cases").glob("*/*.yaml"))
        # Most changes of what is right leave it nearly right.
        self.texts = [*right * (4 * len(wrong) // len(right)), *wrong]
        self.trees = trees(self.texts)
        self.parts = [part for tree in trees([*right, *wrong]) for part, _, _ in _parts(tree)]
        self.keys = sorted(
            {key for part in self.parts if isinstance(part, dict) for key in part if isinstance(key, str)}
        )

    def text(self) -> bytes:
        draw = self.random
        if draw.random() < 0.6:
            tree = copy.deepcopy(draw.choice(self.trees))
            for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
                self._change(tree)
            flow = draw.choice((None, None, True, False))
            return yaml.safe_dump(
                tree, allow_unicode=True, sort_keys=False, default_flow_style=flow, width=10_000
            ).encode()
        data = bytearray(draw.choice(self.texts).encode())
        for _ in range(draw.choice((1, 1, 2, 4, 16))):
            self._damage(data)
        return bytes(data)

    def _change(self, tree: Any) -> None:
        """Change one place of a tree."""
        draw = self.random
        _, owner, key = draw.choice(list(_parts(tree))[1:] or [(None, tree, "name")])
        kind = draw.randrange(6)
        if not tree:
            tree[key] = draw.choice(ODD)
        elif kind == 0:
            del owner[key]
        elif kind == 1 and isinstance(owner, dict):
            owner[draw.choice(self.keys)] = owner.pop(key)
        elif kind == 2:
            owner[key] = copy.deepcopy(draw.choice(self.parts))
        elif kind == 3 and isinstance(owner, dict):
            owner[draw.choice(self.keys)] = copy.deepcopy(draw.choice([*ODD, *self.parts]))
        elif kind == 4 and isinstance(owner[key], str) and owner[key]:
            words = owner[key].split(" ")
            draw.shuffle(words)
            owner[key] = " ".join(words[: draw.randrange(1, len(words) + 1)] + [draw.choice(words)] * draw.randrange(2))
        else:
            owner[key] = copy.deepcopy(draw.choice(ODD))

    def _damage(self, data: bytearray) -> None:
        """Change some bytes of a text."""
        draw = self.random
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 1, 2, 8, 64)))
        kind = draw.randrange(5)
        if kind == 0:
            del data[at:end]
        elif kind == 1:
            data[at:at] = data[at:end] * draw.choice((1, 2, 300))
        elif kind == 2:
            data[at:at] = draw.choice(
                (b"\t", b"\n", b"{", b"}", b"[", b": ", b"- ", b"&a ", b"*a", b"!!python/name:x ", b"#", b"'")
            )
        elif kind == 3:
            data[at:end] = draw.randbytes(end - at)
        else:
            data[at:at] = draw.choice(
                (
                    b"\xff\xfe",
                    b"\x00",
                    b"---\n",
                    b"<<: ",
                    b"? ",
                    b"|\n ",
                    b"%YAML 9\n",
                    b"\xe2\x80\xae",
                    b"1e999",
                    b"0x1F",
                )
            )


def _parts(tree: Any, owner: Any = None, key: Any = None):
    """Every part of a tree, and where it is."""
    yield tree, owner, key
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, part in pairs:
        yield from _parts(part, tree, name)


def run(folder: Path, data: bytes) -> str:
    """What becomes of a text: ``refused`` or ``built``. Raises AssertionError, or what a command raised."""
    path = folder / "layout.yaml"
    path.write_bytes(data)
    out = folder / "generated"
    checked, built = _command("check", path), _command("build", path, "--out", out)
    left = sorted(p.name for p in folder.iterdir())
    if checked:
        assert (checked, built) in ((1, 1), (2, 2)), f"exit statuses of check and build: {checked}, {built}"
        assert left == ["layout.yaml"], f"left behind: {left}"
        return "refused"
    assert not built, f"check is content, build exits with {built}"
    assert left == ["generated", "layout.yaml"], f"left behind: {left}"
    assert not _command("show", path)
    assert not _command("show", path, "--svg")
    shutil.rmtree(out)
    return "built"


def _command(*arguments: object) -> int:
    """The exit status of a kvgen command, which is interrupted when it takes too long."""
    output = io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        with (
            mock.patch.object(sys, "argv", ["kvgen", *map(str, arguments)]),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            main()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return 0


def _interrupted(*_: object) -> None:
    raise TimeoutError(f"a command took more than {PATIENCE} s")


def fuzz(count: int, seconds: float, seed: int, keep: Path) -> int:
    """Run until ``count`` texts or ``seconds`` are over; the number of texts that failed."""
    signal.signal(signal.SIGPROF, _interrupted)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ["RAYON_NUM_THREADS"] = "1"  # the formatter's threads, one a core, would not find room in that
    mutator, outcomes, end = Mutator(seed), Counter(), time.monotonic() + seconds
    done = 0
    with tempfile.TemporaryDirectory() as name:
        while done < count and time.monotonic() < end:
            data = mutator.text()
            folder = Path(name) / str(done)
            folder.mkdir()
            try:
                outcomes[run(folder, data)] += 1
            except Exception:
                outcomes["failed"] += 1
                keep.mkdir(parents=True, exist_ok=True)
                kept = keep / f"fuzz_{seed}_{done}.yaml"
                kept.write_bytes(data)
                print(f"{kept}:\n{traceback.format_exc()}", file=sys.stderr)
            done += 1
            shutil.rmtree(folder)
    print(f"{done} texts: {', '.join(f'{number} {what}' for what, number in sorted(outcomes.items()))}")
    return outcomes["failed"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=sys.maxsize, help="texts to try")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time to take")
    parser.add_argument("--seed", type=int, default=0, help="other texts")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="the folder for what fails")
    given = parser.parse_args()
    os.environ["NO_COLOR"] = "1"
    sys.exit(1 if fuzz(given.count, given.seconds, given.seed, given.keep) else 0)

"""Writing generated modules: first what would change, then all of it or nothing.

The manifest beside the modules holds a digest of every text that kvgen wrote and of the layout it came from. It tells a
module that is merely out of date from one that somebody edited, and a leftover of a deleted layout from a file that was
never kvgen's. It holds no times and no paths: the same layouts give the same bytes in any folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvgen.diagnostics import Diagnostic, KvgenError

MANIFEST = "kvgen.manifest.json"


class State(StrEnum):
    """How a file of the output folder stands to what kvgen would write there."""

    FRESH = "fresh"
    MISSING = "missing"
    STALE = "stale"
    EDITED = "edited by hand"
    ORPHANED = "orphaned"


@dataclass(frozen=True, slots=True)
class Module:
    """A rendered module: the name of its file, its text, and a digest of the layout it came from."""

    file: str
    text: str
    layout_digest: str


@dataclass(frozen=True, slots=True)
class Change:
    """One file of the output folder: what lies there (None: nothing) and what belongs there (None: nothing).

    An orphan that was edited by hand is ``ORPHANED`` with ``edited`` set; ``edited`` files are touched only by force.
    """

    file: str
    state: State
    old: str | None
    new: str | None
    edited: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """What a build would do to ``folder``; ``changes`` name every module, fresh ones too, and the manifest last."""

    folder: Path
    changes: tuple[Change, ...]

    def of(self, *states: State) -> list[Change]:
        return [change for change in self.changes if change.state in states]


def digest(content: str | bytes) -> str:
    """The SHA-256 of a text (as UTF-8) or of bytes, in hexadecimal."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def survey(
    folder: Path,
    modules: Iterable[Module],
    *,
    whole: bool,
    clean: bool = False,
    others: Set[str] = frozenset(),
) -> Survey:
    """Compare ``modules`` with what lies in ``folder``; nothing is written.

    ``whole`` says that nothing belongs there but these and the files ``others``: what the manifest knows besides is
    orphaned, and leaves the manifest with ``clean``. Without it, other modules and their entries stay as they are.
    """
    modules = sorted(modules, key=lambda module: module.file)
    entries = _read_manifest(folder)
    changes = [_compare(folder, module, entries.get(module.file)) for module in modules]
    kept = dict(entries)
    if whole:
        for file in sorted(entries.keys() - {module.file for module in modules} - others):
            old = _read(folder / file)
            if old is not None:
                edited = digest(old) != entries[file]["module"]
                changes.append(Change(file, State.ORPHANED, old, None, edited))
            if old is None or clean:
                del kept[file]
    kept |= {module.file: {"layout": module.layout_digest, "module": digest(module.text)} for module in modules}
    return Survey(folder, (*changes, _compare_manifest(folder, kept)))


def apply(survey: Survey, *, force: bool = False, clean: bool = False) -> tuple[list[str], list[str]]:
    """Do what ``survey`` found (made with the same ``clean``); the names of the modules written and of those removed.

    Everything is written beside its place before the first file is replaced. Raises KvgenError, with nothing changed,
    if a file was edited by hand and ``force`` is not given, or if the folder cannot be written.
    """
    writes = [change for change in survey.changes if change.new is not None and change.new != change.old]
    removals = survey.of(State.ORPHANED) if clean else []
    if not force:
        _refuse_edited(survey.folder, [change for change in (*writes, *removals) if change.edited])
    write_files(survey.folder, {change.file: change.new for change in writes if change.new is not None})
    try:
        for change in removals:
            (survey.folder / change.file).unlink(missing_ok=True)
    except OSError as error:
        raise KvgenError(_os_diagnostic(error, survey.folder)) from None
    return [change.file for change in writes if change.file != MANIFEST], [change.file for change in removals]


def write_files(folder: Path, texts: Mapping[str, str | bytes]) -> None:
    """Write all texts (as UTF-8) beside their places, then move each into its own; on failure no place has changed."""
    if not texts:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace_all(folder, texts)
    except OSError as error:
        raise KvgenError(_os_diagnostic(error, folder)) from None


def write_file(path: Path, content: str | bytes) -> None:
    """Write one file where a user wants it: a link stays a link, and what is no regular file is written to."""
    target = Path(os.path.realpath(path))
    if not is_stream(path):
        write_files(target.parent, {target.name: content})
        return
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise KvgenError(_os_diagnostic(error, path)) from None


def is_stream(path: Path) -> bool:
    """Whether a path is that of a device, a pipe, or an output of this process, which may be a file."""
    try:
        return not stat.S_ISREG(path.stat().st_mode) or path.absolute().parts[:2] in (("/", "dev"), ("/", "proc"))
    except OSError:
        return False


def _compare(folder: Path, module: Module, entry: Mapping[str, str] | None) -> Change:
    old = _read(folder / module.file)
    if old is None:
        return Change(module.file, State.MISSING, None, module.text)
    if old == module.text:
        return Change(module.file, State.FRESH, old, module.text)
    if entry is None or digest(old) != entry["module"]:
        return Change(module.file, State.EDITED, old, module.text, edited=True)
    return Change(module.file, State.STALE, old, module.text)


def _compare_manifest(folder: Path, entries: Mapping[str, Mapping[str, str]]) -> Change:
    old = _read(folder / MANIFEST)
    new = json.dumps({"modules": entries}, indent=2, sort_keys=True) + "\n"
    if old is None:
        return Change(MANIFEST, State.MISSING, None, new)
    return Change(MANIFEST, State.FRESH if old == new else State.STALE, old, new)


def _read(path: Path) -> str | None:
    try:
        # Decoded without newline translation and without failing: a mangled file differs, that is all.
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KvgenError(_os_diagnostic(error, path)) from None


def _read_manifest(folder: Path) -> dict[str, dict[str, str]]:
    text = _read(folder / MANIFEST)
    if text is None:
        return {}
    try:
        entries = json.loads(text)["modules"]
        plain = {file: {"layout": entry["layout"], "module": entry["module"]} for file, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise KvgenError(
            Diagnostic(
                "KV704",
                f"{(folder / MANIFEST).as_posix()} is no manifest of kvgen",
                hint="restore it, or delete it and build with --force",
            )
        ) from None
    return {file: entry for file, entry in plain.items() if Path(file).name == file}


def _refuse_edited(folder: Path, changes: Iterable[Change]) -> None:
    found = [
        Diagnostic(
            "KV703",
            f"{(folder / change.file).as_posix()} is not as kvgen wrote it",
            hint="move your changes to the layout, or copy the file elsewhere; --force overwrites it",
        )
        for change in changes
    ]
    if found:
        raise KvgenError(*found)


def _replace_all(folder: Path, texts: Mapping[str, str | bytes]) -> None:
    temporary = {file: folder / f".{file}.{os.getpid()}.tmp" for file in texts}
    try:
        for file, text in texts.items():
            temporary[file].write_bytes(text.encode() if isinstance(text, str) else text)
            with contextlib.suppress(FileNotFoundError):
                temporary[file].chmod(stat.S_IMODE((folder / file).stat().st_mode))
        for file in texts:
            os.replace(temporary[file], folder / file)
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):
                path.unlink()


def _os_diagnostic(error: OSError, path: Path) -> Diagnostic:
    reason = error.strerror or type(error).__name__
    return Diagnostic("KV702", f"{path.as_posix()}: {reason[0].lower()}{reason[1:]}")

"""What a user may have meant by a word that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``did you mean `head`?``, or None where nothing comes close."""
    names = list(known)
    # Names are short: one wrong letter in four is a slip, and so is another case.
    close = get_close_matches(word[:60].lower(), names, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did_you_mean``, or else everything that is known."""
    names = list(known)
    return did_you_mean(word, names) or known_here(names)


def known_here(known: Iterable[str]) -> str:
    """Everything that is known."""
    return "known here: " + ", ".join(f"`{name}`" for name in known)

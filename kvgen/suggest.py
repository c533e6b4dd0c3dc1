"""What a user may have meant by a word that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

OTHER_NAMES = {
    **dict.fromkeys(("fp32", "float", "single", "torch.float32"), ("float32",)),
    **dict.fromkeys(("fp16", "half", "torch.float16"), ("float16",)),
    **dict.fromkeys(("bf16", "torch.bfloat16"), ("bfloat16",)),
    **dict.fromkeys(
        ("fp8", "float8", "e4m3", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn", "e4m3")
    ),
    **dict.fromkeys(("e5m2", "fp8_e5m2", "float8_e5m2"), ("fp8_e5m2", "float8_e5m2")),
    **dict.fromkeys(("e4m3fnuz", "float8_e4m3fnuz"), ("fp8_e4m3fnuz",)),
    **dict.fromkeys(("e5m2fnuz", "float8_e5m2fnuz"), ("fp8_e5m2fnuz",)),
    **dict.fromkeys(("ue8m0", "float8_e8m0fnu"), ("e8m0",)),
    **dict.fromkeys(("uint4", "int4_asym"), ("int4_asymmetric",)),
}
"""What engines call types and encodings, and which words of ours that may be, those of modes first."""


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``did you mean `head`?``, or None where nothing comes close."""
    names = list(known)
    word = word[:60].lower()
    close = [name for name in OTHER_NAMES.get(word, ()) if name in names]
    # Names are short: one wrong letter in four is a slip, and so is another case.
    close += get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did_you_mean``, or else everything that is known."""
    names = list(known)
    return did_you_mean(word, names) or known_here(names)


def known_here(known: Iterable[str]) -> str:
    """Everything that is known."""
    return "known here: " + ", ".join(f"`{name}`" for name in known)

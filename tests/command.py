"""Calling the console script inside the test's process."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from kvgen.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def kvgen(*arguments: object) -> Result:
    """Exit status and both outputs of ``kvgen ARGUMENTS``; an exception that reaches the user fails the test."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["kvgen", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Result(code, out.getvalue(), err.getvalue())


def searching(*folders: Path | str) -> dict[str, str]:
    """``PYTHONPATH`` of a process that looks for modules in ``folders`` first, and then where this one does.

    What kvgen needs may be found by that variable alone.
    """
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])}

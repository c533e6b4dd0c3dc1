"""The harness: makes a layout's cases, runs a module on them, and compares every byte with the reference."""

from kvgen.harness.compare import Difference, Mismatch, Unsupported
from kvgen.harness.report import Report, Result, UnknownCase
from kvgen.harness.run import cases, run

__all__ = ["Difference", "Mismatch", "Report", "Result", "UnknownCase", "Unsupported", "cases", "run"]

"""``python -m kvgen`` is ``kvgen``, for a checkout that is not installed."""

from kvgen.cli import main

main()

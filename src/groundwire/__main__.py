"""The command ``groundwire``, also as ``python -m groundwire``."""

import os
import sys

from groundwire.tools.interrupts import INTERRUPTED, end_at_interrupt

__all__ = ["main"]


def main() -> None:
    """Run the command. A Ctrl-C before it has begun ends with a word, too."""
    end_at_interrupt()
    try:
        from groundwire.train.cli.app import app

        app(prog_name="groundwire")
    except (KeyboardInterrupt, SystemExit) as ended:  # typer's end after a Ctrl-C is silent
        if getattr(ended, "code", INTERRUPTED) != INTERRUPTED:
            raise
        print("stopped", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # without what half-imported modules would do


if __name__ == "__main__":
    main()

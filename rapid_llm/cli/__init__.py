"""The `rapid-llm` command.

Every command is declared in `app`, torch-free; what it does lives in a module that is imported when it runs, so that
`--help` and `kernels list` stay quick. Exit status: 0 good, 1 the thing asked about is bad, 2 usage; 130 and 141 after
Ctrl-C and a closed pipe, as shells have it.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    from . import support

    support.prepare_streams()
    try:
        from .app import app

        app(prog_name="rapid-llm")
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(support.INTERRUPTED)
    except BrokenPipeError:
        support.drop_stdout()
        sys.exit(support.PIPE_CLOSED)
    finally:
        support.flush()
    sys.exit(0)

# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Parses the command line and runs one command.

Exit status: 0 for success, 1 if a command fails, 2 for wrong input, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_fastattn.cli import bench, cache, info, warmup
from jax_fastattn.cli.errors import CommandError, UsageError


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; each command sets `run`, its function, and `parser`, which reports its wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_fastattn", description="Exact attention for JAX: diagnosis, ahead-of-time kernels, timing."
    )
    commands = parser.add_subparsers(metavar="{info,warmup,cache,bench}", required=True)
    for command in (info, warmup, cache, bench):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, `sys.argv` by default, and returns its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except UsageError as error:
        options.parser.error(str(error))  # exits
        return 2
    except CommandError as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130

# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`cache clear`: deletes the compiled kernels of this user's cache directory, and no other file."""

from __future__ import annotations

import argparse
from typing import Any

from jax_fastattn.cli.errors import CommandError
from jax_fastattn.cli.text import file_size
from jax_fastattn.compilation import cache, failures


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("cache", help="delete compiled kernels")
    actions = parser.add_subparsers(metavar="{clear}", required=True)
    clear_parser = actions.add_parser(
        "clear",
        help="delete every compiled kernel",
        description="Deletes every compiled kernel in the cache directory.",
    )
    clear_parser.set_defaults(run=clear, parser=clear_parser)


def clear(options: argparse.Namespace) -> int:
    """Deletes compiled kernels and says how many."""
    del options
    path = cache.directory()
    if path is None:
        raise CommandError(f"there is no cache: {cache.state().problem}. {cache.state().remedy}")
    try:
        count, size = cache.clear()
        failures.forget()
    except OSError as error:
        remedy = cache.state().remedy or "Run this as the owner of that directory."
        raise CommandError(f"cannot clear {path}: {error.strerror or error}. {remedy}") from error
    print(f"deleted {count} compiled kernel{'' if count == 1 else 's'} ({file_size(size)}) from {path}")
    return 0

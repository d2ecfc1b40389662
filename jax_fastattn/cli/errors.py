# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Errors that stop a command. Each one is a message for the user, without a traceback."""


class UsageError(Exception):
    """Signals that the command line asks for something impossible; exit status 2."""


class CommandError(Exception):
    """Signals that the command line is right and the command failed; exit status 1."""

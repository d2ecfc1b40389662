# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What stops a command. Each error is one message for the user, without a traceback."""


class UsageError(Exception):
    """The command line asks for what cannot be; exit status 2."""


class CommandError(Exception):
    """The command line is right and the command failed; exit status 1."""

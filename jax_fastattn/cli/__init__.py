# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The command line, `python -m jax_fastattn`: a file for each command. docs/cli.md shows what each one prints."""

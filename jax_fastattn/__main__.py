# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Starts the command line. Processes that `warmup` spawns import this file too, and start nothing."""

import sys

from jax_fastattn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

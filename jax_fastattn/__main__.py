# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Starts the command line, or a worker that compiles kernels (`compilation/worker.py`), which imports no JAX."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from jax_fastattn.compilation.worker import run

        run(niceness=int(sys.argv[2]))
    from jax_fastattn.cli.main import main

    sys.exit(main())

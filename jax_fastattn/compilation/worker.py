# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A process that compiles kernels for another one, which `workers.py` starts: `python -m jax_fastattn worker`.

It reads pairs of key and spec, compiles each into the disk cache, and writes a line of JSON for each. One more line
says that it has loaded the compiler, before it compiles its first kernel. It imports no JAX and sees no GPU. It ends
by `os._exit`: a process that has compiled takes half a second to end otherwise.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from jax_fastattn.compilation import cache
from jax_fastattn.kernels.key import KernelSpec

# No kernel takes a tenth of this. A worker that hangs ends by a signal, even if the process that started it is gone.
MOST_SECONDS = 600

# The line which says that the compiler is loaded.
LOADED = {"loaded": True}
_COMPILER = "jax_fastattn.compilation.compiler"


def run(niceness: int) -> NoReturn:
    """Compiles kernels until there are no more requests, then ends the process."""
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it without a traceback
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the compiler may print
    status = 0
    try:
        while True:
            signal.alarm(0)
            key, spec = pickle.load(sys.stdin.buffer)
            signal.alarm(MOST_SECONDS)
            for report in _reports(key, spec):
                print(json.dumps(report), file=reports, flush=True)
    except EOFError:
        pass
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        status = 1
    os._exit(status)


def _reports(key: str, spec: KernelSpec) -> Iterator[dict[str, Any]]:
    """Compiles one kernel into the cache.

    Yields:
        `LOADED`, if this kernel has loaded the compiler. Then the seconds that the kernel took, or the problem.
    """
    begin = time.monotonic()
    try:
        if cache.kernel_key(spec) != key:
            yield {"problem": "it finds another version of jax_fastattn or of its compiler"}
            return
        was_loaded = _COMPILER in sys.modules
        from jax_fastattn.compilation import compiler  # loads the compiler, which takes seconds

        if not was_loaded:
            yield LOADED
        cache.store(key, compiler.compile_kernel(spec))
    except Exception as error:
        yield {"problem": f"{type(error).__name__}: {error}"}
        return
    is_kept = cache.load(key) is not None
    yield {"seconds": time.monotonic() - begin} if is_kept else {"problem": "it could not be written to the cache"}

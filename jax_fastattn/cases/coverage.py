# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Records which checks the kernels for each architecture have passed; docs/support.md and `info` print it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The checks that the kernels for an architecture have passed.

    Attributes:
        gpus: some GPUs of the architecture.
        compiled: the rows that `tests/kernels/test_resources.py` compiles in every run: `ALL_ROWS`, `ONE_ROW` (of each
            operation; the rest with `-m every_arch`), or `SAME_CODE`.
        emulated: whether tests run its PTX in an emulator on the CPU.
        ran: the GPUs that ran kernels, and which.
    """

    gpus: str
    compiled: str
    emulated: bool = False
    ran: str = "nothing"


ALL_ROWS, ONE_ROW, SAME_CODE = "every row", "one row of each kind", "the code is that of sm_86"
COVERAGE = {
    "sm_80": Coverage("A100", ALL_ROWS, True, "no A100; its tiles on an H100, compiled for sm_90"),
    "sm_86": Coverage("RTX 30, A10", ALL_ROWS, True, "no RTX card; its tiles on an H100, compiled for sm_90"),
    "sm_87": Coverage("Jetson Orin", ONE_ROW),
    "sm_89": Coverage("L4, L40, RTX 40", SAME_CODE),
    "sm_90a": Coverage(
        "H100, H200", ALL_ROWS, True, "H100: the GPU tests and the benchmarks; H200: part of the GPU tests"
    ),
    "sm_100a": Coverage("B200, GB200", ONE_ROW),
    "sm_103a": Coverage("B300, GB300", ONE_ROW),
    "sm_110a": Coverage("Jetson Thor", ONE_ROW),
    "sm_120a": Coverage("RTX 50, RTX PRO 6000", ONE_ROW),
    "sm_121a": Coverage("DGX Spark", ONE_ROW),
}

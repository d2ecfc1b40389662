# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a peer's API cannot express of a case; every peer raises it alike."""

from __future__ import annotations

from jax_fastattn.cases.case import Case


class Unsupported(Exception):
    """There is no argument for what the case asks for."""


def refuse(case: Case, *names: str) -> None:
    """Raises for fields of the case that are set and that the caller has no argument for."""
    asked = [name for name in names if getattr(case, name) not in (None, 0, False, (None, None))]
    if asked:
        raise Unsupported(f"no argument for {', '.join(asked)}")


def refuse_alignment(case: Case) -> None:
    """Raises where masks that are aligned to the last key differ from those aligned to the first."""
    if case.spec().bounds != (None, None) and case.query_length != case.key_length:
        raise Unsupported("its masks are aligned to the last key")

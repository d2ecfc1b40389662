# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""docs/kernels/sm90.md shows the barriers and the variants that the kernels' tables have."""

import dataclasses
import re
from pathlib import Path

import pytest
from generators.memory_map import sections

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.device.regions import Barriers
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import BackwardMemory, backward_config
from jax_fastattn.kernels.sm90.backward.dq_config import DqMemory, dq_config
from jax_fastattn.kernels.sm90.forward.config import SharedMemory, forward_config

PAGE = (Path(__file__).parents[2] / "docs" / "kernels" / "sm90.md").read_text()

# Between which words the drawing of a kernel lies.
DRAWINGS = {
    "Hopper: forward": ("## Forward", "- **Trip counts"),
    "Hopper: dkdv_dq": ("## Backward up to", "- **Order of a step.** S, P"),
    "Hopper: dkdv": ("    DkdvKernel", "`DkdvKernel` issues"),
    "Hopper: dq": ("    DqKernel", "    DkdvKernel"),
}


@pytest.mark.parametrize("title", DRAWINGS)
def test_a_drawing_has_every_barrier_of_its_kernel(title: str) -> None:
    (section,) = (x for x in sections() if x.title == title)
    begin, end = DRAWINGS[title]
    drawing = PAGE.partition(begin)[2].partition(end)[0]
    names = [row.name for row in section.table.rows if isinstance(row, Barriers)]
    names += [barrier.name for barrier in section.named or ()]
    assert names
    assert [name for name in names if not re.search(rf"\b{name}\b", drawing)] == []


def _spec(op: str, head_dim: int, *, soft_cap: bool = False) -> KernelSpec:
    spec = KernelSpec(op, "sm_90a", "bfloat16", head_dim, head_dim, family="sm90")  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(spec, features=(codes.SOFT_CAP,) if soft_cap else ())


def _kib(nbytes: int) -> str:
    return str(round(nbytes / 1024))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("length", ["short", "long"])
def test_the_table_of_forward_variants(head_dim: int, length: str) -> None:
    spec = _spec("forward", head_dim)
    config = forward_config(spec, short=length == "short")
    size = _kib(SharedMemory.of(spec, config).nbytes)
    row = re.search(rf"^\| {head_dim} \| (?:{length}|all) \| (.*)$", PAGE, re.MULTILINE)
    assert row is not None
    assert row[1].startswith(f"{config.warpgroups} x 64, {config.keys}, {config.stages} | {size} | ")
    words = {"ping-pong": config.ping_pong, "persistent": config.persistent, "registers": bool(config.q_in_regs)}
    assert {word: word in row[1] for word in words} == words


def _row(kernel: str, head_dim: str, queries: int, keys: int, stages: int, nbytes: int) -> str:
    return f"| `{kernel}` | {head_dim} | {queries}, {keys} | {stages} | {_kib(nbytes)} |"


def test_the_table_of_backward_variants() -> None:
    rows = []
    for head_dim, soft_cap in ((64, False), (64, True), (96, False), (128, False), (192, False), (256, False)):
        spec = _spec("backward", head_dim, soft_cap=soft_cap)
        main = backward_config(spec)
        label = f"{head_dim}, soft cap" if soft_cap else f"{head_dim}"
        kernel = "DkdvDqKernel" if main.adds_dq else "DkdvKernel"
        size = BackwardMemory.of(spec, main).table.nbytes
        rows.append(_row(kernel, label, main.queries, main.keys, main.stages, size))
        if not main.adds_dq:
            dq = dq_config(spec)
            rows.append(_row("DqKernel", label, dq.rows, dq.keys, dq.stages, DqMemory.of(spec, dq).table.nbytes))
    shown = re.findall(r"^\| `D\w+Kernel` \| .*$", PAGE, re.MULTILINE)
    assert sorted(shown) == sorted(rows)


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) < 260

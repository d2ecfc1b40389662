# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` on two devices, lowered for CUDA: each device launches the kernel that reads pages on its share."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_paged_ops import KINDS, PAGES

from jax_fastattn import paged_attention
from jax_fastattn.ffi import TARGET_NAME
from jax_fastattn.ops.cuda.launch import launch_p

ARGUMENTS = {
    "query": jnp.ones((6, 3, 8, 64), jnp.bfloat16),
    "key_pages": jnp.ones((9, 16, 4, 64), jnp.bfloat16),
    "value_pages": jnp.ones((9, 16, 4, 128), jnp.bfloat16),
    "page_table": jnp.zeros((6, 5), jnp.int32),
    "lengths": jnp.ones(6, jnp.int32),
}
OF_BATCH = ("query", "page_table", "lengths")
# How a mesh axis splits the arguments, and the shapes of query and key that a device then launches.
SPLITS: dict[str, tuple[dict[str, P], tuple[int, ...], tuple[int, ...]]] = {
    "batch": (dict.fromkeys(OF_BATCH, P("x")), (3, 3, 8, 64), (9, 16, 4, 64)),
    "heads": (dict.fromkeys(("query", *PAGES), P(None, None, "x")), (6, 3, 4, 64), (9, 16, 2, 64)),
}


def attend(arguments: dict[str, Any]) -> jax.Array:
    return paged_attention(**arguments, is_causal=True, implementation="cuda")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The operation, page rows, and operand shapes of each launch, as programs are lowered for a GPU."""
    calls.lower_for_cuda(monkeypatch, tmp_path / "cache", "sm_90a")
    found, bind = [], launch_p.bind

    def note(*operands: Any, **params: Any) -> Any:
        key = params["kernel"]
        found.append((key.op, key.page, [x.shape for x in operands]))
        return bind(*operands, **params)

    monkeypatch.setattr(launch_p, "bind", note)
    return found


def expected(split: str) -> list[Any]:
    _, query, key = SPLITS[split]
    value, batch = (*key[:3], 128), query[0]
    return [("decode", 16, [query, key, value, (batch, 5), (batch,), (batch,)])]


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(kind,))


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_each_device_reads_the_pages_of_its_share(
    split: str, kind: AxisType, launches: list[Any], tmp_path: Path
) -> None:
    """XLA partitions the program, and stops where this machine has no such launch; its dump has what a device runs."""
    mesh, specs = mesh_of(kind), SPLITS[split][0]
    arguments = {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in ARGUMENTS.items()}
    with jax.set_mesh(mesh):
        lowered = jax.jit(attend).trace(arguments).lower(lowering_platforms=("cuda",))
        # Unless another test of this process has registered a stand-in for the launch.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True})
    assert launches == expected(split)
    (path,) = tmp_path.glob("*attend*after_optimizations.txt")
    text = path.read_text()
    assert text.count(f'custom_call_target="{TARGET_NAME}"') == 1
    assert re.findall(r" (gather|all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", text) == []


@pytest.mark.parametrize("split", SPLITS)
def test_shard_map_reads_pages(split: str, launches: list[Any]) -> None:
    specs = {name: SPLITS[split][0].get(name, P()) for name in ARGUMENTS}
    run = jax.shard_map(attend, mesh=mesh_of(AxisType.Auto), in_specs=(specs,), out_specs=specs["query"])
    text = calls.cuda_text(run, ARGUMENTS)
    assert launches == expected(split)
    assert calls.count_launches(text) == 1 and "stablehlo.gather" not in text

# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the Hopper kernels, runs their PTX in `hopper_emulator` and compares with float64 references."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import cutlass
import jax.numpy as jnp
import numpy as np
from cutlass import cute
from emulated_backward import Sizes, draw_operands, with_sinks
from hopper_emulator import Operand
from hopper_emulator import launch as emulate
from ptx_emulator import Memory

from jax_fastattn.ffi.compiler import fake_arguments
from jax_fastattn.kernels.arguments import BackwardBuffers, ForwardBuffers, Scalars
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.device.wgmma import atom_columns
from jax_fastattn.kernels.sm90.backward import BackwardKernel
from jax_fastattn.kernels.sm90.backward_config import (
    BackwardConfig,
    BackwardMemory,
    DqConfig,
    backward_scratch,
)
from jax_fastattn.kernels.sm90.config import WARPGROUP_ROWS, ForwardConfig
from jax_fastattn.kernels.sm90.forward import ForwardKernel
from jax_fastattn.kernels.spec import KernelSpec, launch_buffers
from jax_fastattn.ops.cuda import row_delta

# So many that every CTA walks through several tiles.
MULTIPROCESSORS = 3


def heads_together(count: int, heads: int) -> int:
    """Heads of a section: fewer than there are."""
    return max(1, min(heads - 1, MULTIPROCESSORS // count))


def compile_kernel(kernel: Any, spec: KernelSpec) -> dict[str, str]:
    """The PTX of a host function's kernels by module, class and function; no GPU needed."""

    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {spec.arch} --keep-ptx --dump-dir {folder}"
        ptx = cute.compile(kernel, *fake_arguments(spec), options=options).artifacts.PTX
    entries = re.split(r"(?=\.visible \.entry)", ptx)[1:]
    names = [re.search(r"cutlass_(\w+?)_jax\w*sm90(\w+Kernel)_object", text.split("(")[0]) for text in entries]
    return {f"{name[2]}.{name[1]}": text for name, text in zip(names, entries, strict=True)}


def launch_scalars(spec: KernelSpec, sizes: Sizes) -> Scalars:
    """The scalars of a launch."""
    return Scalars(
        batch=sizes.batch,
        query_length=sizes.queries,
        key_length=sizes.keys,
        num_heads=sizes.kv_heads * spec.group,
        window_left=sizes.left,
        window_right=sizes.right,
        sinks_stride=sizes.kv_heads * spec.group,
        multiprocessors=MULTIPROCESSORS,
        scale=sizes.scale,
        logits_soft_cap=sizes.cap,
    )


def describe(memory: Memory, address: int, array: np.ndarray, rows: int, columns: int) -> Operand:
    """The TMA descriptor of an array `[batch, rows, heads, head dim]` for tiles of `rows` rows and padded columns."""
    return Operand(address, array.shape, rows, atom_columns(columns))


def place(spec: KernelSpec, arrays: dict[str, np.ndarray]) -> tuple[Memory, dict[str, int]]:
    """A memory with the buffers of a launch, and their addresses."""
    memory = Memory()
    return memory, {name: memory.add(arrays[name]) for name, dtype in launch_buffers(spec).items() if dtype is not None}


def start(launch: Launch, texts: dict[str, str], memory: Memory) -> None:
    """Runs a launch that was made of addresses and Python numbers, given the kernels of its host function."""
    parameters: list[Any] = []
    for box in launch.tma or ():
        if box is not None:
            shape = (box.batch, box.rows, box.heads, box.head_dim)
            parameters += [Operand(box.pointer, shape, box.box_rows, atom_columns(box.box_columns)), None]
    parameters += [_number(x) for members in launch.arguments for x in members if x is not None]
    kernel: Any = launch.kernel
    module = type(kernel.__self__).__module__.rpartition(".")[2]
    name = f"{module}{type(kernel.__self__).__name__}.{kernel.__name__}"
    emulate(texts[name], parameters, memory, _number(launch.grid), launch.shared_bytes)


def _number(x: Any) -> Any:
    return x.value if isinstance(x, cutlass.Int32) else x


def check_forward(spec: KernelSpec, sizes: Sizes | None = None, config: ForwardConfig | None = None) -> None:
    """Runs the kernel on poisoned operands, into buffers of NaN, and compares output and lse."""
    sizes = sizes or Sizes()
    kernel = ForwardKernel(spec, config)
    arrays, wanted = draw_operands(spec, sizes)
    out, lse = wanted["out"], wanted["lse"]
    if spec.sinks:
        arrays["sinks"], out, lse = with_sinks(spec, sizes, wanted)
    arrays |= {"out": np.full(out.shape, np.nan, arrays["query"].dtype)}
    arrays |= {"lse": np.full(lse.shape, np.nan, np.float32)}
    memory, address = place(spec, arrays)
    buffers = ForwardBuffers(**{name: address.get(name) for name in ForwardBuffers._fields})
    texts = compile_kernel(kernel, spec)
    for launch in kernel.launches(buffers, launch_scalars(spec, sizes)):
        start(launch, texts, memory)

    tolerance = 2**-7 if spec.dtype == "bfloat16" else 2**-10
    got = memory.read(address["out"], out.shape, arrays["out"].dtype).astype(np.float64)
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(out).max(), rtol=tolerance)
    np.testing.assert_allclose(memory.read(address["lse"], lse.shape, np.float32), lse, atol=1e-4, rtol=1e-5)


def check_backward(
    spec: KernelSpec, sizes: Sizes | None = None, config: BackwardConfig | None = None, dq: DqConfig | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Runs the kernels on poisoned operands, into buffers of NaN, and compares every gradient.

    Returns:
        dq, and what it should be, in float64.
    """
    sizes = sizes or Sizes()
    arrays, wanted = draw_operands(spec, sizes)
    found = run_backward(spec, sizes, arrays, config, dq)
    tolerance = 2**-6 if spec.dtype == "bfloat16" else 2**-9  # roundings of out, P and dS
    for name in ("dq", "dk", "dv"):
        largest = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], atol=tolerance * largest + 1e-5, rtol=0, err_msg=name)
    delta = np.asarray(row_delta(spec, jnp.asarray(found["stats"]), sizes.queries, None)).swapaxes(1, 2)
    np.testing.assert_allclose(delta, wanted["delta"], atol=tolerance * np.abs(wanted["delta"]).max() + 1e-6)
    return found["dq"], wanted["dq"]


def run_backward(
    spec: KernelSpec,
    sizes: Sizes,
    arrays: dict[str, np.ndarray],
    config: BackwardConfig | None = None,
    dq: DqConfig | None = None,
) -> dict[str, np.ndarray]:
    """What the kernels make of operands: the gradients in float64, and the statistics."""
    kernel = BackwardKernel(spec, config, dq)
    config, shared = kernel.main.config, kernel.main.memory
    heads = sizes.kv_heads * spec.group
    operands = {"dq": "query", "dk": "key", "dv": "value"}
    arrays = arrays | {name: np.full(arrays[x].shape, np.nan, arrays[x].dtype) for name, x in operands.items()}
    scratch = backward_scratch(spec, sizes.batch, sizes.queries, heads)
    for name, (shape, dtype) in zip(("stats", "dq_sum", "arrivals"), scratch, strict=False):
        arrays[name] = np.full(shape, np.nan if dtype == "float32" else -1000, dtype)
    memory, address = place(spec, arrays)
    buffers = BackwardBuffers(**{name: address.get(name) for name in BackwardBuffers._fields})
    given = launch_scalars(spec, sizes)
    ptx = compile_kernel(kernel, spec)
    sums = [address[name] for name in ("dq_sum", "arrivals") if spec.fused]
    optional = [address[x] for x in ("query_seq_lengths", "key_value_seq_lengths", "query_offset") if x in address]
    residuals = [address[name] for name in ("out", "lse", "dout", *(["dlse"] if spec.dlse else []))]
    key_tiles = -(-sizes.keys // config.keys)
    kv_heads = sizes.batch * sizes.kv_heads
    ahead = heads_together(key_tiles, kv_heads)
    prepared = min(ahead, kv_heads) if kernel.statistics.leaves else kv_heads
    scalars = sizes.batch, sizes.queries, sizes.keys, heads, sizes.left, sizes.right
    written = [*optional, *residuals, *([address["dq"]] if spec.fused else []), address["stats"]]
    emulate(
        ptx.pop("statisticsStatisticsKernel.kernel"),
        [*written, *(sums[1:] if spec.ordered else sums), *scalars, ahead, prepared, sizes.scale],
        memory,
        kernel.statistics.blocks(sizes.batch, sizes.queries, heads, prepared),
        0,
    )
    if kernel.statistics.leaves:
        emulate(
            ptx.pop("statisticsStatisticsKernel.later"),
            [*written, *sums[1:], *scalars, prepared, sizes.scale],
            memory,
            kernel.statistics.later_blocks(kv_heads, prepared),
        )

    def run(text: str, rows: tuple[int, int], columns: BackwardMemory, grid: tuple[int, int]) -> None:
        """One of the kernels with products, given rows of the boxes of queries and of keys, and (tiles, heads)."""
        parameters: list[Any] = []
        for name, box_rows, box_columns in (
            ("query", rows[0], columns.head_dim),
            ("key", rows[1], columns.head_dim),
            ("value", rows[1], columns.v_head_dim),
            ("dout", rows[0], columns.v_head_dim),
        ):
            parameters += [describe(memory, address[name], arrays[name], box_rows, box_columns), None]
        results = ["dk", "dv", *(["dq"] if spec.fused else [])]
        parameters += [*optional, *(address[name] for name in ("stats", *results))]
        parameters += sums
        together = heads_together(*grid)
        parameters += [sizes.queries, sizes.keys, heads, grid[1], together]
        parameters += [together]
        parameters += [sizes.left, sizes.right, sizes.scale, sizes.cap]
        tiles = grid[0] * grid[1]
        emulate(text, parameters, memory, min(tiles, MULTIPROCESSORS) if spec.fused else tiles, columns.nbytes)

    if not spec.fused:
        order = kernel.dq.order(given)
        query_tiles = -(-sizes.queries // kernel.dq.config.rows)
        order = order._replace(section=heads_together(query_tiles, order.heads))
        start(kernel.dq.launch(buffers, given, order), ptx, memory)
        ptx.pop("dqDqKernel.kernel")
    (main,) = ptx.values()
    run(
        main,
        (config.queries, WARPGROUP_ROWS),
        shared,
        (key_tiles, sizes.batch * sizes.kv_heads),
    )
    gradients = {x: memory.read(address[x], arrays[x].shape, arrays[x].dtype).astype(np.float64) for x in operands}
    return gradients | {"stats": memory.read(address["stats"], arrays["stats"].shape, np.float32)}

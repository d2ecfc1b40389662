# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`wgmma_steps.run` compared with `cute.gemm`: it compiles to the same machine code, and loads its sums once."""

import re
from typing import Any

import pytest
from resources import _sections, cubin

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.compilation import compiler
from jax_fastattn.kernels.device import wgmma, wgmma_steps

pytestmark = [pytest.mark.slow, pytest.mark.whole]

# Dtype, columns of the result, whether the left factor is in registers, whether the right one is stored transposed.
PRODUCTS = {
    "bfloat16-n64": ("bfloat16", 64, False, False),
    "bfloat16-n128-transposed": ("bfloat16", 128, False, True),
    "float16-n8-registers": ("float16", 8, True, False),
    "bfloat16-n256-registers-transposed": ("bfloat16", 256, True, True),
}
DEPTH = 64


def _by_cute(acc: cute.Tensor, steps: Any, *, accumulate: bool) -> None:
    """Emits the same instructions, each of which loads and stores all sums."""
    for i, (mma, a, b) in enumerate(steps):
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or i > 0)
        cute.gemm(atom, acc, a, b, acc)


class _Products:
    """Stores the sum of two products, whose factors are what shared memory holds."""

    def __init__(self, dtype: str, columns: int, a_in_registers: bool, b_transposed: bool) -> None:
        self.dtype, self.columns = wgmma.OPERAND_DTYPE[dtype], columns
        self.a_in_registers, self.b_transposed = a_in_registers, b_transposed

    @cute.jit
    def __call__(self, out: cute.Pointer, stream: Any) -> None:
        self.kernel(out).launch(grid=[1, 1, 1], block=[128, 1, 1], smem=2 * DEPTH * (64 + self.columns), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Pointer) -> None:
        self.multiply(out)

    def multiply(self, out: cute.Pointer) -> None:
        thread, shared = wgmma.thread_index(), wgmma.shared_memory()
        mma = wgmma.product(
            self.dtype, self.columns, a_in_registers=self.a_in_registers, b_transposed=self.b_transposed
        )
        left = wgmma.staged_tile(shared, self.dtype, (64, DEPTH), 1, 64 * DEPTH)
        shape = (DEPTH, self.columns) if self.b_transposed else (self.columns, DEPTH)
        right = wgmma.staged_tile(shared + 2 * 64 * DEPTH, self.dtype, shape, 1, DEPTH * self.columns)
        b = wgmma.operand_b(mma, wgmma.transposed(right) if self.b_transposed else right)[None, None, None, 0]
        if self.a_in_registers:
            a = wgmma.load_a(mma, left, 0, DEPTH // 16, thread)
        else:
            a = wgmma.operand_a(mma, left)[None, None, None, 0]
        acc = wgmma.accumulator(mma, (64, self.columns))
        acc.fill(0.0)
        for accumulate in (False, True):
            wgmma.gemm(mma, acc, a, b, accumulate=accumulate)
            warpgroup.wait_group(0)
        own = cute.make_tensor(out + thread * cute.size(acc), cute.make_layout(cute.size(acc)))
        for i in range(cute.size(acc)):
            own[i] = acc[i]


def _compiled(product: tuple[str, int, bool, bool]) -> tuple[dict[str, bytes], str]:
    """Returns the machine code of a kernel by section, and what it was before the passes of the compiler."""
    modules: list[str] = []

    def keep(dsl: Any, module: Any, name: str) -> None:
        del dsl, name
        modules.append(str(module))

    compiled = cute.compile(
        _Products(*product),
        cute.runtime.make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=16),
        cute.runtime.make_fake_stream(),
        options="--gpu-arch sm_90a",
        trace_finalize_hooks=keep,
        no_jit_engine=True,
    )
    sections = _sections(cubin(compiled.dump_to_object("test")))
    return {name: code for name, code in sections.items() if name.startswith(".text.")}, modules[0]


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_machine_code_is_that_of_cute_gemm(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler._open_runtime()
    code, module = _compiled(PRODUCTS[product])
    monkeypatch.setattr(wgmma_steps, "run", _by_cute)
    expected, reference = _compiled(PRODUCTS[product])
    assert reference.count("cute.gemm") == 2 * DEPTH // 16 and "cute.gemm" not in module
    assert code and code == expected


def test_a_product_loads_its_sums_once() -> None:
    _, module = _compiled(PRODUCTS["bfloat16-n64"])
    assert len(re.findall(r"llvm\.load .* -> f32", module)) == 2 * 64 // 2

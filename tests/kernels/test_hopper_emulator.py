# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What `hopper_emulator` makes of rings of one stage, and of a count: PTX written by hand, and its mutations.

A mutation drops the lines with one remark. Each breaks the kernel on a GPU, most of them only now and then.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hopper_emulator import launch
from ptx_emulator import Memory

_NBYTES = 4 * 128


def _wait(barrier: int, parity: str, remark: str) -> str:
    return f"""
{{
.reg .pred done;
again:
mbarrier.try_wait.parity.shared::cta.b64 done, [__dynamic_shmem__0+{barrier}], {parity}; // {remark}
@done bra over; // {remark}
bra again; // {remark}
over:
}}
"""


# A warpgroup adds up rows of 128 words that one thread of another loads. mbarriers: 512 "full", 520 "empty".
_SUM = f"""
.version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry sum(.param .u64 sum_param_0, .param .u64 sum_param_1, .param .u32 sum_param_2)
.reqntid 256, 1, 1
{{
.reg .pred %p<4>;
.reg .b32 %r<24>;
.reg .b64 %rd<8>;
ld.param.b64 %rd1, [sum_param_0];
ld.param.b64 %rd2, [sum_param_1];
ld.param.b32 %r1, [sum_param_2];
mov.u32 %r2, %tid.x;
mov.b32 %r3, __dynamic_shmem__0;
add.s32 %r4, %r3, {_NBYTES};
setp.ne.s32 %p1, %r2, 0;
@%p1 bra $L_ready;
mov.b32 %r5, 1;
mbarrier.init.shared.b64 [__dynamic_shmem__0+512], %r5;
mov.b32 %r6, 128;
mbarrier.init.shared.b64 [__dynamic_shmem__0+520], %r6;
$L_ready:
barrier.sync 0; // first sync
mov.b32 %r7, 0;
mov.b32 %r8, 0;
setp.lt.s32 %p2, %r2, 128;
@%p2 bra $L_step;
setp.ne.s32 %p3, %r2, 128;
@%p3 bra $L_end;
$L_load:
and.b32 %r9, %r7, 1;
xor.b32 %r10, %r9, 1;
{_wait(520, "%r10", "wait for empty")}
mov.b32 %r11, {_NBYTES};
mbarrier.arrive.expect_tx.shared.b64 %rd3, [__dynamic_shmem__0+512], %r11; // expect
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], {_NBYTES}, [%r4];
add.s64 %rd1, %rd1, {_NBYTES};
add.s32 %r7, %r7, 1;
setp.lt.s32 %p3, %r7, %r1;
@%p3 bra $L_load;
bra $L_end;
$L_step:
and.b32 %r9, %r7, 1;
{_wait(512, "%r9", "wait for full")}
shl.b32 %r12, %r2, 2;
add.s32 %r13, %r3, %r12;
ld.shared.b32 %r14, [%r13];
add.s32 %r8, %r8, %r14;
mbarrier.arrive.shared.b64 %rd4, [__dynamic_shmem__0+520]; // arrive
add.s32 %r7, %r7, 1;
setp.lt.s32 %p3, %r7, %r1;
@%p3 bra $L_step;
mul.wide.u32 %rd5, %r2, 4;
add.s64 %rd5, %rd2, %rd5;
st.global.b32 [%rd5], %r8;
$L_end:
ret;
}}
"""


def _sum(ptx: str) -> None:
    rows = np.arange(4 * 128, dtype=np.uint32).reshape(4, 128)
    memory = Memory()
    source, out = memory.add(rows), memory.add(np.zeros(128, np.uint32))
    launch(ptx, [source, out, len(rows) - 1], memory, 1, _NBYTES + 16)
    np.testing.assert_array_equal(memory.read(out, (128,), np.uint32), rows[:-1].sum(0))


def _without(ptx: str, remark: str) -> str:
    return "\n".join(line for line in ptx.splitlines() if not line.endswith(f"// {remark}"))


def test_a_ring_of_buffers_that_is_synchronized_passes() -> None:
    _sum(_SUM)


@pytest.mark.parametrize(
    ("remark", "error"),
    {
        "first sync": "not known to be initialised",
        "wait for empty": "without waiting",
        "wait for full": "without waiting",
        "expect": "all warpgroups wait",
        "arrive": "all warpgroups wait",
    }.items(),
)
def test_ring_without(remark: str, error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        _sum(_without(_SUM, remark))


def test_a_copy_outlives_its_cta() -> None:
    """One row more is loaded than waited for."""
    more = _SUM.replace("$L_load:", "add.s32 %r1, %r1, 1;\n$L_load:")
    with pytest.raises(RuntimeError, match="exits without waiting"):
        _sum(more)


def test_accesses_past_the_end() -> None:
    with pytest.raises(IndexError, match="shared access out of range"):
        _sum(_SUM.replace("ld.shared.b32 %r14, [%r13]", "ld.shared.b32 %r14, [%r13+512]"))


# A warpgroup multiplies ones, then twos, that one thread of another loads into a single stage. The stage is given back
# by an mbarrier of its own, 2312, and the loader waits for another one, 2320, before that. "Full" is 2304.
_MULTIPLY = f"""
.version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry multiply(.param .u64 multiply_param_0, .param .u64 multiply_param_1)
.reqntid 256, 1, 1
{{
.reg .pred %p<4>;
.reg .b32 %r<24>;
.reg .b64 %rd<8>;
.reg .f32 %f<4>;
ld.param.b64 %rd1, [multiply_param_0];
ld.param.b64 %rd2, [multiply_param_1];
mov.u32 %r2, %tid.x;
mov.b32 %r3, __dynamic_shmem__0;
add.s32 %r4, %r3, 2304;
setp.ne.s32 %p1, %r2, 0;
@%p1 bra $L_ready;
mov.b32 %r5, 1;
mbarrier.init.shared.b64 [__dynamic_shmem__0+2304], %r5;
mov.b32 %r6, 128;
mbarrier.init.shared.b64 [__dynamic_shmem__0+2312], %r6;
mbarrier.init.shared.b64 [__dynamic_shmem__0+2320], %r6;
$L_ready:
barrier.sync 0;
mov.b32 %r7, 0;
setp.lt.s32 %p2, %r2, 128;
@%p2 bra $L_step;
setp.ne.s32 %p3, %r2, 128;
@%p3 bra $L_end;
$L_load:
and.b32 %r9, %r7, 1;
xor.b32 %r10, %r9, 1;
{_wait(2320, "%r10", "wait for another one")}
{_wait(2312, "%r10", "wait for empty")}
mov.b32 %r11, 2304;
mbarrier.arrive.expect_tx.shared.b64 %rd3, [__dynamic_shmem__0+2304], %r11;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 2304, [%r4];
add.s64 %rd1, %rd1, 2304;
add.s32 %r7, %r7, 1;
setp.lt.s32 %p3, %r7, 2;
@%p3 bra $L_load;
bra $L_end;
$L_step:
and.b32 %r9, %r7, 1;
{_wait(2304, "%r9", "wait for full")}
mov.b64 %rd5, {8 << 16 | 16 << 32};
mov.b64 %rd6, {2048 >> 4 | 8 << 16 | 16 << 32};
setp.gt.s32 %p3, %r7, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0, %f1, %f2, %f3}}, %rd5, %rd6, %p3, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mbarrier.arrive.shared.b64 %rd4, [__dynamic_shmem__0+2312]; // give back
mbarrier.arrive.shared.b64 %rd4, [__dynamic_shmem__0+2320];
add.s32 %r7, %r7, 1;
setp.lt.s32 %p3, %r7, 2;
@%p3 bra $L_step;
mul.wide.u32 %rd5, %r2, 4;
add.s64 %rd5, %rd2, %rd5;
st.global.b32 [%rd5], %f3;
$L_end:
ret;
}}
"""


def _multiply(ptx: str) -> None:
    factors = np.repeat(np.array([1, 2], ml_dtypes.bfloat16), (64 + 8) * 16)
    memory = Memory()
    source, out = memory.add(factors), memory.add(np.zeros(128, np.float32))
    launch(ptx, [source, out], memory, 1, 2304 + 3 * 8)
    np.testing.assert_array_equal(memory.read(out, (128,), np.float32), 16 * 1 + 16 * 4)


def test_a_product_that_is_waited_for_passes() -> None:
    _multiply(_MULTIPLY)


def test_a_stage_is_given_back_before_the_product_has_read_it() -> None:
    """The product ends before the arrival at the other mbarrier, which orders it and the copy by luck."""
    early = _without(_MULTIPLY, "give back").replace(
        "wgmma.wait_group",
        "mbarrier.arrive.shared.b64 %rd4, [__dynamic_shmem__0+2312];\nwgmma.wait_group",
    )
    with pytest.raises(RuntimeError, match="without waiting for those who read it"):
        _multiply(early)


# Two warpgroups meet, each in code of its own.
_MEET = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry meet()
.reqntid 256, 1, 1
{
.reg .pred %p<2>;
.reg .b32 %r<2>;
mov.u32 %r1, %tid.x;
setp.lt.s32 %p1, %r1, 128;
@%p1 bra $L_first;
barrier.sync 1, 256;
bra $L_end;
$L_first:
barrier.sync 1, 256;
$L_end:
ret;
}
"""


def test_warpgroups_meet() -> None:
    launch(_MEET, [], Memory(), 1)


@pytest.mark.parametrize("count", [1, 2])
def test_an_aligned_barrier_at_two_places(count: int) -> None:
    """PTX leaves that undefined, and synccheck reports it."""
    with pytest.raises(RuntimeError, match="different instructions"):
        launch(_MEET.replace("barrier.sync", "bar.sync", count), [], Memory(), 1)


# A warpgroup waits until two threads of another have counted what they have stored.
_COUNT = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry count(.param .u64 count_param_0)
.reqntid 256, 1, 1
{
.reg .pred %p<4>;
.reg .b32 %r<8>;
.reg .b64 %rd<4>;
ld.param.b64 %rd1, [count_param_0];
mov.u32 %r1, %tid.x;
mov.b32 %r2, 1;
setp.lt.s32 %p1, %r1, 128;
@%p1 bra $L_wait;
setp.gt.s32 %p2, %r1, 129;
@%p2 bra $L_end;
st.global.b32 [%rd1+4], %r2;
atom.release.gpu.global.add.s32 %r3, [%rd1], %r2;
bra $L_end;
$L_wait:
mov.b32 %r4, 2;
{
.reg .pred done;
.reg .s32 found;
again:
ld.acquire.gpu.global.s32 found, [%rd1];
setp.eq.s32 done, found, %r4;
@done bra over;
bra again;
over:
}
ld.global.b32 %r5, [%rd1+4];
st.global.b32 [%rd1+8], %r5;
$L_end:
ret;
}
"""


def _count(ptx: str) -> None:
    memory = Memory()
    words = memory.add(np.zeros(3, np.int32))
    launch(ptx, [words], memory, 1)
    np.testing.assert_array_equal(memory.read(words, (3,), np.int32), [2, 1, 1])


def test_counts_in_global_memory_are_summed() -> None:
    _count(_COUNT)


def test_too_few_counted() -> None:
    with pytest.raises(RuntimeError, match="2 of 3 in global memory"):
        _count(_COUNT.replace("mov.b32 %r4, 2;", "mov.b32 %r4, 3;"))

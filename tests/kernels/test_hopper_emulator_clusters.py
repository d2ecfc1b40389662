# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What `hopper_emulator` makes of clusters: PTX written by hand, in the spelling of CuTe DSL 4.8.1, and its mutations.

A mutation drops the lines with one remark. Each breaks the kernel on a GPU, most of them only now and then.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hopper_emulator import Operand, launch, swizzle
from ptx_emulator import Memory

_THREADS, _NBYTES = 128, 4 * 128
_HEAD = """
.version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
"""
_REGISTERS = """
.reg .pred %p<4>;
.reg .b16 %rs<4>;
.reg .b32 %r<24>;
.reg .b64 %rd<8>;
"""


def _cluster_sync(remark: str) -> str:
    return f"""
barrier.cluster.arrive; // {remark}
barrier.cluster.wait; // {remark}
"""


def _wait(barrier: str, parity: str, remark: str) -> str:
    return f"""
{{
.reg .pred done;
again:
mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity}; // {remark}
@done bra over;
bra again;
over:
}}
"""


# Every thread of two CTAs sends its number to its twin, again and again: x becomes 3 x + the twin's x. What is sent
# lies at 0, what is received at 512; mbarriers are at 1024 ("full") and 1032 ("empty": the twin has read).
_EXCHANGE = f"""{_HEAD}
.visible .entry exchange(.param .u64 exchange_param_0, .param .u32 exchange_param_1)
.reqntid {_THREADS}, 1, 1
{{
{_REGISTERS}
ld.param.b64 %rd1, [exchange_param_0];
ld.param.b32 %r1, [exchange_param_1];
mov.u32 %r2, %tid.x;
mov.u32 %r3, %cluster_ctarank;
xor.b32 %r3, %r3, 1;
mov.u32 %r4, %ctaid.x;
mad.lo.s32 %r5, %r4, {_THREADS}, %r2;
mul.wide.u32 %rd2, %r5, 4;
add.s64 %rd2, %rd1, %rd2;
mov.b32 %r6, __dynamic_shmem__0;
shl.b32 %r7, %r2, 2;
add.s32 %r7, %r6, %r7;
add.s32 %r8, %r6, 1024;
add.s32 %r9, %r6, 1032;
add.s32 %r10, %r6, {_NBYTES};
mapa.shared::cluster.u32 %r11, %r8, %r3;
mapa.shared::cluster.u32 %r12, %r9, %r3;
mapa.shared::cluster.u32 %r13, %r10, %r3;
setp.ne.s32 %p1, %r2, 0;
@%p1 bra $L_ready;
mov.b32 %r14, 1;
mbarrier.init.shared.b64 [__dynamic_shmem__0+1024], %r14;
mov.b32 %r15, {_THREADS};
mbarrier.init.shared.b64 [__dynamic_shmem__0+1032], %r15; // empty
fence.mbarrier_init.release.cluster;
$L_ready:
{_cluster_sync("first cluster sync")}
mov.b32 %r16, 0;
$L_step:
and.b32 %r17, %r16, 1;
xor.b32 %r18, %r17, 1;
{_wait("%r9", "%r18", "wait for empty")}
st.shared.b32 [%r7], %r5;
fence.proxy.async.shared::cta; // fence
barrier.sync 0;
@%p1 bra $L_sent;
mov.b32 %r19, {_NBYTES};
mbarrier.arrive.expect_tx.shared.b64 %rd3, [__dynamic_shmem__0+1024], %r19; // expect
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r13], [%r6], {_NBYTES}, [%r11];
$L_sent:
{_wait("%r8", "%r17", "wait for full")}
ld.shared.b32 %r20, [%r7+{_NBYTES}];
mad.lo.s32 %r5, %r5, 3, %r20;
mov.b32 %r21, 1;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12], %r21; // arrive
add.s32 %r16, %r16, 1;
setp.lt.s32 %p2, %r16, %r1;
@%p2 bra $L_step;
st.global.b32 [%rd2], %r5;
{_cluster_sync("last cluster sync")}
ret;
}}
"""

# Each of two CTAs loads 8 rows of an array for both.
_MULTICAST = f"""{_HEAD}
.visible .entry multicast(.param .align 64 .b8 multicast_param_0[128], .param .u64 multicast_param_1)
.reqntid {_THREADS}, 1, 1
{{
{_REGISTERS}
mov.b64 %rd1, multicast_param_0;
cvta.param.u64 %rd1, %rd1;
ld.param.b64 %rd2, [multicast_param_1];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %cluster_ctaid.x;
setp.ne.s32 %p1, %r1, 0;
@%p1 bra $L_ready;
mov.b32 %r3, 1;
mbarrier.init.shared.b64 [__dynamic_shmem__0+2048], %r3;
fence.mbarrier_init.release.cluster;
mov.b32 %r4, 2048;
mbarrier.arrive.expect_tx.shared.b64 %rd3, [__dynamic_shmem__0+2048], %r4; // expect
$L_ready:
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
mov.b32 %r5, __dynamic_shmem__0;
@%p1 bra $L_sent;
shl.b32 %r6, %r2, 3;
shl.b32 %r7, %r2, 10;
add.s32 %r7, %r7, %r5;
mov.b32 %r8, 0;
mov.b32 %r9, 1;
mov.b16 %rs1, 3; // mask of both
mov.b16 %rs1, 1; // mask of one
cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster \
[%r7], [%rd1, {{%r8, %r6, %r9, %r8}}], [__dynamic_shmem__0+2048], %rs1;
$L_sent:
add.s32 %r10, %r5, 2048;
{_wait("%r10", "0", "wait for full")}
shl.b32 %r11, %r1, 4;
add.s32 %r11, %r5, %r11;
ld.shared.v4.b32 {{%r12, %r13, %r14, %r15}}, [%r11];
mov.u32 %r16, %ctaid.x;
mad.lo.s32 %r16, %r16, {_THREADS}, %r1;
mul.wide.u32 %rd4, %r16, 16;
add.s64 %rd4, %rd2, %rd4;
st.global.v4.b32 [%rd4], {{%r12, %r13, %r14, %r15}};
{_cluster_sync("last cluster sync")}
ret;
}}
"""

# The CTA of rank %r1 stores in the memory of the other, which loads that.
_REMOTE = f"""{_HEAD}
.visible .entry remote(.param .u64 remote_param_0, .param .u32 remote_param_1)
.reqntid {_THREADS}, 1, 1
{{
{_REGISTERS}
ld.param.b64 %rd1, [remote_param_0];
ld.param.b32 %r1, [remote_param_1];
mov.u32 %r2, %cluster_ctarank;
mov.u32 %r3, %tid.x;
shl.b32 %r4, %r3, 2;
mov.b32 %r5, __dynamic_shmem__0;
add.s32 %r4, %r4, %r5;
setp.ne.s32 %p1, %r1, %r2;
{_cluster_sync("first cluster sync")}
@%p1 bra $L_stored;
xor.b32 %r6, %r2, 1;
mapa.shared::cluster.u32 %r7, %r4, %r6;
add.s32 %r8, %r3, 7;
st.shared::cluster.b32 [%r7], %r8;
ld.shared::cluster.b32 %r8, [%r7];
$L_stored:
{_cluster_sync("last cluster sync")}
setp.eq.s32 %p2, %r1, %r2;
@%p2 bra $L_end;
mul.wide.u32 %rd2, %r3, 4;
add.s64 %rd2, %rd1, %rd2;
ld.shared::cluster.b32 %r9, [%r4]; // load
st.global.b32 [%rd2], %r9; // load
$L_end:
ret;
}}
"""


def _without(ptx: str, *remarks: str) -> str:
    return "\n".join(line for line in ptx.splitlines() if not line.endswith(tuple(f"// {x}" for x in remarks)))


def _exchange(ptx: str, steps: int = 5, ctas: int = 4) -> None:
    memory = Memory()
    out = memory.add(np.zeros(ctas * _THREADS, np.uint32))
    launch(ptx, [out, steps], memory, ctas, 1040, cluster=2)
    wanted = np.arange(ctas * _THREADS, dtype=np.uint32).reshape(ctas // 2, 2, _THREADS)
    for _ in range(steps):
        wanted = 3 * wanted + wanted[:, ::-1]
    np.testing.assert_array_equal(memory.read(out, wanted.shape, np.uint32), wanted)


def test_exchange() -> None:
    _exchange(_EXCHANGE)


@pytest.mark.parametrize(
    ("remark", "error"),
    {
        "wait for empty": "without waiting",
        "wait for full": "all warpgroups wait",
        "fence": "without a fence",
        "expect": "all warpgroups wait",
        "arrive": "all warpgroups wait",
        "empty": "not known to be initialised",
        "first cluster sync": "not known to have started",
        "last cluster sync": "exit",
    }.items(),
)
def test_exchange_without(remark: str, error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        _exchange(_without(_EXCHANGE, remark))


def test_source_written_early() -> None:
    """The copy has read its source when the twin has waited and arrived here; even zeros come too early before."""
    early = _EXCHANGE.replace("$L_sent:", "$L_sent:\nst.shared.b32 [%r7], %r16;")
    with pytest.raises(RuntimeError, match="without waiting for the copy that reads it"):
        _exchange(early, steps=1)


def _multicast(ptx: str) -> None:
    memory = Memory()
    array = np.arange(16 * 3 * 64, dtype=np.uint16).reshape(1, 16, 3, 64)
    out = memory.add(np.zeros(2 * 2048, np.uint8))
    launch(ptx, [Operand(memory.add(array), array.shape, 8, 64), out], memory, 2, 2056, cluster=2)
    wanted = np.zeros(2048, np.uint8)
    wanted[swizzle(np.arange(2048), 64)] = np.ascontiguousarray(array[0, :, 1]).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(memory.read(out, (2, 2048), np.uint8), np.stack([wanted] * 2))


def test_multicast() -> None:
    _multicast(_without(_MULTICAST, "mask of one"))


@pytest.mark.parametrize(
    ("remark", "error"),
    {
        "mask of both": "all warpgroups wait",
        "wait for full": "without waiting",
        "expect": "all warpgroups wait",
        "last cluster sync": "exit",
    }.items(),
)
def test_multicast_without(remark: str, error: str) -> None:
    remarks = [remark] if remark == "mask of both" else ["mask of one", remark]
    with pytest.raises(RuntimeError, match=error):
        _multicast(_without(_MULTICAST, *remarks))


def _remote(ptx: str, writer: int) -> None:
    memory = Memory()
    out = memory.add(np.zeros(_THREADS, np.uint32))
    launch(ptx, [out, writer], memory, 2, _NBYTES, cluster=2)
    np.testing.assert_array_equal(memory.read(out, (_THREADS,), np.uint32), np.arange(_THREADS) + 7)


@pytest.mark.parametrize("writer", [0, 1])
def test_remote_accesses(writer: int) -> None:
    _remote(_REMOTE, writer)
    with pytest.raises(RuntimeError, match="not known to have started"):
        _remote(_without(_REMOTE, "first cluster sync"), writer)
    with pytest.raises(RuntimeError, match="exit"):
        _remote(_without(_REMOTE, "last cluster sync", "load"), writer)
    with pytest.raises(IndexError, match="rank 3 of 2"):
        _remote(_REMOTE.replace("xor.b32 %r6, %r2, 1", "mov.b32 %r6, 3"), writer)


def test_local_instruction_on_a_remote_address() -> None:
    with pytest.raises(IndexError, match="shared access out of range"):
        _remote(re.sub("st.shared::cluster", "st.shared", _REMOTE), 0)


def test_grid_of_clusters() -> None:
    with pytest.raises(ValueError, match="a grid of 3 CTAs"):
        launch(_EXCHANGE, [0, 1], Memory(), 3, 1040, cluster=2)

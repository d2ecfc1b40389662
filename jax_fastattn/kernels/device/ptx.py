# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""PTX instructions as functions of device values: what mma.sync kernels need and `cute.arch` lacks.

Addresses are in bytes, Int32 of shared memory and Int64 of global memory. Instructions that touch memory have side
effects, so that they keep their order against barriers and cp.async groups.
"""

from typing import Any

from cutlass import Boolean, Float16, Float32, Int32, Int64, cute, select_
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

Registers = list[Int32]

# Instructions call 16-bit types by these names.
MMA_DTYPE = {"bfloat16": "bf16", "float16": "f16"}

_RETURN = {"f": (T.f32, Float32), "F": (T.f32, Float32), "r": (T.i32, Int32), "l": (T.i64, Int64)}


def asm(
    text: str, results: str, inputs: str, values: list[Any], side_effects: bool = False, loc: Any = None, ip: Any = None
) -> Any:
    """Emits inline assembly; each value has a constraint letter (f, r, l), or F, a result that is written early."""
    types = [_RETURN[letter][0]() for letter in results]
    constraints = ",".join([f"=&{x.lower()}" if x.isupper() else f"={x}" for x in results] + list(inputs))
    struct = llvm.StructType.get_literal(types) if len(types) > 1 else (types[0] if types else None)  # pyright: ignore[reportAttributeAccessIssue] (its stub lacks it)
    out = llvm.inline_asm(
        struct,
        [value.ir_value(loc=loc, ip=ip) for value in values],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(types) == 1:
        return _RETURN[results][1](out)
    return [
        _RETURN[letter][1](llvm.extractvalue(types[i], out, [i], loc=loc, ip=ip)) for i, letter in enumerate(results)
    ]


@dsl_user_op
def ldmatrix(address: Int32, *, transpose: bool = False, loc: Any = None, ip: Any = None) -> Registers:
    """Loads four 8 x 8 matrices: lanes 8 i .. 8 i + 7 give the row addresses of matrix i, register i receives it."""
    trans = ".trans" if transpose else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return asm(text, "rrrr", "r", [Int32(address)], True, loc, ip)


@dsl_user_op
def transpose_matrix(word: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Transposes an 8 x 8 matrix of 16-bit elements, of which each lane of the warp has two as in an accumulator."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", "r", [word], True, loc, ip)


@dsl_user_op
def mma(
    a: Registers, b: Registers, c: list[Float32], *, dtype: str = "bf16", loc: Any = None, ip: Any = None
) -> list[Float32]:
    """Returns c + a b of one m16n8k16 fragment: four registers of a, two of b, four of c; dtype is "bf16" or "f16"."""
    places = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {places};"
    return asm(text, "ffff", "rrrrrrffff", [*a, *b, *[Float32(x) for x in c]], False, loc, ip)


@dsl_user_op
def copy_async(shared: Int32, source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Issues a cp.async of 16 bytes, past L1."""
    asm("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "", "rl", [shared, source], True, loc, ip)


@dsl_user_op
def copy_async_or_zero(shared: Int32, source: Int64, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Issues a cp.async of `size` (0 or 16) bytes; the rest of 16 becomes zero. Nothing is read when size is 0."""
    asm("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "", "rlr", [shared, source, size], True, loc, ip)


@dsl_user_op
def store_shared(address: Int32, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 4 bytes."""
    asm("st.shared.b32 [$0], $1;", "", "rr", [address, value], True, loc, ip)


@dsl_user_op
def store_shared_chunk(address: Int32, values: Registers, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 16 bytes."""
    asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "", "rrrrr", [address, *values], True, loc, ip)


@dsl_user_op
def load_shared_chunk(address: Int32, *, loc: Any = None, ip: Any = None) -> Registers:
    """Loads 16 bytes."""
    return asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "r", [address], True, loc, ip)


@dsl_user_op
def store_global_chunk(address: Int64, values: Registers, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 16 bytes."""
    asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", "lrrrr", [address, *values], True, loc, ip)


@dsl_user_op
def pack(
    low: Float32,
    high: Float32,
    *,
    dtype: str = "bf16",
    floor: bool = False,
    apart: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Int32:
    """Rounds two values to nearest and packs them, `low` into the lower half; dtype is "bf16" or "f16".

    With a `floor` negative values become 0. `apart` keeps it from sharing registers that a product in flight reads.
    """
    text = f"cvt.rn{'.relu' if floor else ''}.{dtype}x2.f32 $0, $1, $2;"
    return asm(text, "r", "ff", [Float32(high), Float32(low)], apart, loc, ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Returns a b + c, rounded once."""
    return asm("fma.rn.ftz.f32 $0, $1, $2, $3;", "f", "fff", [Float32(a), Float32(b), Float32(c)], False, loc, ip)


@dsl_user_op
def maximum(a: Float32, b: Float32, *, keep_nan: bool = False, loc: Any = None, ip: Any = None) -> Float32:
    """Returns the larger value; of a NaN and a number the number, or NaN if `keep_nan`."""
    return asm(f"max{'.NaN' if keep_nan else ''}.f32 $0, $1, $2;", "f", "ff", [Float32(a), Float32(b)], False, loc, ip)


@dsl_user_op
def magnitude(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Returns |x|, which most instructions take as an operand for nothing."""
    return asm("abs.f32 $0, $1;", "f", "f", [Float32(x)], False, loc, ip)


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Returns 2^x by one MUFU (relative error 2^-22); exp2(-inf) = 0."""
    return asm("ex2.approx.ftz.f32 $0, $1;", "f", "f", [Float32(x)], False, loc, ip)


@dsl_user_op
def log2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Returns log2(x) by one MUFU; log2(0) = -inf."""
    return asm("lg2.approx.ftz.f32 $0, $1;", "f", "f", [Float32(x)], False, loc, ip)


@dsl_user_op
def reciprocal(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Returns 1 / x by one MUFU (1 ulp); reciprocal(inf) = 0."""
    return asm("rcp.approx.ftz.f32 $0, $1;", "f", "f", [Float32(x)], False, loc, ip)


@dsl_user_op
def tanh(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Returns tanh(x) by one MUFU (relative error 2^-11)."""
    return asm("tanh.approx.f32 $0, $1;", "f", "f", [Float32(x)], False, loc, ip)


@dsl_user_op
def wait_barrier(address: Int32, phase: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Waits for the end of a phase (its parity) of the mbarrier at a shared-memory address.

    `cute.arch.mbarrier_wait` passes a time limit: its loop has a second test and a sleep, which cost a tenth of an
    attention step even when the phase has long ended.
    """
    text = (
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
        "@done bra over;\nbra again;\nover:\n}"
    )
    asm(text, "", "rr", [Int32(address), Int32(phase)], True, loc, ip)


@dsl_user_op
def sync_apart(barrier: Any = 0, threads: int | None = None, *, loc: Any = None, ip: Any = None) -> None:
    """Waits at a barrier of `threads` threads (default: all), which may come to different instructions of this kind.

    `cute.arch.barrier` and `cute.arch.sync_threads` emit bar.sync, an aligned barrier: PTX may then assume that all
    threads come to one and the same instruction.
    """
    count = "" if threads is None else f", {threads}"
    asm(f"barrier.sync $0{count};", "", "r", [Int32(barrier)], True, loc, ip)


@dsl_user_op
def store_global(address: Int64, value: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 4 bytes."""
    asm("st.global.f32 [$0], $1;", "", "lf", [address, Float32(value)], True, loc, ip)


@dsl_user_op
def store_global_int(address: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 4 bytes."""
    asm("st.global.b32 [$0], $1;", "", "lr", [address, value], True, loc, ip)


@dsl_user_op
def store_global_byte(address: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores the lowest byte."""
    asm("st.global.u8 [$0], $1;", "", "lr", [address, value], True, loc, ip)


@dsl_user_op
def bits(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Returns the bits of a float32. Within one sign, they are ordered like the magnitudes, with NaN last."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def from_bits(x: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Returns the float32 that has these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def where(condition: Boolean | bool, a: Any, b: Any) -> Any:
    """Returns a where the condition holds, else b; both of the same device type, or anything for a Python condition."""
    if isinstance(condition, bool):
        return a if condition else b
    return type(a)(select_(condition, a, b))


@dsl_user_op
def load_global_chunk(address: Int64, *, loc: Any = None, ip: Any = None) -> Registers:
    """Loads 16 bytes."""
    return asm("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "l", [address], True, loc, ip)


@dsl_user_op
def load_global(address: Int64, *, loc: Any = None, ip: Any = None) -> Float32:
    """Loads 4 bytes."""
    return asm("ld.global.f32 $0, [$1];", "f", "l", [address], True, loc, ip)


@dsl_user_op
def any_of(barrier: Int32, threads: int, x: Boolean, *, loc: Any = None, ip: Any = None) -> Boolean:
    """Waits at a named barrier for `threads` threads, and returns whether x is true in one of them."""
    text = (
        "{\n.reg .pred own, any;\nsetp.ne.s32 own, $2, 0;\n"
        f"barrier.cta.red.or.pred any, $1, {threads}, own;\nselp.s32 $0, 1, 0, any;\n}}"
    )
    own = where(x, Int32(1), Int32(0))
    return Boolean(asm(text, "r", "rr", [Int32(barrier), own], True, loc, ip) != 0)


@dsl_user_op
def store_global_pair(address: Int64, low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores two float32."""
    asm("st.global.v2.f32 [$0], {$1, $2};", "", "lff", [address, low, high], True, loc, ip)


@dsl_user_op
def store_shared_pair(address: Int32, low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Stores two float32."""
    asm("st.shared.v2.f32 [$0], {$1, $2};", "", "rff", [address, low, high], True, loc, ip)


@dsl_user_op
def load_shared_pair(address: Int32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Loads two float32."""
    return asm("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", "r", [address], True, loc, ip)


@dsl_user_op
def load_shared_pairs(address: Int32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Loads two neighboring pairs of float32."""
    return asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "r", [address], True, loc, ip)


@dsl_user_op
def copy_async_pair_or_zero(shared: Int32, source: Int64, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Issues a cp.async of `size` (0 or 8) bytes; the rest of 8 becomes zero. Nothing is read when size is 0."""
    asm("cp.async.ca.shared.global [$0], [$1], 8, $2;", "", "rlr", [shared, source, size], True, loc, ip)


@dsl_user_op
def unpack(pair: Int32, *, dtype: str = "bf16", loc: Any = None, ip: Any = None) -> list[Float32]:
    """Returns the two values of a register, lower half first; dtype is "bf16" or "f16"."""
    if dtype == "bf16":
        # A bfloat16 is the upper half of its float32.
        return [from_bits(half) for half in (pair << 16, pair & Int32(-0x10000))]
    vector = llvm.bitcast(ir.VectorType.get([2], T.f16()), pair.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)  # pyright: ignore[reportAttributeAccessIssue] (its stub lacks it)
    index = [Int32(i).ir_value(loc=loc, ip=ip) for i in range(2)]
    return [Float32(Float16(llvm.extractelement(vector, i, loc=loc, ip=ip))) for i in index]


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """Returns the thread's index in its CTA, read anew: what is computed from it lives in no register until then."""
    return asm("mov.u32 $0, %tid.x;", "r", "", [], True, loc, ip)


@dsl_user_op
def move(x: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Copies x to another register, since the compiler does not know that a product still reads the old one."""
    return asm("mov.b32 $0, $1;", "r", "r", [x], True, loc, ip)


def transpose_quad(registers: Registers, lane: Int32) -> Registers:
    """Transposes the 4 x 4 matrix of four lanes (a quad) with four registers each: two butterflies of two shuffles."""
    for bit in (1, 2):
        upper = (lane & bit) != 0
        for low in range(4):
            high = low + bit
            if not low & bit:
                sent = where(upper, registers[low], registers[high])
                received = cute.arch.shuffle_sync_bfly(sent, offset=bit)
                pair = where(upper, received, registers[low]), where(upper, registers[high], received)
                registers = [{low: pair[0], high: pair[1]}.get(i, x) for i, x in enumerate(registers)]
    return registers


@dsl_user_op
def copy_bulk(shared: Int32, source: Int64, nbytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Copies `nbytes` (a multiple of 16) by one lane, from global to shared memory; the mbarrier counts them."""
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {nbytes}, [$2];"
    asm(text, "", "rlr", [shared, source, barrier], True, loc, ip)


@dsl_user_op
def store_matrices_transposed(address: Int32, values: Registers, *, loc: Any = None, ip: Any = None) -> None:
    """Stores four 8 x 8 matrices of fragments, transposed; lanes 8 i .. 8 i + 7 give the row addresses of matrix i."""
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
    asm(text, "", "rrrrr", [address, *values], True, loc, ip)


@dsl_user_op
def add_global_chunk(address: Int64, values: list[Float32], *, loc: Any = None, ip: Any = None) -> None:
    """Adds four float32 atomically to 16 bytes of global memory."""
    asm("red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "", "lffff", [address, *values], True, loc, ip)


@dsl_user_op
def add_global(address: Int64, value: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Adds to a float32 of global memory atomically."""
    asm("red.relaxed.gpu.global.add.f32 [$0], $1;", "", "lf", [address, Float32(value)], True, loc, ip)


@dsl_user_op
def load_shared(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Loads 4 bytes."""
    return asm("ld.shared.b32 $0, [$1];", "r", "r", [address], True, loc, ip)


@dsl_user_op
def fetch_add_global(address: Int64, value: Int32, order: str, *, loc: Any = None, ip: Any = None) -> Int32:
    """Adds to 4 bytes of global memory atomically and returns what was there.

    `order` is "relaxed"; "release", which shows all writes that this thread knows of to one that acquires the sum; or
    "acq_rel", by which it also sees what others have released so. A release waits for all that the SM has written.
    """
    return asm(f"atom.{order}.gpu.global.add.s32 $0, [$1], $2;", "r", "lr", [address, value], True, loc, ip)


@dsl_user_op
def wait_global(address: Int64, count: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Waits until 4 bytes of global memory are `count`; sees what was written before they became that."""
    text = (
        "{\n.reg .pred done;\n.reg .s32 found;\nagain:\nld.acquire.gpu.global.s32 found, [$0];\n"
        "setp.eq.s32 done, found, $1;\n@done bra over;\nbra again;\nover:\n}"
    )
    asm(text, "", "lr", [address, count], True, loc, ip)


@dsl_user_op
def load_global_ordered(address: Int64, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Loads four float32 that other CTAs have written, after a fence."""
    return asm("ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "l", [address], True, loc, ip)


@dsl_user_op
def load_global_int(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Loads 4 bytes."""
    return asm("ld.global.b32 $0, [$1];", "r", "l", [address], True, loc, ip)


@dsl_user_op
def load_constant_int(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Loads 4 bytes that nothing writes while the kernel runs; not at all if they are not used."""
    return asm("ld.global.nc.b32 $0, [$1];", "r", "l", [address], False, loc, ip)


@dsl_user_op
def load_constant_pair(address: Int64, *, loc: Any = None, ip: Any = None) -> Registers:
    """Loads 8 bytes that nothing writes while the kernel runs; not at all if they are not used."""
    return asm("ld.global.nc.v2.b32 {$0, $1}, [$2];", "rr", "l", [address], False, loc, ip)


@dsl_user_op
def load_global_byte(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Loads a byte."""
    return asm("ld.global.u8 $0, [$1];", "r", "l", [address], True, loc, ip)


@dsl_user_op
def permute(x: Int32, y: Int32, selector: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """Returns four of the eight bytes of x and y, or the sign of a byte in all of its bits, see PTX's `prmt`."""
    return asm(f"prmt.b32 $0, $1, $2, {selector};", "r", "rr", [x, y], False, loc, ip)


@dsl_user_op
def bit_range(first: Int32, count: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Returns a word whose bits [first, first + count) are set; both numbers are 0 to 32."""
    return asm("bmsk.clamp.b32 $0, $1, $2;", "r", "rr", [Int32(first), Int32(count)], False, loc, ip)

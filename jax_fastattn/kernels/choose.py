# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the kernel of a problem: its family by the architecture, its config by the tables and by sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.architectures import H100_MULTIPROCESSORS
from jax_fastattn.kernels.arguments.precision import products_of
from jax_fastattn.kernels.bias_shapes import bias_kind, stored_dtype
from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.decode.config import BLOCK_ROWS, MAX_ROWS
from jax_fastattn.kernels.decode.split import heads_side_by_side
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import config as sm80_backward
from jax_fastattn.kernels.sm80.decode import config as sm80_decode
from jax_fastattn.kernels.sm80.forward import config as sm80
from jax_fastattn.kernels.sm80.tangent import config as sm80_tangent
from jax_fastattn.kernels.sm90.backward.config import LONG_LENGTH, backward_configs
from jax_fastattn.kernels.sm90.decode import config as sm90_decode
from jax_fastattn.kernels.sm90.forward import config as sm90
from jax_fastattn.kernels.sm90.geometry import split_obstacle
from jax_fastattn.kernels.sm90.tangent import config as sm90_tangent
from jax_fastattn.kernels.sums.out_rests import with_rests
from jax_fastattn.kernels.sums.row_means import with_means
from jax_fastattn.kernels.sums.tiles import key_list_tiles
from jax_fastattn.kernels.tiles.lists import PrepassConfig, Sizes, has_too_many_bits
from jax_fastattn.layouts.packed_masks import problem_by_rows
from jax_fastattn.spec import AttentionSpec, Problem, is_known

# The Hopper forward has configs of its own up to these T and S, where a row has few tiles.
SHORT_LENGTH = 2048

# This limit replaces the one above in the forward pass if its features load tiles.
SHORT_LOADING_LENGTH = 1024

# Keys of few queries are split from this many keys on; fewer were not timed.
MIN_SPLIT_KEYS = 128

# Keys may be split for up to this many rows, queries times query heads of a group; for more see `_most_split_rows`.
MAX_SPLIT_ROWS = 64
# This many SMs stream as much as the whole GPU: an H100 has 3 TB/s, one of its SMs 75 GB/s.
_STREAMING_SMS = 40

# The GPU reads this many bytes in the time that the launch of the combine kernel takes.
_LAUNCH_NBYTES = 16 << 20

# A CTA alone reads at most this many bytes of a unit: 2k keys of head dim 128 with 16 bits. Where 40 or 64 CTAs read
# four times as much, they stream less than `_STREAMING_SMS` says, and the split call takes 0.75 to 0.93 of the time.
_MAX_WHOLE_NBYTES = 1 << 20

# Units of deterministic calls are cut into portions of this many keys: at head dim 128, what a CTA alone reads of a
# unit, see above. notebook/bits.md has a model of other numbers.
_PORTION_KEYS = 2048

# CTAs add in one order up to this mean length of packed sequences; the padding on each side counts as one of them.
_ORDERED_MEAN_LENGTH = 1536

# These make the lists of batch entries differ, with any mask.
_PER_ENTRY = {"query_segment_ids", "query_seq_lengths", "key_value_seq_lengths", "query_offset"}


def adds_in_order(problem: Problem, *, one_sided_window: bool) -> bool:
    """Returns whether CTAs add to sums of dq in one order: for the same bits in every run, or because it is faster.

    It saves zeros and many additions. It is faster if what the heads in flight read stays in L2 from one tile of keys
    to the next, which needs short heads; and if CTAs that begin together wait for each other less than that saves: with
    many tiles of keys for each SM, or later keys that fewer queries see. Packed sequences have a known mean length.
    Documents of ids or a `mask_mod` count as short if query heads come in groups, which wait less. So do documents of a
    long mask that comes with `is_causal`, since it hides more than later keys. `one_sided_window` is of `BoundsKind`.
    """
    if problem.spec.deterministic:
        return True
    if problem.num_sequences:
        return max(problem.query_length, problem.key_length) <= _ORDERED_MEAN_LENGTH * problem.num_sequences
    longest = max(problem.query_length, problem.key_length)
    if one_sided_window:
        return longest <= _ordered_length(problem) or _tells_documents_apart(problem)
    key_tiles = problem.batch * problem.num_kv_heads * -(-problem.key_length // 128)
    return longest <= 512 and key_tiles >= 2 * H100_MULTIPROCESSORS


def _ordered_length(problem: Problem) -> int:
    """Returns up to which length CTAs add in one order if the window is one-sided and nothing else is known.

    Heads of a group that share tiles of keys wait less, see `BackwardConfig.interleaves_heads`.
    """
    key_tiles = problem.batch * problem.num_kv_heads * -(-problem.key_length // 128)
    is_causal = problem.spec.bounds[0] is None and not is_listed(problem)
    is_large = problem.head_dim > 64 and key_tiles >= 4 * H100_MULTIPROCESSORS
    return 2048 if problem.group > 1 and is_causal and is_large else 1024


def _tells_documents_apart(problem: Problem) -> bool:
    """Returns whether ids or a function tell documents apart of heads in groups, or a mask probably does."""
    spec, mask = problem.spec, problem.mask_shape
    if "query_segment_ids" in spec.present or codes.tells_documents_apart(spec.mask_mod):
        return problem.group > 1
    long = max(problem.query_length, problem.key_length) > SHORT_LENGTH
    return mask is not None and 1 not in mask[2:] and spec.bounds == (None, 0) and long


def configured(spec: KernelSpec, *, short: bool = False, long: bool = False, rows: int | None = None) -> KernelSpec:
    """Returns a compile key with the config that the tables of its family have for it, in place of any previous config.

    The key of a prepass comes back as it is, since its config holds the tiles of the kernel that reads its lists. Units
    of a decoding kernel that are whole stay whole, and portions keep their tiles. A soft cap becomes exact where a
    sink's gradient would show that the error of a rough one is not even, in float32, and in the portable family.

    Args:
        spec: the key; tests and tools build one by hand.
        short: whether T and S are at most `SHORT_LENGTH`. At most head dims the tables have one row for all lengths, so
            that a new length compiles nothing.
        long: whether S is over `LONG_LENGTH`, for Hopper's backward kernel.
        rows: for a decoding kernel, queries times query heads of a group; by default as in the previous config, else 1.
    """
    if spec.op == "prepass":
        return spec
    if spec.op == "decode":
        if rows is None:
            rows = BLOCK_ROWS * spec.config.row_blocks if spec.config else 1
        config = (sm90_decode if spec.family == "sm90" else sm80_decode).decode_config(spec, rows)
        if spec.config:
            config = replace(config, splits=spec.config.splits, portion=spec.config.portion)
    elif spec.op == "tangent":
        config = (sm90_tangent if spec.family == "sm90" else sm80_tangent).tangent_config(spec)
    elif spec.op == "backward":
        config = sm80_backward.dkdv_dq_config(spec) if spec.family == "sm80" else backward_configs(spec, long=long)
    else:
        config = sm90.forward_config(spec, short=short) if spec.family == "sm90" else sm80.forward_config(spec)
    if codes.SINKS in spec.features or spec.family == "sm80" or spec.products == "bf16x3":
        exact = {codes.SOFT_CAP: codes.EXACT_SOFT_CAP}
        spec = replace(spec, features=tuple(exact.get(code, code) for code in spec.features))
    return replace(spec, config=config)


def is_listed(problem: Problem) -> bool:
    """Returns whether kernels visit tiles by lists, or read bits of few rows: for a mask, a function or segment ids."""
    spec = problem.spec
    return spec.mask_mod is not None or not {"mask", "query_segment_ids"}.isdisjoint(spec.present)


def is_one_row(problem: Problem, config: PrepassConfig) -> bool:
    """Returns whether all tiles of queries have the first one's list."""
    return not config.transposed and _are_queries_alike(problem)


def _are_queries_alike(problem: Problem) -> bool:
    """Returns whether all queries see the same keys by a mask."""
    spec, mask = problem.spec, problem.mask_shape
    differ = _PER_ENTRY - {"key_value_seq_lengths"}
    alike = spec.bounds == (None, None) and differ.isdisjoint(spec.present) and spec.mask_mod is None
    return alike and mask is not None and mask[2] == 1


def _reads_live_keys(problem: Problem, kernel: KernelSpec) -> bool:
    """Returns whether live keys say everything of a backward pass, see `KernelSpec.alike`.

    Kernels of dq alone have tiles of queries, whose lists have no live keys. Keys past the end count as live, and the
    gradient of a bias of rows would add theirs up. Heads of a group share a list.
    """
    sums_rows = kernel.sums_rows or kernel.sums_diagonals
    in_lists = kernel.family == "sm90" and kernel.listed and kernel.config.adds_dq and not sums_rows
    mask = problem.mask_shape
    shared = mask is None or mask[1] in (1, problem.num_kv_heads)
    return in_lists and shared and _are_queries_alike(problem)


def list_sizes(problem: Problem, config: PrepassConfig) -> Sizes:
    """Returns what the shapes of lists and bits depend on, given the tiles of the kernel that reads them."""
    mask = problem.mask_shape or (1, 1)
    entries, heads = (max(x, y) for x, y in zip(mask[:2], problem.mask_mod_shape, strict=True))
    per_entry = not _PER_ENTRY.isdisjoint(problem.spec.present) or entries > 1
    members = problem.group if config.transposed and heads == problem.num_heads else 1
    rows = config.rows if is_one_row(problem, config) else problem.query_length
    entries = problem.batch if per_entry else 1
    return Sizes(entries, heads, members if heads > 1 else 1, rows, problem.key_length)


def _compares(problem: Problem, kernel: KernelSpec) -> bool:
    """Returns whether edge tiles compare rows, see `KernelSpec.compared`: bits would take too much memory.

    A mask that is given whole has bits at any size: its own array takes 8 times as much for each plane that it has.
    Of a mask function edge tiles then evaluate the code, if they can.
    """
    mask, spec = problem.mask_shape, problem.spec
    if mask is not None and 1 not in mask[2:]:
        return False
    if spec.mask_mod is not None and (spec.score_mod is not None or not codes.evaluates_edges(spec.mask_mod)):
        return False
    return any(has_too_many_bits(config, list_sizes(problem, config)) for config in prepass_configs(kernel))


def prepass_spec(spec: AttentionSpec, config: PrepassConfig, arch: str) -> KernelSpec:
    """Returns the compile key of the prepass whose lists a kernel reads, given the tiles of that kernel."""
    left, right = spec.bounds
    return KernelSpec(
        op="prepass",
        arch=arch,
        # Neither dtype nor head dims matter.
        operand_dtype="bfloat16",
        head_dim=64,
        v_head_dim=64,
        window_left=left is not None,
        window_right=right is not None,
        query_seq_lengths="query_seq_lengths" in spec.present,
        key_value_seq_lengths="key_value_seq_lengths" in spec.present,
        query_offset="query_offset" in spec.present,
        mask="mask" in spec.present,
        segment_ids="query_segment_ids" in spec.present,
        features=codes.mask_function(spec.score_mod, spec.mask_mod),
        config=config,
    )


def prepass_configs(kernel: KernelSpec) -> list[PrepassConfig]:
    """Returns the tiles of the prepasses that a kernel reads the lists of; none if it visits ranges."""
    if not kernel.listed:
        return []
    found = [kernel.tiles_of(kernel.config)]
    return [*found, key_list_tiles(kernel)] if kernel.op == "backward" and kernel.lists_keys else found


def splits_keys(problem: Problem) -> bool:
    """Returns whether the forward pass takes the decoding kernels, for few queries and many keys.

    The kernel of a deterministic call does not depend on the batch, which counts as large enough to fill the GPU.
    """
    if problem.page or problem.spec.mean_plane is not None or problem.spec.keeps_rests:
        return reads_pages(problem)
    return problem.dtype != "float32" and has_few_queries(problem)


def has_few_queries(problem: Problem) -> bool:
    """Returns whether the keys take longer to read than the products with them, so that their bytes count alone."""
    rows = problem.query_length * problem.group
    if problem.bias_shape or _has_placed_features(problem):
        return False
    # The forward kernel reads keys once, too, where a head has them to itself, and has faster products.
    whole_heads_suffice = problem.group == 1 and rows > BLOCK_ROWS and _fills_gpu(problem)
    is_small = rows <= _most_split_rows(problem) and problem.key_length >= MIN_SPLIT_KEYS
    return not problem.num_sequences and is_small and not whole_heads_suffice


def _most_split_rows(problem: Problem) -> int:
    """Returns up to how many rows keys are split. Over 64 the products take longer than the loads of K and V.

    The forward kernel has faster products. But it leaves SMs idle if there are few heads, and its tiles have rows of
    one query head, most of which do not exist if the group is large. Head dims over 128 were not timed; at 256 the
    partial outputs do not fit the shared memory of all GPUs.
    """
    units = problem.batch * problem.num_kv_heads
    few_units = 2 * units <= H100_MULTIPROCESSORS and not problem.spec.deterministic
    wins = few_units or problem.head_dim <= 64 or problem.group >= 4
    fits = max(problem.head_dim, problem.v_head_dim) <= 128
    return MAX_ROWS if wins and fits else MAX_SPLIT_ROWS


def _cut(problem: Problem, key: KernelSpec) -> KernelSpec:
    """Returns the compile key of a decoding kernel with the way in which it cuts units.

    The units of a deterministic call are whole, or cut into portions. Its batch does not decide which.
    """
    if problem.spec.deterministic:
        splits = problem.key_length > _PORTION_KEYS
        portion = _PORTION_KEYS // key.config.keys if splits else 0
        return replace(key, config=replace(key.config, splits=splits, portion=portion))
    return replace(key, config=replace(key.config, splits=not _takes_whole_units(problem, key)))


def _takes_whole_units(problem: Problem, key: KernelSpec) -> bool:
    """Returns whether CTAs of a decoding kernel take whole units (`decode/split.py`), so that one launch is enough.

    No CTA may then read for longer than the split call and the launch that is saved take together. If lengths are data,
    one batch entry may be all that there is to read, and each unit has a CTA of its own.
    """
    side = heads_side_by_side(problem.num_kv_heads, H100_MULTIPROCESSORS)
    rounds = -(-problem.batch * problem.num_kv_heads // side // (H100_MULTIPROCESSORS // side))
    kind = key.bounds_kind
    differ = kind.query_end or kind.key_end or kind.offset
    unit_nbytes = 2 * problem.key_length * (problem.head_dim + problem.v_head_dim)
    total = unit_nbytes * problem.num_kv_heads * (1 if differ else problem.batch)
    is_short = rounds * unit_nbytes * _STREAMING_SMS <= total + _LAUNCH_NBYTES
    return is_short and unit_nbytes <= _MAX_WHOLE_NBYTES and (rounds == 1 or not differ)


def reads_pages(problem: Problem) -> bool:
    """Returns whether a kernel reads the pages of a problem; else they are gathered into dense keys and values first.

    This needs few queries, 16 bits, and head dims that need no padding: padded or split pages would be copies, too.
    """
    is_aligned = problem.head_dim % 8 == 0 and problem.v_head_dim % 8 == 0 and problem.dtype != "float32"
    is_small = is_known(problem.query_length) and problem.query_length * problem.group <= MAX_SPLIT_ROWS
    return (
        problem.page > 0 and is_known(problem.pages) and is_small and is_aligned and not _has_placed_features(problem)
    )


def _has_placed_features(problem: Problem) -> bool:
    """Returns whether a feature asks where a score lies, and has no instance for each row; see `Code.is_placed`."""
    return any(code.is_placed and not code.has_rows for code in _features(problem, "decode", exact=True))


def _fills_gpu(problem: Problem) -> bool:
    """Returns whether there is a head for each SM; a deterministic call does not ask its batch."""
    return problem.spec.deterministic or problem.batch * problem.num_heads >= H100_MULTIPROCESSORS


def forward_spec(problem: Problem, arch: str) -> KernelSpec:
    """Returns the compile key of the forward pass of a problem that kernels run."""
    return kernel_spec(problem, "decode" if splits_keys(problem_by_rows(problem)) else "forward", arch)


def _features(problem: Problem, op: str, *, exact: bool) -> tuple[Code, ...]:
    """Returns the features of a call, in the order in which logits pass through them. `exact` is of functions' tanh."""
    spec = problem.spec
    has_sinks = "sinks" in spec.present
    chosen = {
        codes.EXACT_SOFT_CAP if has_sinks else codes.SOFT_CAP: spec.logits_soft_cap is not None,
        codes.SINKS: has_sinks and op != "backward",
        codes.DROPOUT: "dropout" in spec.present,
    }
    functions = codes.score_function(spec.score_mod, problem.planes, exact=has_sinks or exact)
    return (*functions, *(code for code, is_present in chosen.items() if is_present))


def takes_terms(problem: Problem, *, dbias: bool) -> bool:
    """Returns whether float32 takes products of terms: a bias's gradient adds up heads, whose powers differ."""
    return dbias or problem.spec.score_mod is not None


def kernel_spec(
    problem: Problem,
    op: Literal["forward", "decode", "backward", "tangent"],
    arch: str,
    *,
    dlse: bool = False,
    dsinks: bool = False,
    dbias: bool = False,
    dplane: int | None = None,
    moved: tuple[str, ...] = (),
) -> KernelSpec:
    """Returns the compile key of a problem for an operation that can run it; see `KernelSpec` for what is asked for."""
    spec = (problem := problem_by_rows(problem, sums_plane=dplane is not None)).spec
    left, right = spec.bounds
    packed, predicated = problem.num_sequences > 0, is_listed(problem)
    row_bits = predicated and op == "decode"
    in_terms = op == "tangent" or takes_terms(problem, dbias=dbias)
    products = products_of(problem.dtype, spec.precision, takes_terms=in_terms)
    assert products is not None, "`unsupported_reasons` admits nothing else"
    takes_split = op in ("forward", "backward") and not split_obstacle(problem.head_dim, problem.v_head_dim)
    family = "sm90" if arch == "sm_90a" and (products != "bf16x3" or takes_split) else "sm80"
    bias = None if problem.bias_shape is None else bias_kind(problem.bias_shape)
    key = KernelSpec(
        op=op,
        arch=arch,
        operand_dtype="float16" if problem.dtype == "float16" or products == "half" else "bfloat16",
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        group=problem.group,
        # Lists or bits stand for the predicate; forward kernels still know which rows of Q are padding.
        window_left=row_bits or (left is not None and not predicated),
        window_right=right is not None and not predicated,
        query_seq_lengths="query_seq_lengths" in spec.present and not (predicated and op == "backward"),
        key_value_seq_lengths=row_bits or ("key_value_seq_lengths" in spec.present and not predicated),
        query_offset=row_bits or (("query_offset" in spec.present or problem.packed_offsets) and not predicated),
        packed=packed,
        listed=predicated and not row_bits,
        row_bits=row_bits,
        page=problem.page if op == "decode" else 0,
        dlse=dlse and products != "half",  # it is part of delta, see `KernelSpec.takes_delta`
        dsinks=dsinks,
        small_weights=op == "backward" and (spec.is_part or "sinks" in spec.present),
        bias=bias,
        bias_dtype=stored_dtype(problem.bias_dtype) if bias == "matrix" and problem.bias_dtype else None,
        dbias=dbias,
        dplane=dplane,
        moved=moved,
        features=_features(problem, op, exact=products == "bf16x3" or family == "sm80"),
        products=products,
        family=family,
    )
    key = with_rests(with_means(key, spec.mean_plane), spec)
    loads = key.cost.score_nbytes or key.cost.key_nbytes
    short = max(problem.query_length, problem.key_length) <= (SHORT_LOADING_LENGTH if loads else SHORT_LENGTH)
    key = configured(key, short=short, rows=problem.query_length * problem.group)
    if op == "decode":
        return _cut(problem, key)
    key = replace(key, alike=op == "backward" and _reads_live_keys(problem, key))
    key = replace(key, compared=_compares(problem, key))
    if key.compared and spec.mask_mod is not None:
        key = replace(key, features=(*key.features, *codes.edge_function(spec.mask_mod, problem.planes)))
    if op != "backward" or not key.config.adds_dq:
        return key
    one_sided = key.bounds_kind.one_sided_window
    ordered = spec.deterministic if family == "sm80" else adds_in_order(problem, one_sided_window=one_sided)
    return configured(replace(key, ordered=ordered), short=short, long=problem.key_length > LONG_LENGTH)

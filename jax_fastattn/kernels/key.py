# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The compile key of a kernel: what is computed, and how.

A kernel generator receives a `KernelSpec` and nothing else; the cache key is derived from the same dataclass. What it
holds is chosen in `choose.py`, which also completes a key that is built by hand (`choose.configured`).
Sizes, scale, cap and window widths are run-time scalars (`arguments.Scalars`), so a new length compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.bias_shapes import BiasDtype, BiasKind
from jax_fastattn.kernels.codes import Code, Cost
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.kernels.tiles.plan import BoundsKind
from jax_fastattn.programs import analysis

# How kernels multiply operands.
Products = Literal["native", "bf16x3", "half"]

# In the forward pass, unnormalized weights of "half" are times 2 to this power. They are normal numbers of float16 down
# to 2^-20 of a row's largest one.
_LOG2_WEIGHT = 6


@dataclass(frozen=True)
class KernelSpec:
    """Everything that is compiled into one kernel object.

    Attributes:
        op: "forward"; "decode", the forward pass of few queries, whose keys are split; "backward"; "tangent", the
            tangents of output and log-sum-exp; or "prepass", which writes the lists and bits of `tiles/lists.py` for a
            mask or ids.
        arch: target architecture, such as "sm_80" or "sm_90a", or one of `architectures.BORROWED`, which may have a
            suffix.
        family: whose kernel it is, "sm80" (portable) or "sm90" (Hopper).
        operand_dtype: the dtype of Q, K, V and cotangents in memory, "bfloat16" or "float16".
        products: "native" multiplies operands as they are. With "bf16x3" operands are float32 in two bfloat16 terms,
            side by side in each row: rounded elements, then rounded rests. A product is three of these terms. With
            "half" operands are float32 times powers of two, rounded to float16, see `ops/cuda/half.py`.
        head_dim, v_head_dim: multiples of `arguments/precision.head_dim_multiple`, at most 256.
        group: query heads per key/value head.
        window_left, window_right: whether that bound exists; causal is a right bound of 0.
        query_seq_lengths, key_value_seq_lengths, dlse: whether that operand is passed.
        dsinks: whether the backward pass computes the gradient of sinks, for which it takes them.
        small_weights: in a backward pass, whether all weights of a row may be far below 1, where float16 loses them: a
            sink, or keys of other launches, may have the rest.
        query_offset: whether there are offsets: an operand, or where sequences are packed in their records.
        packed: whether rows belong to packed sequences, see `tiles/records.py`.
        ordered: `adds_in_order`: CTAs that take keys of a head add to sums of dq in one order, so that dq has the same
            bits in every run.
        listed: whether tiles are visited by lists, which stand for the whole predicate. The key then has no window, no
            offset, and no lengths except for query lengths in the forward pass.
        compared: whether edge tiles of lists compare rows, see `visits/compared.py`; else they have bits.
        alike: in a backward pass with lists, whether all queries see the same keys, as with a mask of padding. Which
            keys are live then says everything, and nothing else is read of edge tiles.
        row_bits: in decoding kernels, whether bits say which keys each row sees, see `ops/cuda/row_bits.py`. They stand
            for the whole predicate; offset and lengths of keys are then the range of keys that are read.
        page: in decoding kernels, rows of a page, a multiple of 16; 0 if keys and values are not in pages.
        mask, segment_ids: which of these the prepass reads; its window, offset and lengths are the call's.
        bias: the kind of the bias; None without one.
        bias_dtype: dtype of a matrix; "float32" stands for two terms in bfloat16, `bias_terms`. None for other kinds.
        dbias: whether the backward pass computes the gradient of the bias.
        splits_dbias: whether the gradient of a matrix has parts, which the caller adds up.
        moved: of a tangent, which of query, key and value have one.
        dplane: the plane of the score function whose gradient a kernel of its own computes; None for none.
        mean_plane: the plane of the score function for which the forward pass stores the mean key of each row, and
            whose gradient the kernel that computes dk sums with these; None for none.
        out_rests: whether the forward pass stores what rounding takes from the output, and the backward pass reads it,
            see `sums/out_rests.py`.
        features: what becomes of scores, in the order in which logits pass through it; a bias comes before all of it.
            Sinks are one in the forward pass alone.
        config: sizes of tiles and the like, frozen: the `ForwardConfig` of the family, or for decoding `DecodeConfig`,
            or for the backward pass `DkdvDqConfig` (portable) or `BackwardConfigs` (Hopper), or `TangentConfig`, or for
            the prepass `PrepassConfig`. None in a key that `choose.configured` has yet to complete.
    """

    op: Literal["forward", "decode", "backward", "tangent", "prepass"]
    arch: str
    operand_dtype: Literal["bfloat16", "float16"]
    head_dim: int
    v_head_dim: int
    group: int = 1
    window_left: bool = False
    window_right: bool = False
    query_seq_lengths: bool = False
    key_value_seq_lengths: bool = False
    query_offset: bool = False
    packed: bool = False
    dlse: bool = False
    dsinks: bool = False
    small_weights: bool = False
    family: Literal["sm80", "sm90"] = "sm80"
    ordered: bool = False
    listed: bool = False
    compared: bool = False
    alike: bool = False
    row_bits: bool = False
    page: int = 0
    mask: bool = False
    segment_ids: bool = False
    bias: BiasKind | None = None
    bias_dtype: BiasDtype | None = None
    dbias: bool = False
    splits_dbias: bool = False
    moved: tuple[str, ...] = ()
    dplane: int | None = None
    mean_plane: int | None = None
    out_rests: bool = False
    features: tuple[Code, ...] = ()
    products: Products = "native"
    config: Any = None

    @property
    def gpu_arch(self) -> str:
        """The architecture that the compiler and the GPU know."""
        return self.arch.partition("-")[0]

    @property
    def product_dtype(self) -> str:
        """The dtype of both factors of a matrix product: of tiles in shared memory, of rounded P and dS."""
        return self.operand_dtype

    @property
    def result_dtype(self) -> str:
        """The dtype of the output and of the gradients of Q, K and V."""
        return self.operand_dtype if self.products == "native" else "float32"

    @property
    def terms(self) -> int:
        """How many terms an operand has."""
        return 2 if self.products == "bf16x3" else 1

    @property
    def row_columns(self) -> tuple[int, int]:
        """How many columns of 16 bits a row of Q and K takes, and a row of V and dO."""
        return self.terms * self.head_dim, self.terms * self.v_head_dim

    @property
    def result_nbytes(self) -> int:
        """The bytes of an element of the output and of the gradients of Q, K and V."""
        return 2 if self.products == "native" else 4

    @property
    def log2_weight(self) -> int:
        """The binary logarithm of the factor that unnormalized weights have in the forward pass."""
        return _LOG2_WEIGHT if self.products == "half" and self.op == "forward" else 0

    @property
    def takes_delta(self) -> bool:
        """Whether a backward pass takes delta, which XLA computes where it converts dO; else the output and dlse."""
        return self.products == "half"

    @property
    def takes_out(self) -> bool:
        """Whether it computes delta from the output."""
        return not self.takes_delta

    @property
    def has_row_means(self) -> bool:
        """Whether there are means of rows, see `mean_plane`."""
        return self.mean_plane is not None

    @property
    def mean_slope(self) -> float:
        """How much the derivative of a score by a number of `mean_plane` grows from key to key."""
        parts = codes.score_parts(self.features)
        assert parts is not None and self.mean_plane is not None
        slope = analysis.key_slope(parts.code, parts.code.results[2 + self.mean_plane])
        assert slope is not None
        return slope

    @property
    def summed_plane(self) -> int | None:
        """The plane of the score function whose gradient the backward pass computes; None for none."""
        return self.mean_plane if self.dplane is None else self.dplane

    @property
    def has_gradient_units(self) -> bool:
        """Whether P and dS are rounded to float16, which has few small numbers: see `sums/units.py`."""
        return self.op == "backward" and self.product_dtype == "float16" and self.products == "native"

    @property
    def moves_query(self) -> bool:
        """Whether the query has a tangent."""
        return "query" in self.moved

    @property
    def moves_key(self) -> bool:
        """Whether the key has a tangent."""
        return "key" in self.moved

    @property
    def moves_value(self) -> bool:
        """Whether the value has a tangent."""
        return "value" in self.moved

    @property
    def moves_scores(self) -> bool:
        """Whether scores have tangents."""
        return self.moves_query or self.moves_key

    @property
    def offset_operand(self) -> bool:
        """Whether offsets are an operand of their own."""
        return self.query_offset and not self.packed

    @property
    def reads_edges(self) -> bool:
        """Whether edge tiles of lists have bits, or compare rows."""
        return self.listed and not self.alike

    @property
    def lists_keys(self) -> bool:
        """Whether a backward pass with lists has lists of tiles of queries, for a kernel of dq alone, or of dbias."""
        return self.reads_edges and (not self.config.adds_dq or self.classifies_keys)

    @property
    def classifies_keys(self) -> bool:
        """Whether it has the classes of the tiles of keys, for the kernel that computes dbias alone."""
        return self.reads_edges and self.sums_dbias

    @property
    def compares_keys(self) -> bool:
        """Whether that kernel compares rows in edge tiles."""
        return self.compared and self.lists_keys

    @property
    def counts_dq(self) -> bool:
        """Whether a backward kernel counts the tiles of keys that have added to a tile of dq."""
        return self.config.adds_dq and (self.family == "sm90" or self.ordered)

    def tiles_of(self, config: Any) -> PrepassConfig:
        """Returns the tiles of the prepass that writes lists for the kernel of a config."""
        return replace(config.prepass, bits=not self.compared)

    @property
    def has_tile_counter(self) -> bool:
        """Whether CTAs of the forward kernel get tiles by a counter: persistent ones, if tiles differ in length."""
        return self.op == "forward" and self.packed and self.config.persistent

    @property
    def codes(self) -> tuple[Code, ...]:
        """All features of scores, in the order in which logits pass through them."""
        bias: tuple[Code, ...] = ()
        if self.matrix_bias:
            bias = (codes.pair_bias(self.bias_terms),)
        elif self.key_bias:
            bias = (codes.KEY_BIAS,)
        elif self.row_bias:
            bias = (codes.ROW_SHIFT if self.folds_lse else codes.ROW_BIAS,)
        return (*bias, *self.features)

    @property
    def cost(self) -> Cost:
        """What the features load and hold."""
        return Cost(
            score_nbytes=sum(code.score_nbytes for code in self.codes),
            key_nbytes=codes.KEY_PART_NBYTES if self.key_bias_parts else 0,
            registers=sum(code.registers for code in self.codes),
        )

    @property
    def drops(self) -> bool:
        """Whether weights are drawn that have no part in the output."""
        return any("keep" in code.hooks for code in self.features)

    @property
    def folds_lse(self) -> bool:
        """Whether a logit is a factor times the product q . k, plus terms, so that the product may have its lse."""
        return all("term" in code.hooks for code in self.features if "logit" in code.hooks)

    @property
    def is_steep(self) -> bool:
        """Whether a weight in dS, P times slopes, may be greater than 1, or negative."""
        return any(code.is_steep for code in self.features)

    @property
    def fits_float16(self) -> bool:
        """Whether float16 holds weights in dS, times a power of two: none is over 1, and each row has large ones."""
        return not self.is_steep and not self.small_weights

    @property
    def is_affine(self) -> bool:
        """Whether a logit is a factor times the product q . k alone."""
        return not any("logit" in code.hooks for code in self.codes)

    @property
    def matrix_bias(self) -> bool:
        """Whether there is a bias of pairs."""
        return self.bias == "matrix"

    @property
    def key_bias_parts(self) -> bool:
        """Whether a bias of keys is a step of the product q . k, see `features/bias/keys.py`."""
        return self.bias == "keys" and self.family == "sm90" and self.op == "forward"

    @property
    def key_bias(self) -> bool:
        """Whether a bias of keys is added to logits."""
        return self.bias == "keys" and not self.key_bias_parts

    @property
    def row_bias(self) -> bool:
        """Whether there is a bias of queries. The backward pass takes it only if a function takes the logits."""
        return self.bias == "rows" and not (self.op == "backward" and self.folds_lse)

    @property
    def bias_terms(self) -> int:
        """How many arrays in 16 bits add up to a matrix."""
        return 2 if self.bias_dtype == "float32" else 1

    @property
    def bias_storage(self) -> str:
        """The dtype of these arrays."""
        return "bfloat16" if self.bias_dtype in ("float32", None) else self.bias_dtype

    @property
    def dmatrix_bias(self) -> bool:
        """Whether the gradient of a matrix is computed."""
        return self.dbias and self.matrix_bias

    @property
    def drow_bias(self) -> bool:
        """Whether the gradient of a bias of queries is computed by kernels."""
        return self.dbias and self.row_bias

    @property
    def sums_rows(self) -> bool:
        """Whether a kernel of its own computes sums for each query: for a bias of queries, or a plane."""
        return self.drow_bias or self._plane_kind in ("head", "query")

    @property
    def sums_diagonals(self) -> bool:
        """Whether a kernel of its own computes sums along the diagonals of scores, for a plane of distances."""
        return self._plane_kind == "distance"

    @property
    def _plane_kind(self) -> str | None:
        """The kind of the plane whose gradient is computed."""
        parts = codes.score_parts(self.features)
        return None if parts is None or self.dplane is None else parts.places[self.dplane].plane.kind

    @property
    def sums_dbias(self) -> bool:
        """Whether a kernel of its own computes the gradient of the bias, or of a plane."""
        return self.dmatrix_bias or self.sums_rows or self.sums_diagonals

    @property
    def dkey_bias(self) -> bool:
        """Whether dS is summed for each key: for the gradient of a bias of keys, or of a plane of keys or heads."""
        has_means = self.op == "backward" and self.has_row_means
        return (self.dbias and self.bias == "keys") or self._plane_kind == "key" or has_means

    @property
    def dbias_dtype(self) -> str:
        """The dtype of what that kernel writes: float32 where it is added up or rounded later."""
        is_wide = self.splits_dbias or not self.dmatrix_bias or self.bias_dtype is None
        return "float32" if is_wide or self.bias_dtype is None else self.bias_dtype

    @property
    def bounds_kind(self) -> BoundsKind:
        """Which bounds there are."""
        return BoundsKind(
            left=self.window_left,
            right=self.window_right,
            query_end=self.query_seq_lengths,
            key_end=self.key_value_seq_lengths,
            offset=self.query_offset,
            packed=self.packed,
            rules=not self.listed and any("sees" in code.hooks for code in self.features),
            listed=self.listed,
        )

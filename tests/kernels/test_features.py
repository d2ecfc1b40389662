# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Features of this file's own, in kernels that know nothing of them: what a new score function has to define."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_dkdv_dq
import emulated_forward
import emulated_hopper
from cutlass import Boolean, Float32, Int32, Int64, cute
from emulated_backward import Sizes

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.places import Element, Head, LoadedTile, Logit
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.launches import BackwardKernel as PortableBackwardKernel
from jax_fastattn.kernels.sm80.decode.kernel import DecodeKernel as PortableDecodeKernel
from jax_fastattn.kernels.sm80.forward.kernel import ForwardKernel as PortableForwardKernel
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig, BackwardConfigs
from jax_fastattn.kernels.sm90.backward.launches import BackwardKernel
from jax_fastattn.kernels.sm90.decode.kernel import DecodeKernel
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Distance(Feature):
    """Adds a slope of each head times key - query, and hides every fifth of these distances."""

    operand: Any = None
    slope: Any = None

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> Distance:
        """Returns the feature with the slopes of a launch, float32 `[N]`."""
        return cls(arguments.buffers.added.slopes)

    def start(self, head: Head) -> Distance:
        """Returns the feature with the slope of a head."""
        slopes = cute.make_tensor(self.operand, cute.make_layout((1 << 20,)))
        return replace(self, slope=slopes[head.head] * LOG2_E)

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the distance."""
        return x.plus(self.slope * Float32(at.key - at.query))

    def sees(self, at: Element) -> Boolean:
        """Returns whether a score counts."""
        return Boolean((at.key - at.query + 10_000) % 5 != 0)

    # What the emulators' reference asks.

    @staticmethod
    def draw(random: np.random.Generator, heads: int, queries: int, keys: int) -> dict[str, np.ndarray]:
        """Returns the operand."""
        del queries, keys
        return {"slopes": (0.02 * random.standard_normal(heads)).astype(np.float32)}

    @staticmethod
    def reference(
        logits: np.ndarray, seen: np.ndarray, head: int, arrays: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits `[T, S]` and what is visible."""
        distance = np.arange(logits.shape[1]) - np.arange(logits.shape[0])[:, None]
        return logits + arrays["slopes"][head] * distance, seen & ((distance + 10_000) % 5 != 0)


@dataclass(frozen=True)
class Parity(Feature):
    """Hides the scores of which query + key is even, and changes no logit."""

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> Parity:
        """Returns the feature of a launch."""
        return cls()

    def sees(self, at: Element) -> Boolean:
        """Returns whether a score counts."""
        return Boolean((at.query + at.key) % 2 != 0)

    # What the emulators' reference asks.

    @staticmethod
    def draw(*_: Any) -> dict[str, np.ndarray]:
        """Returns no operand."""
        return {}

    @staticmethod
    def reference(logits: np.ndarray, seen: np.ndarray, *_: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits `[T, S]` and what is visible."""
        return logits, seen & (sum(np.indices(logits.shape)) % 2 != 0)


@dataclass(frozen=True)
class Plane(Feature):
    """Adds an operand `[T, S]`, which is loaded tile by tile, to the logits of all heads."""

    operand: Any = None
    tile: Any = None
    address: Any = None

    # Elements of a row of the operand in memory; rows and columns past T and S exist.
    PITCH: ClassVar[int] = 384

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> Plane:
        """Returns the feature with the operand of a launch."""
        return cls(arguments.buffers.added.plane)

    def copy(self, tile: LoadedTile, address: Int32, barrier: cute.Pointer) -> None:
        """Copies a tile row by row."""
        row_nbytes, first = 4 * tile.keys, self.operand.toint() + Int64(tile.query * self.PITCH + tile.key) * 4
        with cute.arch.elect_one():
            for row in range(tile.queries):
                source = first + row * (4 * self.PITCH)
                ptx.copy_bulk(address + row * row_nbytes, source, row_nbytes, barrier.toint())

    def load(self, tile: LoadedTile, address: Int32) -> Plane:
        """Returns the feature with a tile in shared memory."""
        return replace(self, tile=tile, address=address)

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the operand's element."""
        offset = (at.query - self.tile.query) * self.tile.keys + (at.key - self.tile.key)
        return x.plus(ptx.from_bits(ptx.load_shared(self.address + offset * 4)) * Float32(LOG2_E))

    # What the emulators' reference asks.

    @staticmethod
    def draw(random: np.random.Generator, heads: int, queries: int, keys: int) -> dict[str, np.ndarray]:
        """Returns the operand. Of every other 64 keys the logits are so large that full tiles are computed twice."""
        del heads, queries, keys
        plane = random.standard_normal((Plane.PITCH, Plane.PITCH)) + 30.0 * (np.arange(Plane.PITCH) // 64 % 2 == 0)
        return {"plane": plane.astype(np.float32)}

    @staticmethod
    def reference(
        logits: np.ndarray, seen: np.ndarray, head: int, arrays: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits `[T, S]` and what is visible."""
        del head
        return logits + arrays["plane"][: logits.shape[0], : logits.shape[1]], seen


DISTANCE = Code("Distance", "test_features:Distance", ("logit", "sees"), operands=(("slopes", "float32"),))
PARITY = Code("Parity", "test_features:Parity", ("sees",))
PLANE = Code("Plane", "test_features:Plane", ("logit",), operands=(("plane", "float32"),), score_nbytes=4)

# By name: head dims, features, sizes.
CASES = {
    "d64-causal": (64, 64, {"window_right": True, "group": 2}, Sizes(batch=2, queries=150, keys=170, right=20)),
    "d128-cap-window-lengths": (
        128,
        128,
        {
            "window_left": True,
            "window_right": True,
            "query_seq_lengths": True,
            "key_value_seq_lengths": True,
            "query_offset": True,
            "features": (codes.SOFT_CAP,),
        },
        Sizes(),
    ),
    "d192v128-full": (192, 128, {}, Sizes(batch=1, queries=133, keys=140, kv_heads=2)),
}


CHECKS = {
    ("sm80", "forward"): emulated_forward.check,
    ("sm80", "backward"): emulated_dkdv_dq.check,
    ("sm90", "forward"): emulated_hopper.check_forward,
    ("sm90", "backward"): emulated_hopper.check_backward,
}


def key(case: str, op: str, family: str) -> tuple[KernelSpec, Sizes]:
    """Returns a compile key with the feature, and the sizes of its launch."""
    head_dim, v_head_dim, features, sizes = CASES[case]
    arch = "sm_90a" if family == "sm90" else "sm_80"
    spec = KernelSpec(op, arch, "bfloat16", head_dim, v_head_dim, family=family, **features)
    spec = replace(spec, features=(DISTANCE, *spec.features))
    return configured(spec), sizes


@pytest.mark.parametrize("case", CASES)
def test_hopper_forward(case: str) -> None:
    emulated_hopper.check_forward(*key(case, "forward", "sm90"))


@pytest.mark.parametrize("case", CASES)
def test_hopper_backward(case: str) -> None:
    emulated_hopper.check_backward(*key(case, "backward", "sm90"))


@pytest.mark.parametrize("case", CASES)
def test_portable_forward(case: str) -> None:
    emulated_forward.check(*key(case, "forward", "sm80"))


@pytest.mark.parametrize("case", CASES)
def test_portable_backward(case: str) -> None:
    emulated_dkdv_dq.check(*key(case, "backward", "sm80"))


@pytest.mark.parametrize("cap", [False, True])
def test_forward_loads_tiles_into_stages_of_its_own(cap: bool) -> None:
    """Of two warpgroups each lets tiles pass by that only the other one sees."""
    config = ForwardConfig(2, 64, 4)
    sizes = Sizes(batch=2, queries=300, keys=330, kv_heads=1, right=3, shift=0.0)
    spec = KernelSpec("forward", "sm_90a", "bfloat16", 64, 64, 2, family="sm90", window_right=True)
    spec = replace(spec, features=(PLANE, codes.SOFT_CAP) if cap else (PLANE,), config=config)
    emulated_hopper.check_forward(spec, sizes)


@pytest.mark.parametrize("scale", [0.2, -0.2])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_rule_alone_leaves_logits_as_they_are(family: str, scale: float) -> None:
    """A log-sum-exp stays part of the first product, and a negative scale stays a sign of Q."""
    sizes = Sizes(batch=1, queries=70, keys=140, kv_heads=1, right=3, scale=scale)
    arch = {"sm80": "sm_80", "sm90": "sm_90a"}[family]
    for op in ("forward", "backward"):
        spec = KernelSpec(op, arch, "bfloat16", 64, 64, family=family, window_right=True, features=(PARITY,))
        assert spec.is_affine
        CHECKS[family, op](configured(spec), sizes)


KERNELS = {
    ("sm80", "forward"): PortableForwardKernel,
    ("sm80", "backward"): PortableBackwardKernel,
    ("sm90", "backward"): BackwardKernel,
}


@pytest.mark.parametrize(
    ("family", "op", "head_dim"), [("sm80", "forward", 64), ("sm80", "backward", 64), ("sm90", "backward", 192)]
)
def test_kernels_without_stages_refuse_what_loads(family: str, op: str, head_dim: int) -> None:
    arch = {"sm80": "sm_80", "sm90": "sm_90a"}[family]
    spec = KernelSpec(op, arch, "bfloat16", head_dim, head_dim, family=family, features=(PLANE,))
    with pytest.raises(NotImplementedError, match="no stages for what Plane"):
        KERNELS[family, op](configured(spec))


@pytest.mark.parametrize("kernel", [PortableDecodeKernel, DecodeKernel], ids=["sm80", "sm90"])
def test_decoding_kernels_refuse_what_asks_for_a_head(kernel: type[PortableDecodeKernel | DecodeKernel]) -> None:
    family, arch = ("sm90", "sm_90a") if kernel is DecodeKernel else ("sm80", "sm_80")
    spec = KernelSpec("decode", arch, "bfloat16", 64, 64, family=family, features=(DISTANCE, codes.SOFT_CAP))
    with pytest.raises(NotImplementedError, match="found Distance; use the forward kernel"):
        kernel(configured(spec))


@pytest.mark.parametrize("features", [(PLANE,), (DISTANCE, PLANE)], ids=["alone", "after-another"])
def test_dkdv_dq_loads_tiles_with_those_of_q(features: tuple[Code, ...]) -> None:
    config = BackwardConfigs(BackwardConfig(64, 2, 72))
    sizes = Sizes(batch=2, queries=200, keys=230, kv_heads=1, right=3)
    spec = KernelSpec("backward", "sm_90a", "bfloat16", 64, 64, 2, family="sm90", window_right=True)
    emulated_hopper.check_backward(replace(spec, features=features, config=config), sizes)

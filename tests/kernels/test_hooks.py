# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks of features are found by name: a misspelt one would emit nothing, without a word."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import test_features as toys

from jax_fastattn.kernels import codes, features
from jax_fastattn.kernels.codes import HOST_HOOKS, Code
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.of_launch import feature_class, features_of
from jax_fastattn.kernels.key import KernelSpec

HOOKS = {name for name in vars(Feature) if not name.startswith("_")} - {"defines"}
# What others than `Score` ask of features, by the class that has it first.
OTHERS = {
    "PairBias": {"value"},
    "StagedBias": {"of_stages"},
    "WarpBias": {"of_pieces", "copy_first"},
    # Emulators.
    "Distance": {"draw", "reference"},
    "Parity": {"draw", "reference"},
    "Plane": {"draw", "reference", "PITCH"},
}
TOYS = (toys.DISTANCE, toys.PARITY, toys.PLANE)
CODES = [x for x in vars(codes).values() if isinstance(x, Code)] + [codes.pair_bias(2), *TOYS]


def _classes(base: type[Feature] = Feature) -> Iterator[type[Feature]]:
    """Yields all features, those of tests included."""
    for module in pkgutil.walk_packages(features.__path__, f"{features.__name__}."):
        importlib.import_module(module.name)
    for found in base.__subclasses__():
        yield found
        yield from _classes(found)


def _misspelt(feature: type[Feature]) -> set[str]:
    """Returns public members of a feature that are neither hooks nor fields, nor known to others."""
    known = HOOKS | {field.name for field in dataclasses.fields(feature)}
    known |= {name for base in feature.__mro__ for name in OTHERS.get(base.__name__, ())}
    return {name for name in vars(feature) if not name.startswith("_")} - known


@pytest.mark.parametrize("feature", [*_classes()], ids=lambda x: x.__name__)
def test_a_misspelt_hook_is_found(feature: type[Feature]) -> None:
    assert not _misspelt(feature), f"expected some of {sorted(HOOKS)}"


def test_what_is_no_hook_counts_as_misspelt() -> None:
    class Toy(Feature):
        def finsh_row(self) -> None: ...

        def finish_row(self) -> None: ...

    assert _misspelt(Toy) == {"finsh_row"}


@pytest.mark.parametrize("code", CODES, ids=lambda x: x.feature.partition(":")[2] + str(x.constants or ""))
def test_a_code_says_which_hooks_its_feature_has(code: Code) -> None:
    """The host chooses by these hooks without the compiler."""
    feature = feature_class(code)
    assert issubclass(feature, Feature) and "of" in vars(feature)
    assert {*code.hooks} == {hook for hook in HOST_HOOKS if feature.defines(hook)}
    assert feature.defines("copy") == feature.defines("load")
    assert not feature.defines("copy") or code.score_nbytes


def test_the_page_of_the_design_has_each_hook_and_each_attribute_of_a_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    section = page.partition("## The hooks of a feature")[2].partition("that no feature needs")[0]
    names = [set(re.findall(r"^\| `(\w+)`", x, re.MULTILINE)) for x in section.split("`features/feature.py` defines")]
    assert names == [{field.name for field in dataclasses.fields(Code)} - {"name", "feature"}, HOOKS]


def test_a_code_that_hides_a_hook_is_refused() -> None:
    """The key would fold a log-sum-exp into products of logits that a function takes."""
    spec = KernelSpec("forward", "sm_80", "bfloat16", 64, 64, features=(dataclasses.replace(codes.SOFT_CAP, hooks=()),))
    assert spec.folds_lse
    with pytest.raises(AssertionError, match="SoftCap"):
        features_of(FeatureArguments(spec, None, SimpleNamespace(logits_soft_cap=2.0), 0.5))  # pyright: ignore[reportArgumentType]

# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the features of a launch from the codes of its compile key."""

import pkgutil

from cutlass import Float32

from jax_fastattn.kernels.codes import HOST_HOOKS, Code
from jax_fastattn.kernels.device.softmax import LN_2
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments


def feature_class(code: Code) -> type[Feature]:
    """Returns the class that a code names."""
    return pkgutil.resolve_name(code.feature)


def features_of(arguments: FeatureArguments) -> tuple[Feature, ...]:
    """Returns the features of a launch, in the order of the codes of its key.

    Args:
        arguments: the arguments of the launch; `scale` is the factor from products to logits.
    """
    found: list[Feature] = []
    for code in arguments.spec.codes:
        feature = feature_class(code).of(code, arguments)
        assert {*code.hooks} == {hook for hook in HOST_HOOKS if feature.defines(hook)}, (code, feature)
        if feature.defines("logit"):
            # What leaves it is a logit in base 2, or a multiple of one.
            arguments = arguments._replace(scale=feature.unit() * LN_2 if feature.defines("unit") else Float32(LN_2))
        found.append(feature)
    return tuple(found)

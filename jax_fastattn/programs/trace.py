# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Traces a JAX function of scalars to a graph, which is equal for equal functions, and to the arrays that it captures.

JAX's promotion would round `slopes[h] * (q - k)` to 16 bits if `slopes` has 16. `evaluate` therefore computes all
floats in one dtype, and leaves integers as the function has them.

What stays out: what is data and what is code (`lower.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import _compat

SCORE_ARGUMENTS = ("score", "batch", "head", "query", "key")
MASK_ARGUMENTS = SCORE_ARGUMENTS[1:]

# The bodies of these are parts of the graph. `pvary` and `pcast` mark how a value varies over a mesh, and change none.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
DERIVATIVES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_IDENTITIES = ("pvary", "pcast", "copy", "copy_p")


@dataclass(frozen=True)
class Value:
    """A value of a graph.

    Attributes:
        op: the name of an argument, "captured", "constant", or the name of a primitive.
        shape, dtype: as JAX traced it.
        args: the values that a primitive takes.
        primitive, params: None and empty for other values.
        index: which result of the primitive it is, or which captured array.
        constant: the number of a constant, as text: 0.0 equals -0.0, and NaN does not equal itself.
    """

    op: str
    shape: tuple[int, ...]
    dtype: Any
    args: tuple[int, ...] = ()
    primitive: Any = None
    params: tuple[tuple[str, Any], ...] = ()
    index: int = 0
    constant: str = ""

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def number(self) -> Any:
        """Returns the number of a constant."""
        if self.dtype == np.bool_:
            return self.constant == "True"
        if jnp.issubdtype(self.dtype, np.complexfloating):
            return complex(self.constant)
        return float(self.constant) if self.is_float else int(self.constant)


@dataclass(frozen=True)
class Graph:
    """A function of scalars, as values of which each takes values before it.

    Attributes:
        values: no two of them are equal.
        result: the value that the function returns.
        is_stable: whether a graph of an equal function is equal. Bodies of loops and derivatives of the user's own are
            compared by identity.
    """

    values: tuple[Value, ...]
    results: tuple[int, ...]
    is_stable: bool


class _Identity:
    """A parameter of a primitive that has no hash. It equals itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class _Tracer:
    """A graph that grows.

    Attributes:
        keeps_derivatives: whether a function with a derivative of its own stays a call.
    """

    keeps_derivatives: bool
    values: dict[Value, int] = field(default_factory=dict[Value, int])
    captured: dict[int, Any] = field(default_factory=dict[int, Any])
    is_stable: bool = True

    def put(self, value: Value) -> int:
        return self.values.setdefault(value, len(self.values))

    def capture(self, array: Any) -> int:
        """Returns the value of an array that the function captures, or of a number of Python or NumPy."""
        if not isinstance(array, jax.Array) and not np.shape(array):
            number = np.asarray(array)
            return self.put(Value("constant", (), number.dtype, constant=str(number.item())))
        index = list(self.captured).index(id(array)) if id(array) in self.captured else len(self.captured)
        self.captured[id(array)] = array
        return self.put(Value("captured", tuple(array.shape), array.dtype, index=index))

    def inline(self, jaxpr: Any, consts: Sequence[int], args: Sequence[int]) -> list[int]:
        """Adds the equations of a jaxpr and of the functions that it calls, and returns its results."""
        known: dict[Any, int] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(x: Any) -> int:
            return self.capture(x.val) if hasattr(x, "val") else known[x]

        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            name = eqn.primitive.name
            if name in _CALLS or (name in DERIVATIVES and not self.keeps_derivatives):
                body = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
                inner = [self.capture(x) for x in getattr(body, "consts", ())]
                found = self.inline(getattr(body, "jaxpr", body), inner, inputs)
            elif name in _IDENTITIES:
                found = list(inputs)
            else:
                found = self._results(eqn, inputs)
            known |= dict(zip(eqn.outvars, found, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _results(self, eqn: Any, inputs: tuple[int, ...]) -> list[int]:
        params: list[tuple[str, Any]] = []
        for name, value in sorted(eqn.params.items()):
            self.is_stable &= not _has_body(value)
            try:
                hash(value)
            except TypeError:
                self.is_stable, value = False, _Identity(value)
            params.append((name, value))
        return [
            self.put(
                Value(
                    eqn.primitive.name,
                    tuple(x.aval.shape),
                    x.aval.dtype,
                    inputs,
                    eqn.primitive,
                    tuple(params),
                    index,
                )
            )
            for index, x in enumerate(eqn.outvars)
        ]


def _has_body(x: Any) -> bool:
    """Returns whether a parameter of a primitive is a function, or has one among its items."""
    if isinstance(x, (tuple, list)):
        return any(map(_has_body, x))
    return hasattr(x, "eqns") or hasattr(x, "jaxpr") or (callable(x) and not isinstance(x, type))


def trace(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, keeps_derivatives: bool = False
) -> tuple[Graph, list[Any]]:
    """Returns the graph of a function of scalars, and the arrays that it captures, traced ones included.

    Args:
        function: returns a number, or a list of numbers. It is a new one for each trace: JAX keeps the trace of a
            function that it has seen, even if what the function captures has changed since.
        arguments: the dtype of each argument by name, in order.
        keeps_derivatives: whether a function with a derivative of its own stays a call in the graph.
    """
    avals = [jax.ShapeDtypeStruct((), dtype) for dtype in arguments.values()]
    closed = jax.make_jaxpr(function)(*avals)
    tracer = _Tracer(keeps_derivatives)
    leaves = [tracer.put(Value(name, (), np.dtype(dtype))) for name, dtype in arguments.items()]
    results = tracer.inline(closed.jaxpr, [tracer.capture(x) for x in closed.consts], leaves)
    return Graph(tuple(tracer.values), tuple(results), tracer.is_stable), list(tracer.captured.values())


def trace_call(name: str, function: Any, arguments: Mapping[str, Any]) -> tuple[Graph, list[Any]]:
    """Traces a function of the user's, the argument `name` of a call.

    Raises:
        TypeError: it is no function of such arguments, or does not return one number of the right kind.
    """
    is_mask = "score" not in arguments
    words = "(b, h, q, k)" if is_mask else "(score, b, h, q, k)"
    if not callable(function) or isinstance(function, type):
        kind = "an array" if isinstance(function, (jax.Array, np.ndarray)) else type(function).__name__
        raise TypeError(f"`{name}` is {kind}, expected a function of {words}")

    def checked(*args: Any) -> Any:
        found = function(*args)
        expected = f"expected {'one boolean' if is_mask else 'one float'}, an array of shape ()"
        if not isinstance(found, (jax.Array, np.generic, np.ndarray, bool, int, float)):
            raise TypeError(f"`{name}` returned {type(found).__name__}, {expected}")
        array = jnp.asarray(found)
        if array.shape or not jnp.issubdtype(array.dtype, np.bool_ if is_mask else jnp.floating):
            remedy = "; compare it with a number" if is_mask else "; use `mask_mod` to hide a pair"
            raise TypeError(f"`{name}` returned {array.dtype} of shape {array.shape}, {expected}{remedy}")
        return array

    try:
        return trace(checked, arguments, keeps_derivatives=not is_mask)
    except TypeError as error:
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError:
            raise TypeError(f"`{name}` does not take {words}, expected a function of these arguments") from error
        except ValueError:  # a function without a signature
            pass
        raise


def evaluate(
    graph: Graph,
    targets: Sequence[int],
    leaves: Mapping[str, Any],
    captured: Sequence[Any],
    wide: Any,
    read: Callable[[Any], Any] | None = None,
    given: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Returns values of a graph, by JAX's primitives with all floats in the dtype `wide`.

    Args:
        targets: which values.
        leaves: the arguments that these values need, by name.
        captured: the captured arrays.
        read: what becomes of each float that is read from a captured array; None leaves it.
        given: values that are known, by their numbers.
    """
    memo: dict[int, Any] = {}
    results: dict[Any, Sequence[Any]] = {}

    # Primitives that are bound as they are do not mark operands as varying.
    axes = frozenset[Any]().union(*(_compat.varying_axes(x) for x in captured))

    def as_varying(x: Any) -> Any:
        return _compat.as_varying(jnp.asarray(x), axes) if axes else x

    def widened(x: Any) -> Any:
        return x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != wide else x

    def compute(i: int) -> Any:
        if i not in memo:
            value = graph.values[i]
            found = given[i] if given is not None and i in given else new(value)
            has_arrays = value.op == "captured" or any(graph.values[x].shape for x in value.args)
            is_read = read is not None and value.is_float and not value.shape and has_arrays
            memo[i] = read(found) if is_read and read is not None else found
        return memo[i]

    def new(value: Value) -> Any:
        if value.op == "captured":
            return widened(as_varying(captured[value.index]))
        if value.op == "constant":
            return as_varying(np.asarray(value.number, wide if value.is_float else value.dtype))
        if value.primitive is None:
            return as_varying(leaves[value.op])
        key = value.primitive, value.params, value.args
        if key not in results:
            args = [compute(x) for x in value.args]
            found = _bind(value, args, [graph.values[x].dtype for x in value.args], wide)
            results[key] = [widened(x) for x in found]
        return results[key][value.index]

    return [compute(i) for i in targets]


def _bind(value: Value, args: list[Any], dtypes: Sequence[Any], wide: Any) -> Sequence[Any]:
    params = {name: x.value if isinstance(x, _Identity) else x for name, x in value.params}
    if any(map(_has_body, params.values())) or value.op.startswith("bitcast"):
        # A body keeps the dtypes with which it was traced.
        args = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(args, dtypes, strict=True)]
    else:
        floats = [name for name, x in params.items() if name.endswith(("dtype", "element_type")) and _is_float(x)]
        params |= dict.fromkeys(floats, np.dtype(wide))
    found = _compat.bind(value.primitive, args, params)
    return found if value.primitive.multiple_results else [found]


def _is_float(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)

# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the sharpness of a loss, the largest eigenvalue of its Hessian, by Hessian-vector products through attention.

    python examples/sharpness.py              # seconds on two CPU cores

Gradient descent diverges from a minimum if its step size is over 2 / sharpness (arXiv:2103.00065). The script trains a
small model by gradient descent and prints the loss and that bound. A Hessian-vector product is a jvp of the gradient:
the Hessian itself is never stored, and it takes the memory of a few gradients.
"""

import argparse

import jax
import jax.numpy as jnp

from jax_fastattn import attention

LENGTH, WIDTH, HEADS = 12, 16, 2


def init(key):
    keys = jax.random.split(key, 2)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    return {name: jax.random.normal(k, shapes[name]) * WIDTH**-0.5 for k, name in zip(keys, shapes, strict=True)}


def loss(params, x):
    """Returns the mean squared error of a layer of attention that should copy the previous token of x `[B, T, C]`."""
    q, k, v = jnp.split((x @ params["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    out = attention(q, k, v, is_causal=True).reshape(x.shape) @ params["out"]
    return jnp.mean((out[:, 1:] - x[:, :-1]) ** 2)


def hessian_vector_product(function, params, v):
    return jax.jvp(jax.grad(function), (params,), (v,))[1]


def dot(x, y):
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def sharpness(function, params, key, steps=50):
    """Returns the eigenvalue of the Hessian of largest magnitude, by power iteration."""
    keys = jax.random.split(key, len(jax.tree.leaves(params)))
    v = jax.tree.map(
        lambda x, k: jax.random.normal(k, x.shape), params, jax.tree.unflatten(jax.tree.structure(params), keys)
    )

    def iterate(_, state):
        v, _ = state
        v = jax.tree.map(lambda x: x / jnp.sqrt(dot(v, v)), v)
        product = hessian_vector_product(function, params, v)
        return product, dot(v, product)

    return jax.lax.fori_loop(0, steps, iterate, (v, 0.0))[1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--step-size", type=float, default=0.5, metavar="X", help="default: %(default)s")
    options = parser.parse_args(argv)
    params_key, data_key, start_key = jax.random.split(jax.random.key(0), 3)
    params, x = init(params_key), jax.random.normal(data_key, (32, LENGTH, WIDTH))
    x += jax.random.normal(start_key, (LENGTH, WIDTH))  # positions

    @jax.jit
    def measure(params):
        return sharpness(lambda params: loss(params, x), params, start_key)

    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - options.step_size * g, params, gradients)

    for i in range(options.steps + 1):
        if i % 50 == 0:
            bound = 2 / measure(params)
            print(f"step {i:3}: loss {loss(params, x):.3f}, step sizes are stable up to {bound:.3f}")
        _, params = step(params)


if __name__ == "__main__":
    main()

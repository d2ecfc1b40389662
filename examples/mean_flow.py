# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a MeanFlow model of waves (arXiv:2505.13447), in which attention runs under `jax.jvp` inside `jax.grad`.

    python examples/mean_flow.py              # seconds on two CPU cores

The model u(z, r, t) predicts the mean velocity between the times r and t of a path from data (0) to noise (1). Its
target has the total derivative of u along the path, by a jvp through the transformer, and no gradient flows through
that. A sample takes one step, and the script prints how far samples are from the nearest wave. It needs optax.
"""

import argparse

import jax
import jax.numpy as jnp

from jax_fastattn import attention

try:
    import optax
except ModuleNotFoundError as error:
    raise SystemExit(
        f"{error.name} is not installed. Install the extra `examples`: `pip install '.[examples]'` in a clone, or "
        "`[examples]` after the file name of the wheel."
    ) from error

LENGTH, WIDTH, HEADS, LAYERS = 8, 32, 4, 2


def draw_waves(key, count):
    """Returns data `[count, LENGTH, 1]`: one period of a sine wave with a random phase."""
    phase = jax.random.uniform(key, (count, 1, 1), maxval=2 * jnp.pi)
    return jnp.sqrt(2.0) * jnp.sin(phase + 2 * jnp.pi * jnp.arange(LENGTH)[:, None] / LENGTH)


def init(key):
    """Returns the parameters of `velocity`."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes = {f"{name}_{i}": shape for i in range(LAYERS) for name, shape in shapes.items()}
    shapes |= {"embed": (1, WIDTH), "position": (LENGTH, WIDTH), "time": (8, WIDTH), "head": (WIDTH, 1)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: jax.random.normal(keys[name], shape) * shape[0] ** -0.5 for name, shape in shapes.items()}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def velocity(params, z, r, t):
    """Returns the mean velocity `[B, LENGTH, 1]` at z `[B, LENGTH, 1]` for times r and t `[B, 1, 1]`."""
    angles = jnp.concatenate([t, t - r], axis=1)[:, None, :, 0, None] * jnp.array([1.0, 2.0])  # [B, 1, 2, 2]
    times = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(len(z), 1, 8)
    x = z @ params["embed"] + params["position"] + times @ params["time"]
    for i in range(LAYERS):
        q, k, v = jnp.split((norm(x) @ params[f"qkv_{i}"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x = x + attention(q, k, v).reshape(x.shape) @ params[f"out_{i}"]
        x = x + jax.nn.gelu(norm(x) @ params[f"up_{i}"]) @ params[f"down_{i}"]
    return norm(x) @ params["head"]


def loss(params, key, data):
    """Returns the mean squared error of the mean velocity."""
    keys = jax.random.split(key, 3)
    noise = jax.random.normal(keys[0], data.shape)
    r, t = jnp.sort(jax.random.uniform(keys[1], (2, len(data), 1, 1)), axis=0)
    r = jnp.where(jax.random.bernoulli(keys[2], 0.5, r.shape), t, r)  # half learn the velocity at t
    z, v = (1 - t) * data + t * noise, noise - data
    along_path = (v, jnp.zeros_like(r), jnp.ones_like(t))
    u, du = jax.jvp(lambda z, r, t: velocity(params, z, r, t), (z, r, t), along_path)
    return jnp.mean((u - jax.lax.stop_gradient(v - (t - r) * du)) ** 2)


def sample(params, key, count):
    """Returns waves `[count, LENGTH, 1]` from noise, in one step from time 1 to time 0."""
    noise, ones = jax.random.normal(key, (count, LENGTH, 1)), jnp.ones((count, 1, 1))
    return noise - velocity(params, noise, 0 * ones, ones)


def distance(x):
    """Returns the root-mean-square distance of x from the nearest wave: its other frequencies, and its amplitude."""
    spectrum = jnp.abs(jnp.fft.fft(x[..., 0], norm="forward")) ** 2
    power = spectrum[:, 1] + spectrum[:, -1]
    return jnp.sqrt(jnp.mean(spectrum.sum(axis=1) - power + (jnp.sqrt(power) - 1) ** 2))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="waves per step (default: %(default)s)")
    options = parser.parse_args(argv)
    keys = jax.random.split(jax.random.key(0), options.steps + 2)
    params = init(keys[0])
    optimizer = optax.adam(optax.cosine_decay_schedule(6e-3, options.steps))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        data_key, loss_key = jax.random.split(key)
        gradients = jax.grad(loss)(params, loss_key, draw_waves(data_key, options.batch))
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    for key in keys[2:]:
        params, state = step(params, state, key)
    noise = jax.random.normal(keys[1], (1024, LENGTH, 1))
    print(f"distance from the nearest wave: noise {distance(noise):.2f}, ", end="")
    print(f"samples in one step {distance(sample(params, keys[1], 1024)):.2f}")


if __name__ == "__main__":
    main()

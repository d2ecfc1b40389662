# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The XLA path: attention in plain JAX, its gradients, tangents and second derivatives, on any platform."""

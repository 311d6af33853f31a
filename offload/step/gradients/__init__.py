# SPDX-License-Identifier: Apache-2.0
"""Gradients from autograd to the update that consumes them."""

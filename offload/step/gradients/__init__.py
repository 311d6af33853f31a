"""Gradients from autograd to the update that consumes them."""

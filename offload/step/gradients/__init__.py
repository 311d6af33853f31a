# SPDX-License-Identifier: Apache-2.0
"""Gradients from autograd to the update that consumes them.

On the way of one:

    hooks.module_hooks    PyTorch accumulated it into `p.grad`
    parameter_gradients   takes it over, and puts a token in its place
    intake                one rank's goes on, that of several is averaged first (`reduction`)
    gradients             whether it counts for the coming step, as the first or added to others
    arrival               into its chunk's buffer: adopted, added, or over from the device (`transit`)
    buffers, extents      where buffers lie; what leaves them for the store when they run out

The first two lie in `offload.step`.
"""

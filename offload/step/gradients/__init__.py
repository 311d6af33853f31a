# SPDX-License-Identifier: Apache-2.0
"""Gradients from autograd to the update that consumes them.

The way of one, file by file. Names without a folder lie here:

    step/hooks/backward_passes.py     PyTorch accumulated it into `p.grad` and calls the hook
    step/hooks/model_events.py        tells who is to know; of what waits for others, until the last has come
    step/waiting_gradients.py         says which wait there for each other
    step/parameter_gradients.py       takes it over, and puts a token in its place
    gradient_sync.py                  one rank's goes on, that of several is averaged first (reduction.py); what waited on one
                                      rank goes on without it
    chunk_gradients.py                whether it counts for the coming step, as the first or added to others
    arrival.py                        into its chunk's buffer: adopted, added (addition.py), or packed on the device
                                      (transit.py), copied over and received (reception.py); several that waited at once
                                      (filling.py)
    buffers.py, extents.py            where buffers lie; what leaves them for the store when they run out
    step/training.py                  the step: its norm (norm.py), then an update of it (step/update_making.py)
    step/updates/update.py            `ChunkGradients.open` brings it where the kernel reads it; `release` ends it, unless the
                                      update began before the step and may be undone (step/speculation.py): then `drop_held`
                                      does
"""

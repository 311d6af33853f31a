# SPDX-License-Identifier: Apache-2.0
"""One training step.

    hooks             what the model and autograd tell
    residency         units fetched for it, and let go of
    gradients         from autograd to the update
    updates           the optimizer step
    parameter_access  whole parameters and states by name, between steps
    thread_safety     which thread has its turn in the model, what Ctrl-C waits for, what a failure leaves

`training` drives them; `uses` counts who needs which unit; `speculation` begins updates that may be undone; `timeline` says
who waited for what.
"""

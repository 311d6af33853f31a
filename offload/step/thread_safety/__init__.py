# SPDX-License-Identifier: Apache-2.0
"""Safe entry: one thread at a time has its turn in the model, Ctrl-C waits for the engine's work, a failure is remembered."""

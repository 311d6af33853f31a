# SPDX-License-Identifier: Apache-2.0
"""What is the user's: units and chunks with their run-time state, guards, optimizers, weights by name."""

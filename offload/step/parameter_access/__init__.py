# SPDX-License-Identifier: Apache-2.0
"""Access to parameters and their states by name: gathered, read, written and loaded as whole tensors, between steps."""

# SPDX-License-Identifier: Apache-2.0
"""Import of checkpoints: those of other projects converted into ours, read without running what they name."""

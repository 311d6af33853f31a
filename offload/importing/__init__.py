# SPDX-License-Identifier: Apache-2.0
"""Other projects' checkpoints, read without running what they name."""

# SPDX-License-Identifier: Apache-2.0
"""`train`: the run, its checkpoints, what it says and measures."""

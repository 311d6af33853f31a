# SPDX-License-Identifier: Apache-2.0
"""Saving, loading and exporting between two steps; what a checkpoint is made of, and how ranks of another number read it."""

# SPDX-License-Identifier: Apache-2.0
"""Initialisers recorded on the meta device, and replayed unit by unit."""

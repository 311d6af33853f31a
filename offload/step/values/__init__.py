# SPDX-License-Identifier: Apache-2.0
"""Whole values by name, as users read and write them between steps."""

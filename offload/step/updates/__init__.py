# SPDX-License-Identifier: Apache-2.0
"""The optimizer step: records read, updated and written, and where new parameter values go."""

# SPDX-License-Identifier: Apache-2.0
"""The engine run on a machine in numbers: what a step would take there."""

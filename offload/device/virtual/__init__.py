# SPDX-License-Identifier: Apache-2.0
"""A machine in numbers: its links, lanes and memory take virtual time, and nothing is moved."""

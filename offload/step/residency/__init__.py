# SPDX-License-Identifier: Apache-2.0
"""Which units are in device memory: what is fetched, when, and what leaves."""

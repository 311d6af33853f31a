# SPDX-License-Identifier: Apache-2.0
"""From a trace and budgets to a route for each unit: numbers only, no I/O."""

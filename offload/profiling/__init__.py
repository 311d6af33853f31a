# SPDX-License-Identifier: Apache-2.0
"""What was recorded of a step as a trace; what a trace says, and what would help."""

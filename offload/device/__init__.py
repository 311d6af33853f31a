# SPDX-License-Identifier: Apache-2.0
"""Every asynchronous verb of an accelerator, who is told of it, lanes of host work, and the arithmetic of updates."""

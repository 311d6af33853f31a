# SPDX-License-Identifier: Apache-2.0
"""The state of one moment, copied while training waits or goes on, by the one lane that writes it."""

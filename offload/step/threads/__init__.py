# SPDX-License-Identifier: Apache-2.0
"""Threads that come to the model: which of them may go through it, what Ctrl-C waits for, what a failure leaves."""

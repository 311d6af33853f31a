# SPDX-License-Identifier: Apache-2.0
"""Who may go through the model, what Ctrl-C waits for, what a failure leaves, and who waited for whom."""

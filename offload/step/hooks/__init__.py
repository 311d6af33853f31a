# SPDX-License-Identifier: Apache-2.0
"""What the model and autograd tell the engine."""

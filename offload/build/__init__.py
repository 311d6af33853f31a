# SPDX-License-Identifier: Apache-2.0
"""From a model and a config to an engine: takes the model, or leaves it as it was.

What an engine holds from its begin to its end is allocated here.
"""

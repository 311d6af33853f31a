# SPDX-License-Identifier: Apache-2.0
"""From a model and a config to an engine: takes the model, or leaves it as it was. The only room that allocates."""

# SPDX-License-Identifier: Apache-2.0
"""Weights for others: safetensors, adapters, DeepSpeed's universal checkpoint; from an engine or a checkpoint's folder."""

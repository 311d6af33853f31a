# SPDX-License-Identifier: Apache-2.0
"""What is computed on flat tensors: optimizer steps, gradient ingest, casts, encodings of states; native, by torch, on CUDA."""

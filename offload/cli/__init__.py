# SPDX-License-Identifier: Apache-2.0
"""`python -m offload`: a module for each command (`main.py` lists them). An adapter on the public API."""

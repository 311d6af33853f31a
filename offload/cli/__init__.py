# SPDX-License-Identifier: Apache-2.0
"""`python -m offload`: train, plan, probe, bench and info. An adapter on the public API."""

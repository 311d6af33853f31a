# SPDX-License-Identifier: Apache-2.0
"""Memory of the host: how much there is, pages that move, mappings, what is given back to the system."""

# SPDX-License-Identifier: Apache-2.0
"""Training loops of other frameworks on an engine. Each module needs its framework; the package itself needs none of them."""

# SPDX-License-Identifier: Apache-2.0
"""`plan` and `probe`: what training would take, on the machine at hand or another, and how that is measured."""

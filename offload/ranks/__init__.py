# SPDX-License-Identifier: Apache-2.0
"""The group of ranks (of one, or of a machine in numbers): who is in it, transport, agreement, the rendezvous, averages."""

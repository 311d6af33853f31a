# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint consists of: its manifest and files, written whole or not at all, and checked before they are used."""

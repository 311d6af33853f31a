# SPDX-License-Identifier: Apache-2.0
"""Acceptance tests: what a user of the project may rely on, written against the public interface alone."""

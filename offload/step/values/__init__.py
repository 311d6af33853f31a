"""Whole values by name, as users read and write them between steps."""

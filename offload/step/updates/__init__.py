"""The optimizer step: records read, updated and written, and where new parameter values go."""

"""Which units are in device memory: what is fetched, when, and what leaves."""

"""Ratios measured in one run: `make bench`, or `python -m benchmarks NAME`; results are kept in RESULTS.md."""

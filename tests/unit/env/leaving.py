"""A module that ends the process when it is imported, as a script might."""

raise SystemExit(3)

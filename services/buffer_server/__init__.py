"""The buffer server."""

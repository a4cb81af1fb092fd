"""The three services; installed as `rlightning.services`."""

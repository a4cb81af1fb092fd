"""What the env adapters share."""

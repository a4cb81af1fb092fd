"""The env server: hosts envs and runs the actor loop."""

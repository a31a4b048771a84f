"""Trajectories of several turns: a policy that writes, and tools and environments that answer it."""

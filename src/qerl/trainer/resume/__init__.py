"""Checkpoints that are whole or not there, and runs that go on from them bit for bit."""

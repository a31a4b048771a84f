"""Environments: built-in ones, and adapters to those of other packages, by name."""

from qerl.environments.registry import get_environment

__all__ = ["get_environment"]

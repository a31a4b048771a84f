"""Kernels of a decode step, one file each."""

from qerl.kernels.triton_target import follow_environment

follow_environment()

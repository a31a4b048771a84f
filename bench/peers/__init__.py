"""Peers: other libraries doing the same work as a benchmark, each in a subprocess.

A peer may need package versions that conflict with ours, takes most of a GPU and leaves processes behind; so
it never runs in the interpreter of the benchmark. `process` starts it, reads its rows and ends it;
`checkpoint` writes the folders from which it loads a model; `vllm_decode` and `trl_step` run in the
subprocess, at the settings that each module states.
"""

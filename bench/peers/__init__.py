"""Other people's software doing the same work as a benchmark, in a process of its own.

A peer may need versions of packages that do not go together with ours, takes most of a GPU and leaves
processes behind; so it never shares an interpreter with what it is compared with. `process` starts it, reads
its rows and ends it; `checkpoint` writes the folders it loads a model from; `vllm_decode` and `trl_step` run
in that process, each at the settings that its module states.
"""

"""A testbed that is ours: generated problems, and a Llama of 31M parameters that knows them by a set prior.

`language` says what problems, right answers and habits are, `problems` draws them as text that a model
reads, `pretraining` makes the model, `measure` says how often it is right, and `task` asks it in studies and
in `qerl train`. `python -m lab testbed` makes all of it (`command`).
"""

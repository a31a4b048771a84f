"""A testbed of our own: generated problems, and a Llama of 31M parameters that solves them with a set prior.

`language` defines problems, right answers and habits, `problems` draws them as token ids, `pretraining`
trains the model, `measure` measures how often it is right, and `task` makes a task of them for studies and
`qerl train`. `python -m lab testbed` (`command`) trains and measures the model.
"""

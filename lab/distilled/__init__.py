"""What distillation gives a small real model: a learned adapter taught anew, and 16 bits taught to four.

lab/distilled/plan.yaml says which runs there are, what is asked of them and how it is answered, and was
committed before they ran; `runs` computes them, every seed in a process of its own.
`lab.writers.distilled_tables` answers.
"""

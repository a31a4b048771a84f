"""Whole runs of the trainer on a small real model, by plans that were committed before they ran.

    distilled.yaml     what distillation gives: a learned adapter taught anew, and 16 bits taught to four
    refilled.yaml      what rows refilled across optimizer steps cost; its task is `chains`

A plan says which runs there are, what is asked of them and how it is answered; `runs` computes them, every
seed in a process of its own, and `clock` says what their steps would take a larger model.
`lab.writers.distilled_tables` and `lab.writers.refilled_tables` answer.
"""

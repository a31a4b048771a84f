"""Whole runs of the trainer on a small real model, by plans that were committed before they ran.

    distilled.yaml     the gain of distillation: a trained adapter into a fresh one, and 16 bits into four
    refilled.yaml      the cost of rows refilled across optimizer steps; its task is `chains`

A plan lists the runs, the questions about them and how these are answered; `runs` computes the runs, each
seed in a process of its own, and `clock` estimates how long their steps would take with a larger model.
`lab.writers.distilled_tables` and `lab.writers.refilled_tables` answer the questions.
"""

"""Sums for a tiny hybrid of gated delta nets and attention that is trained from scratch here.

`policy` makes a Qwen3.5 of four layers that adds two numbers below 100, right four times in ten, `task` asks
it for sums, and `runs` lets it learn the rest by GRPO on its packed base, beside runs with a rate of 0.
"""

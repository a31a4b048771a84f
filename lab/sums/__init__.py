"""Sums for a tiny hybrid of gated delta nets and attention, or a tiny mixture, trained from scratch here.

`policy` makes a Qwen3.5 or a Qwen3-MoE of four layers that adds two numbers below 100, right four times in
ten; `task` asks it for sums; `runs` trains it further by GRPO on its packed base, beside runs with a learning
rate of 0.
"""

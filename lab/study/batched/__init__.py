"""S runs on one frozen base, in one process.

Training a small model is bound by its host: a step of 135M parameters is some ten thousand kernel launches
for a few milliseconds of arithmetic, and parallel processes would share none of the launches. Here the runs
of a study share every launch. Each run has its own LoRA matrices, data, random numbers, noise and learning
rate; the base weights, and with them the large matrix products, are shared. No parameter belongs to two runs,
so one backward pass of the sum of their losses gives each run its own gradient.

`model` is the forward pass of S runs, `prompts` the part of it that the samples of a prompt share,
`attention` the attention of samples; `sampler` has rollouts, whose tokens `draw` draws; `score`, `objective`
and `trainer` make the update; `norms` and `noise` are the exploration of a run. `trained` holds the trained
parameters and their optimizer: `adapters` for LoRA, `full` for all weights.

A run computes the same as `QeRLTrainer` with one loss per step; a test compares the two. Given up for that:
samples of many thousand tokens (see `attention`), minibatches within a step, models that do not fit beside S
copies of their activations, and four-bit products: a packed weight is dequantised once, to the same values,
because a model that is small enough for a study is cheaper to read in 16 bits than to unpack in each step.
"""

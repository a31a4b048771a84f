"""S runs on one frozen base, in one process.

A run of a small model is bound by its host: a step of 135M parameters is some ten thousand kernel launches
for a few milliseconds of arithmetic, and processes side by side share nothing but the wait. Here the runs
of a study share every launch. Each has its own LoRA matrices, data, random numbers, noise and learning
rate; base weights, and with them the large products, are one for all. No parameter belongs to two runs, so
one backward pass of the sum of their losses gives each its own gradient.

`model` is the forward pass of S runs, `prompts` what the samples of a prompt share of it, `attention` what a
sample sees; `sampler` has rollouts, whose tokens `draw` draws, `score`, `objective` and `trainer` the update,
`norms` and `noise` what a run explores with. `trained` is what a run trains, and its optimizer: `adapters`,
or in `full` all weights.

What a run computes is what `QeRLTrainer` computes with one loss per step; a test compares the two. Given up
for that: samples of many thousand tokens (see `attention`), minibatches within a step, models that do not fit
beside S copies of their activations, and four-bit products: a packed weight is dequantised once, because a
model that is small enough for a study is cheaper to read in 16 bits than to unpack in each step. Its values
are those of the packed one.
"""

"""The forward-only study: what does a perturbation of the sampler buy for the distance that it costs?

No policy is trained here. Fixed policies sample the same problems with the same uniform numbers, clean and
under each perturbation, and every perturbation is brought to the same mean KL(sampler || clean) a token first
(`calibrate`), because its own strength (a sigma, a temperature) says nothing that could be compared. What is
compared then: how often a sample is right, how often one of k is, how many answers there are, and how far the
decisive tokens of a right solution move. Formats of the weights are compared in the same way, at temperature
1 and at equal entropy.

What was given up: a forward pass knows nothing of what training makes of the samples. A perturbation that
finds no more right answers a nat than temperature does cannot help by exploration; one that does still has to
learn.

`perturb` says what a perturbation is; `walk` draws samples under it and under the clean policy at once;
`measure` turns them into numbers by problem; `spec` reads a probe's YAML, `material` asks the tasks and
`policies` loads the models; `plan` lists the cells, `command` measures them, and goes on after an
interruption with what `store` kept; `summary` and `page` say what was found.
"""

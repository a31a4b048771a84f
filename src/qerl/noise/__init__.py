"""Adaptive quantization noise (AQN): exploration by perturbing the RMSNorm weights of the rollout policy.

The paper (QeRL, arXiv 2510.11696) draws one vector Z ~ N(0, sigma^2 I) per norm and adds it to the norm's
weight, w_noise = w + Z. With x_hat the normalised input of a layer,

    x_hat * (w + Z)  =  (x_hat * w) * (Z / w + 1),

which is the same as scaling input channel i of the next weight by Z_i / w_i + 1: multiplicative noise on the
rows of W^T that costs one vector per norm. One Z serves q/k/v (the norm before attention), one gate/up (the
norm before the MLP); o and down get none. sigma falls in K stages over the run; stage 0 has no noise.

``schedule`` computes sigma by step, ``draw`` draws Z, and ``norms`` finds the norms and temporarily replaces
their weights by w + Z.
"""

"""Generation with offloaded experts: the model's own gate decides, a policy and hardware follow.

Experts lie in host memory; the GPU has slots for some of them. At every gate the engine asks the
policy, as in a simulation, and what it decided is carried out with real copies and kernels
(:mod:`oled_sim.hardware`). Needs the ``torch`` extra.
"""

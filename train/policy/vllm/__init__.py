"""vLLM as the sampler of the local trainer: in a process of its own, on the trainer's GPU, without Ray."""

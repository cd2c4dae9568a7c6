"""A decoder's forward pass for sampling, on a CPU and on a GPU."""

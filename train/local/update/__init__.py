"""One update of the policy: rows of trajectories, forward passes, the loss, the optimizer, and their memory."""

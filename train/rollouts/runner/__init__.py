"""The runner's side: an attempt of a rollout, from its check to its spans, and the pool that runs many."""

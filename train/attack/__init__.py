"""Attack a reward with a policy that learns what it pays, and watch a training run for what was learned."""

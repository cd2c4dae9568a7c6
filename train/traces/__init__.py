"""What agents have already done: exported traces of any tracer as rollouts, and tasks and a reward made of them."""

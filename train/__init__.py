"""Training: rollouts, the embedded trainer, and the command line."""

"""Public agents, run as they are against a scripted model."""

"""Runs rollouts and collects their results."""

"""Evaluates policies and explains rollouts, from rows of rollouts: of a training run or of an evaluation."""

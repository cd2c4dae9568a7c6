"""Rollouts in processes of their own, so that none leaves anything behind for another."""

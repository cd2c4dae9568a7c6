"""Rewards for text-to-SQL: execution match by the official rules."""

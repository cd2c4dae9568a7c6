"""Rewards for text-to-SQL: execution match by the official rules, and a dense reward."""

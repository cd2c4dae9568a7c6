"""Kills, full disks, damaged files and hostile requests, repeated from a seed: ``make chaos``."""

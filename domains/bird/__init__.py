"""BIRD: questions with evidence over large SQLite databases, answered with SQL and judged by execution accuracy."""

from __future__ import annotations

from groundwire.domains.bird.loader import BirdDomain, domain

__all__ = ["BirdDomain", "domain"]

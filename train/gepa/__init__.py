"""Optimisation of an agent's prompts with the ``gepa`` package: ``--trainer gepa``. The model stays as it is."""
